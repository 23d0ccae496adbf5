r"""tokenizer.json -> ``tokenizer.ggml.*``, the vocabulary that llama.cpp builds its own tokenizer from.

========================  ===========================================================================================
tokenizer.json            GGUF
========================  ===========================================================================================
byte-level BPE            model ``gpt2``: tokens, merges, and in ``pre`` the name of the rule that splits a text first
BPE with byte fallback    model ``llama``: tokens and scores; the score of a token is minus the rank of its first merge
added tokens              type 3 (control) where special or spelled like one, else 4 (user-defined)
ids without a token       ``[PADi]``, type 5 (unused): llama.cpp wants one distinct token for each embedding row
========================  ===========================================================================================

llama.cpp splits by a rule that is compiled in under a name, so a rule that has no name there cannot be exported: other
tokens would come out without any error. The same holds for normalizers that it does not have.

Source: llama.cpp, src/llama-vocab.cpp (names and rules); the tokenizers library (tokenizer.json).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.formats.gguf_tokenizer import PRE_TOKENIZERS
from trapetum.formats.gguf_values import KeyValue, ValueType
from trapetum.formats.strict_json import parse_json, shown

__all__ = ["tokenizer_pairs"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_CONTROL_LOOKS = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<pad>|<mask>|<unused\d+>", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_HINT = "Export to hf instead, or ask for this tokenizer to be added: nothing was written."

_Step = tuple[Any, ...]


def tokenizer_pairs(
    files: Mapping[str, Path], config: Mapping[str, Any], rows: int
) -> tuple[dict[str, KeyValue], list[str]]:
    """Everything about the tokenizer that a GGUF of the model says.

    Parameters
    ----------
    files : mapping of file name to Path
        ``tokenizer.json``; also used where there: ``tokenizer_config.json``, ``chat_template.jinja``,
        ``chat_template.json``.
    config : mapping
        The text part of config.json, for the ids of special tokens.
    rows : int
        Rows of the embedding.

    Returns
    -------
    pairs : dict of key to KeyValue
    notes : list of str
        Where llama.cpp may split a text in another way.

    Raises
    ------
    CheckpointError
        If there is no tokenizer.json, it contradicts itself, or it has more tokens than the embedding has rows.
    UnsupportedModelError
        If llama.cpp has no counterpart of the tokenizer.
    """
    path = files.get("tokenizer.json")
    if path is None:
        raise CheckpointError(
            "the model has no tokenizer.json, and a GGUF without a vocabulary answers nothing",
            hint="Put the model's tokenizer.json beside the weights; transformers writes one with "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER).",
        )
    content = _object(path)
    settings = _object(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    model = content.get("model")
    if (
        not isinstance(model, dict)
        or model.get("type", "BPE") != "BPE"
        or not isinstance(model.get("vocab"), dict)
    ):
        kind = model.get("type") if isinstance(model, dict) else None
        raise UnsupportedModelError(
            f"{path}: the tokenizer is of the kind {shown(kind)}; BPE can be exported", hint=_HINT
        )
    vocabulary = _Vocabulary(path, content, rows)
    steps = _flat(content.get("pre_tokenizer"), "pretokenizers")
    notes: list[str] = []
    if any(step.get("type") == "ByteLevel" for step in steps):
        own = _byte_level(path, content, steps, vocabulary, notes)
    else:
        own = _sentencepiece(path, content, steps, vocabulary)
    pairs = {**own, **_special_pairs(path, content, settings, config, vocabulary, notes)}
    return {**pairs, **_chat_pairs(files, settings)}, notes


class _Vocabulary:
    """Tokens by id, with their types; every id below ``rows`` has one."""

    def __init__(self, path: Path, content: Mapping[str, Any], rows: int) -> None:
        self.path, self.rows = path, rows
        self.ids: dict[str, int] = dict(content["model"]["vocab"])
        self.added: dict[int, Mapping[str, Any]] = {}
        for entry in content.get("added_tokens") or []:
            text, i = entry["content"], entry["id"]
            if self.ids.setdefault(text, i) != i:
                raise CheckpointError(f"{path}: the token {shown(text)} has the ids {self.ids[text]} and {i}")
            self.added[i] = entry
        by_id: dict[int, str] = {}
        for text, i in self.ids.items():
            if isinstance(i, bool) or not isinstance(i, int) or i < 0:
                raise CheckpointError(f"{path}: the token {shown(text)} has the id {shown(i)}")
            if i in by_id:
                raise CheckpointError(f"{path}: {shown(by_id[i])} and {shown(text)} both have the id {i}")
            by_id[i] = text
        count = max(by_id, default=-1) + 1
        if count > rows:
            raise CheckpointError(
                f"{path}: the tokenizer has ids for {count} tokens, the embedding has {rows} rows",
                hint="The tokenizer belongs to another model, or tokens were added without resizing the embedding.",
            )
        self.tokens, self.types = [by_id.get(i, "") for i in range(rows)], [_NORMAL] * rows
        for i, entry in self.added.items():
            special = entry.get("special") or _CONTROL_LOOKS.fullmatch(entry["content"])
            self.types[i] = _CONTROL if special else _USER_DEFINED
        self.unused = [i for i in range(rows) if i not in by_id]
        for i in self.unused:
            text = f"[PAD{i}]"
            while text in self.ids:
                text += "_"
            self.tokens[i], self.types[i] = text, _UNUSED

    def pairs(self) -> dict[str, KeyValue]:
        """Tokens and types; no two tokens may be spelled alike."""
        if len(set(self.tokens)) != self.rows:
            twice = next(t for t in self.tokens if self.tokens.count(t) > 1)
            raise CheckpointError(f"{self.path}: two tokens would be spelled {shown(twice)} in a GGUF")
        return {
            "tokenizer.ggml.tokens": _array(self.tokens, ValueType.STRING),
            "tokenizer.ggml.token_type": _array(self.types, ValueType.INT32),
        }


# ---------------------------------------------------------------------------- the two kinds
def _byte_level(
    path: Path,
    content: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    vocabulary: _Vocabulary,
    notes: list[str],
) -> dict[str, KeyValue]:
    model = content["model"]
    for normalizer in _flat(content.get("normalizer"), "normalizers"):
        if normalizer.get("type") != "NFC":
            raise UnsupportedModelError(
                f"{path}: the normalizer {shown(normalizer.get('type'))} has no counterpart in llama.cpp",
                hint=_HINT,
            )
        notes.append("llama.cpp does not normalize texts to Unicode NFC as the tokenizer does")
    if any(step.get("type") == "ByteLevel" and step.get("add_prefix_space", True) for step in steps):
        raise UnsupportedModelError(
            f"{path}: the tokenizer puts a space before a text (add_prefix_space), which llama.cpp does not do",
            hint=_HINT,
        )
    return {
        "tokenizer.ggml.model": KeyValue.text("gpt2"),
        "tokenizer.ggml.pre": KeyValue.text(_pre_name(path, steps, bool(model.get("ignore_merges")))),
        **vocabulary.pairs(),
        "tokenizer.ggml.merges": _array(
            [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in _merges(path, model)],
            ValueType.STRING,
        ),
    }


def _sentencepiece(
    path: Path, content: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], vocabulary: _Vocabulary
) -> dict[str, KeyValue]:
    model = content["model"]
    prefix = _space_prefix(_flat(content.get("normalizer"), "normalizers"), steps)
    if prefix is None or not model.get("byte_fallback"):
        raise UnsupportedModelError(
            f"{path}: the tokenizer is neither byte-level BPE nor SentencePiece BPE with byte fallback",
            hint=_HINT,
        )
    ranks: dict[str, int] = {}
    merges = _merges(path, model)
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    unmade = len(merges) + 1  # after everything that a merge makes
    scores: list[float] = []
    for i, token in enumerate(vocabulary.tokens):
        if token == model.get("unk_token"):
            vocabulary.types[i] = _UNKNOWN
        elif _BYTE_TOKEN.fullmatch(token) and vocabulary.types[i] != _UNUSED:
            vocabulary.types[i] = _BYTE
        elif vocabulary.types[i] == _USER_DEFINED:
            vocabulary.tokens[i] = token.replace(_SPACE, " ")
        made = i not in vocabulary.added and token in ranks
        scores.append(0.0 if vocabulary.types[i] == _BYTE else -float(ranks[token] if made else unmade))
    return {
        "tokenizer.ggml.model": KeyValue.text("llama"),
        "tokenizer.ggml.pre": KeyValue.text("default"),
        **vocabulary.pairs(),
        "tokenizer.ggml.scores": _array(scores, ValueType.FLOAT32),
        "tokenizer.ggml.add_space_prefix": _flag(prefix),
    }


def _space_prefix(
    normalizers: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> bool | None:
    """Whether a space goes before a text; None for any other treatment of spaces."""
    replace = ("Replace", " ", _SPACE)
    found = [_spelled(n) for n in normalizers]
    if not steps:
        return {(("Prepend", _SPACE), replace): True, (replace,): False}.get(tuple(found))
    if len(steps) == 1 and steps[0].get("type") == "Metaspace" and not found:
        scheme = steps[0].get("prepend_scheme")
        always = scheme != "never" if scheme is not None else bool(steps[0].get("add_prefix_space", True))
        return always if steps[0].get("replacement") == _SPACE and not steps[0].get("split") else None
    return None


def _spelled(normalizer: Mapping[str, Any]) -> _Step:
    kind = normalizer.get("type")
    if kind == "Prepend":
        return kind, normalizer.get("prepend")
    if kind == "Replace":
        return kind, (normalizer.get("pattern") or {}).get("String"), normalizer.get("content")
    return (kind,)


def _merges(path: Path, model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Both spellings: ``"a b"`` and ``["a", "b"]``."""
    pairs = []
    for merge in model.get("merges") or []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
            raise CheckpointError(f"{path}: {shown(merge)} is not a merge of two tokens")
        pairs.append((parts[0], parts[1]))
    return pairs


