"""The one sink of the command line: stdout carries data, stderr the rest, and errors become exit codes.

==========  =====================================================================================
exit code   meaning
==========  =====================================================================================
0           done
1           error: ``error: MESSAGE`` and, where one is known, ``hint: HINT`` on stderr
2           usage: an unknown option, or a value that the option does not allow
3           verification failed
130         interrupted (Ctrl-C)
143         terminated (SIGTERM), after open outputs were left in a state that can be resumed
==========  =====================================================================================

``--debug`` or ``TRAPETUM_DEBUG=1`` adds the traceback. Both streams are UTF-8 in every locale: the same
command gives the same bytes under ``LC_ALL=C``; a path that is not UTF-8 passes through unchanged.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trapetum.errors import TrapetumError

__all__ = [
    "INTERRUPTED",
    "TERMINATED",
    "VERIFY_FAILED",
    "Terminated",
    "emit",
    "enable_debug",
    "fields",
    "human_bytes",
    "note",
    "report_error",
    "sigterm_raises",
    "standard_streams",
    "stream",
    "table",
]

VERIFY_FAILED = 3
INTERRUPTED = 130
TERMINATED = 143


class Terminated(BaseException):
    """SIGTERM arrived. Not an ``Exception``: nothing but cleanup code may stop it on its way out."""


class _Debug:
    """Whether tracebacks are shown; set once by ``--debug``."""

    on = False


def enable_debug(value: bool) -> bool:
    """Option callback of ``--debug``: show tracebacks from here on.

    Parameters
    ----------
    value : bool
        Whether the option was given.

    Returns
    -------
    bool
        The same value.
    """
    _Debug.on = value
    return value


def _debugging() -> bool:
    return _Debug.on or os.environ.get("TRAPETUM_DEBUG", "") not in ("", "0")


def standard_streams() -> None:
    """Make stdout and stderr UTF-8, whatever the locale; bytes of non-UTF-8 paths pass through.

    A stream that the caller closed (``>&-``) is pointed at nowhere: else the next file that is opened, such as a
    weight file, would get its number, and what is printed.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            free = os.open(os.devnull, os.O_RDWR)
            if free != fd:
                os.dup2(free, fd)
                os.close(free)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8", closefd=False))
    for out in (sys.stdout, sys.stderr):
        reconfigure = getattr(out, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="surrogateescape")


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within the block, SIGTERM raises :class:`Terminated` in the main thread: ``with`` blocks clean up."""

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def emit(data: Any, text: str | Callable[[], str], *, as_json: bool) -> None:
    """Print a command's result to stdout.

    Parameters
    ----------
    data : JSON value
        What ``--json`` prints; dates, paths and NumPy scalars must already be plain.
    text : str or callable returning str
        What a person reads; a callable is only called when needed.
    as_json : bool
        Whether ``--json`` was given. JSON is ASCII with escapes: the same bytes in every locale.
    """
    if as_json:
        body = json.dumps(data, indent=2, allow_nan=False)
    else:
        body = text if isinstance(text, str) else text()
    sys.stdout.write(body.rstrip("\n") + "\n")
    sys.stdout.flush()


def stream(piece: str) -> None:
    """Write a piece of generated text to stdout at once, without a line end."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write one line for the person to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def report_error(error: BaseException) -> int:
    """Say what went wrong, on stderr.

    Parameters
    ----------
    error : BaseException
        What a command raised.

    Returns
    -------
    int
        The exit code.
    """
    if _debugging() and not isinstance(error, KeyboardInterrupt | Terminated):
        note("".join(traceback.format_exception(error)).rstrip())
    message, hint, code = _describe(error)
    if message:
        note(f"error: {message}")
    if hint:
        note(f"hint: {hint}")
    return code


def _describe(error: BaseException) -> tuple[str, str | None, int]:
    """(message, hint, exit code) of an exception; an empty message prints nothing."""
    if isinstance(error, TrapetumError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None, INTERRUPTED
    if isinstance(error, Terminated):
        return "terminated by SIGTERM", None, TERMINATED
    if isinstance(error, BrokenPipeError):
        return "", None, 1
    if isinstance(error, MemoryError):
        return "the machine ran out of memory", "Give a smaller --max-memory, or fewer --threads.", 1
    if isinstance(error, OSError):
        return _os_error(error), None, 1
    if hasattr(error, "format_message"):  # typer's usage errors; their base class moved between releases
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", None) or "trapetum"
        return error.format_message(), f"see `{path} --help`", int(getattr(error, "exit_code", 2))
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(where[-1].filename)}:{where[-1].lineno}" if where else ""
    detail = " ".join(str(error).split())
    hint = (
        None
        if _debugging()
        else "This is a bug in trapetum: run again with --debug and report the traceback."
    )
    return f"internal error: {type(error).__name__}: {detail}{place}", hint, 1


def _os_error(error: OSError) -> str:
    """One sentence that names the file and the cause."""
    cause = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        cause = "no space left on the disk"
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(names)}: {cause}" if names else cause


def human_bytes(count: float) -> str:
    """A size for people, in binary units.

    Parameters
    ----------
    count : float
        Bytes.

    Examples
    --------
    >>> human_bytes(999), human_bytes(5_000_000), human_bytes(8 * 2**30)
    ('999 B', '4.77 MiB', '8.00 GiB')
    """
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.2f} {unit}"
    return f"{count / 1024:.2f} TiB"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns aligned with spaces, two between columns.

    Parameters
    ----------
    header : sequence of str
        Column titles.
    rows : iterable of sequences of str
        As many cells as titles each.
    right : sequence of int
        Columns that are aligned to the right.

    Examples
    --------
    >>> print(table(["name", "n"], [["a", "1"], ["bc", "22"]], right=[1]))
    name   n
    a      1
    bc    22
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    return "\n".join(
        "  ".join(
            c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def fields(values: Mapping[str, object]) -> str:
    """``name  value`` lines with the values aligned; ``None`` is left out.

    Examples
    --------
    >>> print(fields({"file": "a.cbk", "bits": 4}))
    file  a.cbk
    bits  4
    """
    shown = {k: str(v) for k, v in values.items() if v is not None}
    width = max(map(len, shown), default=0)
    return "\n".join(f"{k.ljust(width)}  {v}" for k, v in shown.items())
