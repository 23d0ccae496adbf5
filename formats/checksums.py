"""SHA-256 of files, and ``SHA256SUMS`` as ``sha256sum --check`` reads it.

Artifacts, dense folders and planes carry ``SHA256SUMS``; a GGUF carries ``NAME.gguf.sha256`` beside it, a split one
one such file for all its parts. No byte of a list itself can change unseen: each belongs to a digest or to a name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from trapetum.errors import FormatError
from trapetum.formats.atomic import write_atomic
from trapetum.formats.strict_json import shown

__all__ = [
    "GGUF_SUMS",
    "check_files",
    "file_sha256",
    "gguf_sums",
    "is_listable",
    "log_fault",
    "log_seal",
    "parse_sums",
    "sums_bytes",
    "write_sums",
]

GGUF_SUMS = ".sha256"
"""What follows the name of a GGUF in the name of its list."""

_BLOCK = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")


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


def is_listable(name: str) -> bool:
    """Whether a list can hold the name of a file: UTF-8 on one line.

    Examples
    --------
    >>> is_listable("a b.gguf"), is_listable("a\\nb"), is_listable("\\udcff")
    (True, False, False)
    """
    return "\n" not in name and not any("\ud800" <= c <= "\udfff" for c in name)


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


def write_sums(path: Path, files: Iterable[Path]) -> None:
    """Write the list of some files of its folder.

    Raises
    ------
    OutputError
        If it cannot be written.
    FormatError
        If a file cannot be read.
    """
    write_atomic(path, sums_bytes({file.name: file_sha256(file) for file in files}))


def check_files(path: Path) -> list[str]:
    """Compare the files of a list that has no other reader.

    Parameters
    ----------
    path : Path
        The list; its files lie beside it.

    Returns
    -------
    list of str
        One sentence a problem; empty if all is well.
    """
    try:
        sums = parse_sums(path)
    except FormatError as error:
        return [error.message]
    problems = []
    for name, digest in sums.items():
        file = path.with_name(name) if "/" not in name and name not in (".", "..") else None
        if file is None or not file.is_file():
            problems.append(f"{path}: lists {shown(name)}, which does not exist beside it")
            continue
        try:
            found = file_sha256(file)
        except FormatError as error:
            problems.append(error.message)
            continue
        if found != digest:
            problems.append(f"{file}: SHA-256 is {found}; {path.name} says {digest}")
    return problems


def log_seal(path: Path) -> bytes:
    """The last line of a log: the digest of all that is before it.

    Raises
    ------
    FormatError
        If the log cannot be read.
    """
    return _seal(file_sha256(path))


def log_fault(path: Path) -> str | None:
    """What is wrong with a log that :func:`log_seal` ended; None if nothing is, or there is no log."""
    if not path.is_file():
        return None
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    start = data.rfind(b"\n", 0, -1) + 1
    seal = _seal(hashlib.sha256(data[:start]).hexdigest())
    return None if data[start:] == seal else f"{path}: does not end with the checksum of its lines"


def _seal(digest: str) -> bytes:
    return json.dumps({"event": "end", "sha256": digest}).encode() + b"\n"


def gguf_sums(path: Path) -> Path:
    """Where the list of a GGUF, or of the split model that it is a part of, lies.

    Examples
    --------
    >>> gguf_sums(Path("m-00001-of-00002.gguf")).name, gguf_sums(Path("m.gguf")).name
    ('m.gguf.sha256', 'm.gguf.sha256')
    """
    match = _SPLIT.fullmatch(path.name)
    return path.with_name((f"{match[1]}.gguf" if match else path.name) + GGUF_SUMS)