# ---------------------------------------------------------------------------- how a text is split first
def _pre_name(path: Path, steps: Sequence[Mapping[str, Any]], ignore_merges: bool) -> str:
    signature = tuple(map(_step, steps))
    named = {(tuple(map(_step, known)), ignore): name for name, (known, ignore) in _all_rules()}
    name = named.get((signature, ignore_merges))
    if name is None:
        rules = ", ".join(
            shown(part) for step in signature for part in step if part not in (None, True, False)
        )
        raise UnsupportedModelError(
            f"{path}: no pre-tokenizer of llama.cpp that is known here splits a text like this: {rules}, "
            f"ignore_merges {str(ignore_merges).lower()}",
            hint=_HINT,
        )
    return name


def _all_rules() -> list[tuple[str, tuple[list[dict[str, Any]], bool]]]:
    """Later entries win in a dict, so the plainest name of a rule goes last."""
    return list(PRE_TOKENIZERS.items())[::-1]


def _step(step: Mapping[str, Any]) -> _Step:
    """What of a pre-tokenizer decides where a text is cut."""
    kind = step.get("type")
    if kind == "Split":
        pattern = step.get("pattern") or {}
        text = str(pattern.get("Regex", pattern.get("String")))
        text = text.replace("\r", r"\r").replace("\n", r"\n")  # some files hold the characters themselves
        return kind, text, step.get("behavior"), bool(step.get("invert"))
    if kind == "Digits":
        return kind, bool(step.get("individual_digits"))
    if kind == "ByteLevel":
        return kind, bool(step.get("use_regex", True))
    return (kind, *sorted(map(repr, step.items())))


