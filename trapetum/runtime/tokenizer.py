"""Text to token ids and back: a thin layer over the ``tokenizers`` library, with streaming and chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trapetum.errors import CheckpointError, FormatError, RecipeError

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource

__all__ = ["TextStream", "Tokenizer", "generation_eos", "read_text"]

_UNFINISHED = "\ufffd"  # what a decoder gives for bytes that are not (yet) a whole character


class Tokenizer:
    """A model's ``tokenizer.json``.

    Parameters
    ----------
    path : Path
        The tokenizer.json; tokenizer_config.json and chat_template files are looked for beside it.

    Raises
    ------
    CheckpointError
        If the file cannot be read as a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self.path = path
        try:
            # by text, not by path: a path that is not UTF-8 would fail inside the library
            self._backend = Backend.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: not a tokenizer that can be read: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()

    @classmethod
    def from_source(cls, source: TensorSource) -> Self:
        """The tokenizer that lies beside the weights.

        Raises
        ------
        CheckpointError
            If there is none.
        """
        path = source.tokenizer_file()
        if path is None:
            raise CheckpointError(
                f"{source.path}: there is no tokenizer.json beside the weights",
                hint="put the model's tokenizer.json there, or work with token ids",
            )
        return cls(path)

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        text : str
        add_special_tokens : bool
            Let the tokenizer put its own marks (usually a begin token) around the text. Off by default: an
            evaluation text is cut into windows and has no beginning, and a chat template writes its marks
            itself.

        Raises
        ------
        CheckpointError
            If the tokenizer contradicts itself.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # what the library raises, as for an unknown token that it does not have
            raise CheckpointError(f"{self.path}: does not encode a text: {error}") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling, None if there is no such token."""
        return self._backend.token_to_id(token)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return _read_json(self.path.with_name("tokenizer_config.json"))

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template: chat_template.jinja, else the entry in tokenizer_config.json."""
        file = self.path.with_name("chat_template.jinja")
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, UnicodeError) as error:
                raise CheckpointError(f"{file}: not a template that can be read: {error}") from error
        stated = self._settings.get("chat_template")
        if isinstance(stated, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in stated if isinstance(t, Mapping)}
            stated = named.get("default")
        return stated if isinstance(stated, str) else None

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation with the model's template, sandboxed.

        Parameters
        ----------
        messages : sequence of {"role": ..., "content": ...}
        add_generation_prompt : bool
            End where the assistant's answer begins.

        Returns
        -------
        str
            Text with its special tokens spelled out: encode it without adding more.

        Raises
        ------
        CheckpointError
            If the model has no template, or the template is faulty or fails.
        RecipeError
            If the template refuses the conversation.
        """
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.chat_template is None:
            raise CheckpointError(
                f"{self.path.parent}: the model has no chat template", hint="run it with a plain prompt"
            )

        def refuse(reason: str) -> str:
            raise RecipeError(f"the model's chat template refuses the conversation: {reason}")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=refuse, strftime_now=_now)
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._special_tokens()
            )
        except RecipeError:
            raise
        except Exception as error:  # a template computes: it may divide by zero, or add a text to a number
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise CheckpointError(f"{self.path.parent}: the chat template fails: {said}") from error

    def _special_tokens(self) -> dict[str, str]:
        """``bos_token``, ``eos_token`` ...: plain strings, or the older {"content": ...} form."""
        found = {}
        for key, value in self._settings.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
        return found


class TextStream:
    """Text of a growing sequence of tokens; the pieces together are the text of the whole.

    A token may end inside a character, and decoders look at their neighbours (a leading space is dropped at the start
    only). So each step decodes from a token boundary at which the text was complete, and holds back what may still
    change: the replacement characters at its end. (One case is beyond any stream: a decoder with byte fallback that
    meets bytes that never become valid replaces whole characters before them, too.)

    Parameters
    ----------
    tokenizer : Tokenizer
    stop : sequence of str
        Strings that end the text; neither they nor what follows is given out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if any(not s for s in stop):
            raise RecipeError("a stop string is empty")
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._from, self._complete = 0, 0  # decode from the first; up to the second the text was complete
        self._given = 0  # characters of the text from there that were given out
        self._held = ""  # decoded, but it may be the beginning of a stop string

    def push(self, token: int) -> str:
        """Add a token; returns the text that it completes."""
        self._ids.append(token)
        return self._emit(self._take(final=False), final=False)

    def finish(self) -> str:
        """Whatever is left, incomplete characters included."""
        return self._emit(self._take(final=True), final=True)

    def _take(self, *, final: bool) -> str:
        text = self._tokenizer.decode(self._ids[self._from :])
        sure = len(text if final else text.rstrip(_UNFINISHED))
        new = text[self._given : sure]
        self._given = max(self._given, sure)
        if sure == len(text):
            self._from, self._complete = self._complete, len(self._ids)
            self._given = len(self._tokenizer.decode(self._ids[self._from :]))
        return new

    def _emit(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0
        if not final:
            keep = max((k for s in self._stop for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def generation_eos(source: TensorSource) -> tuple[int, ...]:
    """``eos_token_id`` of generation_config.json beside the weights; empty where there is none."""
    for file in source.side_files():
        if file.name == "generation_config.json":
            value = _read_json(file).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            return tuple(v for v in values if isinstance(v, int) and v >= 0)
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    import json

    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return value


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML, which templates for language models do not want."""
    import json

    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)


def read_text(path: Path) -> str:
    """The content of a text file, as UTF-8 in every locale, line ends as they are.

    Parameters
    ----------
    path : Path
        A file.

    Raises
    ------
    RecipeError
        If the file cannot be read.
    FormatError
        If the file is not UTF-8; the message names the first bad byte.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: byte {error.start} is 0x{data[error.start]:02x}, which is not UTF-8 text",
            hint=f"Convert it first: iconv -f latin1 -t utf-8 {path.name} > {path.stem}-utf8.txt",
        ) from None
