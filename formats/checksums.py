"""SHA-256 of files, and ``SHA256SUMS`` as ``sha256sum --check`` reads it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from trapetum.errors import FormatError
from trapetum.formats.strict_json import shown

__all__ = ["file_sha256", "parse_sums", "sums_bytes"]

_BLOCK = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def file_sha256(path: str | os.PathLike[str], start: int = 0) -> str:
    """Hex digest of a file from byte ``start`` on, read by 1 MiB blocks without mapping it.

    Raises
    ------
    FormatError
        If it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def sums_bytes(sums: Mapping[str, str]) -> bytes:
    """``SHA256SUMS``: one line ``DIGEST  NAME`` a file, sorted by name.

    Examples
    --------
    >>> sums_bytes({"b": "0" * 64, "a": "1" * 64}).decode().splitlines()[0][60:]
    '1111  a'
    """
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode()


def parse_sums(path: Path) -> dict[str, str]:
    """Read ``SHA256SUMS``: name -> hex digest.

    Raises
    ------
    FormatError
        If it is missing, unreadable, or a line has another form.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: is not UTF-8") from None
    sums: dict[str, str] = {}
    for number, line in enumerate(text.split("\n")[:-1] if text.endswith("\n") else text.split("\n"), 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums:
            raise FormatError(
                f"{path}: line {number} is {shown(line)}; one line `DIGEST  NAME` a file is allowed"
            )
        sums[match[2]] = match[1]
    return sums