# ---------------------------------------------------------------------------- special tokens and chat
def _special_pairs(
    path: Path,
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    vocabulary: _Vocabulary,
    notes: list[str],
) -> dict[str, KeyValue]:
    ids: dict[str, int] = {}
    for ours in _SPECIAL:
        stated = settings.get(f"{ours}_token")
        text = stated.get("content") if isinstance(stated, Mapping) else stated
        listed = config.get(f"{ours}_token_id")
        first = listed[0] if isinstance(listed, list) and listed else listed
        found = vocabulary.ids.get(text) if isinstance(text, str) else first
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < vocabulary.rows:
            ids[ours] = found
    before, after = _template(path, content.get("post_processor"))
    add_bos, add_eos = bool(before), bool(after)
    if before is None:  # nothing but the settings says so
        add_bos, add_eos = (bool(settings.get(f"add_{which}_token")) for which in ("bos", "eos"))
    for which, marks in (("bos", before), ("eos", after)):
        if marks:
            ids[which] = marks[0]
    if "eos" in ids:
        ids.setdefault("bos", ids["eos"])  # without one llama.cpp takes token 11
    else:
        notes.append("no end token is known; llama.cpp stops only where it recognises one by its spelling")
    add_bos, add_eos = add_bos and "bos" in ids, add_eos and "eos" in ids
    pairs = {f"tokenizer.ggml.{_SPECIAL[k]}_token_id": KeyValue.count(i) for k, i in ids.items()}
    ends = config.get("eos_token_id")
    others = [
        i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int) and i != ids.get("eos")
    ]
    for key, i in zip(("eot", "eom"), (i for i in others if 0 <= i < vocabulary.rows)):
        pairs[f"tokenizer.ggml.{key}_token_id"] = KeyValue.count(i)
    pairs["tokenizer.ggml.add_bos_token"] = _flag(add_bos)
    pairs["tokenizer.ggml.add_eos_token"] = _flag(add_eos)
    return pairs


