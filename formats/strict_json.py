"""JSON as untrusted files hold it: every failure is one sentence, and a key that appears twice is an error.

Python's own reader keeps the last of two equal keys, others the first: a file with a duplicate would mean two
different models to two programs. Used for safetensors headers, the shard index and config files.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from trapetum.errors import FormatError

__all__ = ["parse_json", "require_text", "shown"]


def parse_json(data: bytes, what: str, *, constants: bool = False) -> Any:
    """Parse one UTF-8 JSON text.

    Parameters
    ----------
    data : bytes
        The text, without a byte order mark.
    what : str
        Begins every message, such as ``"model.safetensors: header"``.
    constants : bool, default False
        Accept NaN, Infinity and -Infinity, which are not JSON but which some config files hold.

    Raises
    ------
    FormatError
        If the text is not UTF-8, not JSON, repeats a key, is nested too deeply or holds a number too long.
    """

    def no_constant(word: str) -> NoReturn:
        raise FormatError(f"{what} is not valid JSON: it holds {word}, which is not a JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise FormatError(f"{what} holds the key {shown(key)} twice; each may appear once")
                seen.add(key)
        return made

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None
    try:
        if constants:
            return json.loads(text, object_pairs_hook=unique)
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        near = shown(text[error.pos : error.pos + 20])
        raise FormatError(
            f"{what} is not valid JSON: {error.msg} at character {error.pos}, near {near}"
        ) from None
    except RecursionError:
        raise FormatError(f"{what} is not usable: its JSON is nested too deeply") from None
    except ValueError:  # int() refuses more than 4300 digits
        raise FormatError(f"{what} is not usable: it holds a number of more than 4300 digits") from None


def require_text(value: Any, what: str) -> None:
    """Refuse a value that cannot be written again: JSON can spell half a surrogate pair (``"\\ud800"``), UTF-8 cannot.

    Raises
    ------
    FormatError
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        near = shown(error.object[max(error.start - 40, 0) : error.start + 20])
        raise FormatError(f"{what} is not usable: half a surrogate pair near {near}") from None


def shown(value: object, limit: int = 120) -> str:
    """A found value as it may stand in a one-line message: quoted, escaped, bounded.

    Examples
    --------
    >>> shown("a\\nb"), shown("x" * 300, 5)
    ("'a\\\\nb'", "'xxxx...")
    """
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."