def _template(path: Path, processor: Any) -> tuple[list[int] | None, list[int] | None]:
    """Ids put before and after a text; (None, None) where the file has no template."""
    for part in _flat(processor, "processors"):
        if part.get("type") != "TemplateProcessing":
            continue
        known = part.get("special_tokens") or {}
        sides: tuple[list[int], list[int]] = ([], [])
        after = 0
        for piece in part.get("single") or []:
            if "Sequence" in piece:
                after = 1
                continue
            sides[after].extend(known[piece["SpecialToken"]["id"]]["ids"])
        if max(map(len, sides)) > 1:
            raise UnsupportedModelError(
                f"{path}: the tokenizer puts {len(sides[0])} tokens before and {len(sides[1])} after a text; "
                "llama.cpp puts at most one",
                hint=_HINT,
            )
        return sides
    return None, None


def _chat_pairs(files: Mapping[str, Path], settings: Mapping[str, Any]) -> dict[str, KeyValue]:
    stated: Any = settings.get("chat_template")
    if "chat_template.json" in files:
        stated = _object(files["chat_template.json"]).get("chat_template", stated)
    if "chat_template.jinja" in files:
        stated = files["chat_template.jinja"].read_text(encoding="utf-8")
    named: dict[str, str] = {"default": stated} if isinstance(stated, str) else {}
    if isinstance(stated, list):
        entries = [t for t in stated if isinstance(t, Mapping)]
        named = {str(t.get("name")): t["template"] for t in entries if isinstance(t.get("template"), str)}
    pairs = {"tokenizer.chat_template": KeyValue.text(named.pop("default"))} if "default" in named else {}
    for name, text in named.items():
        pairs[f"tokenizer.chat_template.{name}"] = KeyValue.text(text)
    if named:
        pairs["tokenizer.chat_templates"] = _array(sorted(named), ValueType.STRING)
    return pairs


# ---------------------------------------------------------------------------- small things
def _object(path: Path) -> dict[str, Any]:
    found = parse_json(path.read_bytes(), str(path), constants=True)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return found


def _flat(part: Any, key: str) -> list[Mapping[str, Any]]:
    """The steps of a (nested) Sequence, or the one step that there is."""
    if not isinstance(part, Mapping):
        return []
    return (
        [s for inner in part.get(key) or [] for s in _flat(inner, key)]
        if part.get("type") == "Sequence"
        else [part]
    )


def _flag(value: bool) -> KeyValue:
    return KeyValue(value, ValueType.BOOL)


def _array(values: Sequence[Any], kind: ValueType) -> KeyValue:
    return KeyValue(values, ValueType.ARRAY, kind)
