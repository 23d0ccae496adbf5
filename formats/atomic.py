"""Files that are complete or absent: temporary name, fsync, rename; full disks as one sentence; folder locks.

Every file that the package writes goes through here. The rules:

* A file is written as ``.NAME.XXXXXXXX.tmp`` beside its final name, synced, then renamed over it, and the
  folder is synced. Whatever happens (exception, kill -9, power cut), the final name holds old bytes or new.
* Its mode is 0666 less the umask, as ``open`` would give; ``tempfile`` would leave 0600, unreadable for
  others.
* The writer holds ``flock`` on its temporary file, so a later writer of the same name can tell the
  leftover of a killed process (no lock: removed) from the file of a living one (locked: left alone).
* A failed write becomes one ``OutputError`` that names the file; for a full disk, an exhausted quota or a
  file-size limit it also tells the bytes wanted and the bytes free. The temporary file is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from trapetum.errors import OutputError

__all__ = [
    "WORK_FOLDER",
    "FolderLock",
    "atomic_file",
    "disk_errors",
    "publish",
    "refuse_overlap",
    "remove_leftovers",
    "require_space",
    "sync_folder",
    "write_atomic",
]

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file-size limit is reached (ulimit -f, or the file system's)",
}
_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp", re.DOTALL)

WORK_FOLDER = ".trapetum"


@contextlib.contextmanager
def disk_errors(path: str | Path, wanted: int | None = None) -> Iterator[None]:
    """Turn an ``OSError`` of the block into an ``OutputError`` about ``path``.

    Parameters
    ----------
    path : path
        The file (final name) or folder that is being written.
    wanted : int, optional
        Its full size in bytes, where known.

    Raises
    ------
    OutputError
    """
    try:
        yield
    except OSError as error:
        reason = _FULL.get(error.errno or 0)
        if reason is None:
            raise OutputError(
                f"{path}: cannot be written: {error.strerror or error}",
                hint="Check the folder's permissions, or choose another output with -o.",
            ) from error
        size = "" if wanted is None else f"; {_bytes(wanted)} wanted"
        raise OutputError(
            f"{path}: {reason}{size}, {_bytes(_free(Path(path)))} free",
            hint="Free some space, or choose an output on another disk.",
        ) from error


def require_space(folder: str | Path, wanted: int) -> None:
    """Refuse to start what the disk cannot hold.

    Parameters
    ----------
    folder : path
        Where the output goes; it need not exist yet.
    wanted : int
        Bytes that will be written at the peak.

    Raises
    ------
    OutputError
        If less is free.
    """
    free = _free(Path(folder))
    if free < wanted:
        raise OutputError(
            f"{folder}: {_bytes(wanted)} are needed, {_bytes(free)} are free",
            hint="Free some space or choose an output on another disk.",
        )


def _free(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _bytes(count: int) -> str:
    return f"{count:,} bytes"


def sync_folder(folder: str | Path) -> None:
    """Make renames and removals in ``folder`` durable; silently nothing where folders cannot be synced."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:  # some network mounts
        return
    try:
        with contextlib.suppress(OSError):  # EINVAL on file systems without folder sync
            os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: str | Path, final: str | Path, *, replace: bool = True) -> None:
    """Rename a finished, synced file to its final name and make the rename durable.

    Parameters
    ----------
    temporary, final : path
        On one file system.
    replace : bool
        Whether ``final`` may exist.

    Raises
    ------
    OutputError
        If ``final`` exists and ``replace`` is false, or the rename fails.
    """
    with disk_errors(final):
        if replace:
            os.replace(temporary, final)
        else:
            try:
                os.link(temporary, final)  # unlike rename, fails if the name is taken
            except FileExistsError:
                raise OutputError(f"{final}: exists", hint="Give --overwrite to replace it.") from None
            except OSError:  # no hard links here (FAT, some network mounts): a check just before the rename
                if os.path.lexists(final):
                    raise OutputError(f"{final}: exists", hint="Give --overwrite to replace it.") from None
                os.replace(temporary, final)
            else:
                os.unlink(temporary)
        sync_folder(Path(final).parent)


@contextlib.contextmanager
def atomic_file(
    path: str | Path, *, size: int | None = None, replace: bool = True, sweep: bool = True
) -> Iterator[BinaryIO]:
    """A binary file, open for writing and reading, that gets its name when the block ends without exception.

    Parameters
    ----------
    path : path
        Final name; its folder must exist.
    size : int, optional
        Bytes that will be written, for the message when they do not fit.
    replace : bool
        Whether an existing file may be replaced.
    sweep : bool
        Whether to look for leftovers of killed writers of this name; reads the folder's listing.

    Yields
    ------
    BinaryIO
        Buffered; ``fileno()`` serves positional writes.

    Raises
    ------
    OutputError
        If it cannot be written or renamed. ``OSError`` raised inside the block is turned into one too.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as d:
    ...     with atomic_file(Path(d) / "x") as f:
    ...         _ = f.write(b"abc")
    ...     (Path(d) / "x").read_bytes(), [p.name for p in Path(d).iterdir()]
    (b'abc', ['x'])
    """
    final = Path(path)
    if sweep:
        _remove_dead(final.parent, f".{final.name}.")
    temporary = final.parent / f".{final.name}.{secrets.token_hex(4)}.tmp"
    with disk_errors(final, size):
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _try_flock(fd)
            with open(fd, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                publish(temporary, final, replace=replace)  # while locked: nobody takes it for a leftover
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def write_atomic(path: str | Path, data: bytes, *, replace: bool = True) -> None:
    """Write a small file whole; see :func:`atomic_file`."""
    with atomic_file(path, size=len(data), replace=replace) as file:
        file.write(data)


def remove_leftovers(folder: str | Path) -> int:
    """Remove the temporary files that killed writers left in ``folder``; those of living writers stay.

    Returns
    -------
    int
        How many were removed.
    """
    return _remove_dead(Path(folder), ".")


def _remove_dead(folder: Path, prefix: str) -> int:
    removed = 0
    try:
        names = [e.name for e in os.scandir(folder)]
    except OSError:
        return 0
    for name in names:
        if not name.startswith(prefix) or not _TEMPORARY.fullmatch(name):
            continue
        entry = folder / name
        with contextlib.suppress(OSError):
            fd = os.open(entry, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(
                    fd, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # OSError: its writer lives, or locks do not work
                os.unlink(entry)
                removed += 1
            finally:
                os.close(fd)
    return removed


def _try_flock(fd: int) -> None:
    with contextlib.suppress(OSError):  # without locks leftovers stay until their owner's folder is removed
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FolderLock:
    """One process at a time in a folder: ``flock`` on ``FOLDER/.trapetum/NAME``, which kill -9 releases too.

    Parameters
    ----------
    folder : path
        The output folder; it and ``.trapetum`` are created.
    name : str
        File name of the lock; parts of one job take different names.
    shared : bool
        Whether others may hold the lock too, shared as well; it keeps out who wants it alone.
    wait : callable of str, optional
        Wait for the holder instead of refusing; called first, with a sentence that names it.

    Attributes
    ----------
    note : str or None
        A sentence for the person where the file system has no locks and the folder is unprotected.

    Raises
    ------
    OutputError
        On entering, if another process holds the lock; its process id and host are named.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str = "lock",
        *,
        shared: bool = False,
        wait: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / WORK_FOLDER / name
        self._mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._wait = wait
        self.note: str | None = None
        self._fd: int | None = None

    def __enter__(self) -> Self:
        if self.path.parent.is_symlink():
            raise OutputError(
                f"{self.path.parent}: is a symbolic link; the folder of a running job must be a real one",
                hint="Remove the link.",
            )
        while self._fd is None:
            with disk_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(self.folder.resolve().parent)
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(fd)
                if self._still_named(fd):  # else the holder before us removed the file: lock the new one
                    self._fd = fd
            finally:
                if self._fd is None:
                    os.close(fd)
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
        with contextlib.suppress(
            OSError
        ):  # the text only helps a person; a full disk must not stop the run here
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, holder.encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self, *, remove: bool = False) -> None:
        """Let go; with ``remove`` also delete the lock file (and ``.trapetum`` if that leaves it empty)."""
        if self._fd is None:
            return
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()
        os.close(self._fd)
        self._fd = None

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, self._mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._wait is not None:
                self._wait(f"{self.folder}: waiting for another trapetum process{_holder(fd)}")
                fcntl.flock(fd, self._mode)
                return
            raise OutputError(
                f"{self.folder}: in use by another trapetum process{_holder(fd)}",
                hint="Wait for it to end, stop it, or choose another output with -o.",
            ) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise OutputError(f"{self.path}: cannot be locked: {error.strerror}") from error
            self.note = (
                f"{self.folder}: this file system has no file locks ({error.strerror}); "
                "do not run two jobs on this folder."
            )

    def _still_named(self, fd: int) -> bool:
        try:
            named, held = os.stat(self.path), os.fstat(fd)
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def _holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        return f" (process {int(holder['pid'])} on {holder['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def refuse_overlap(output: str | Path, inputs: Iterable[str | Path]) -> None:
    """Refuse an output that is an input, lies inside an input folder, or shares a file with one.

    Parameters
    ----------
    output : path
        File or folder to be written; need not exist.
    inputs : iterable of path
        Files and folders that are read.

    Raises
    ------
    OutputError
        For the same file under any name: symbolic links, hard links and ``..`` are seen through.
    """
    out = Path(output)
    real = out.resolve()
    written = _identities(out)
    for item in map(Path, inputs):
        source = item.resolve()
        hint = "Choose another output with -o."
        if real == source:
            raise OutputError(f"{output}: the output is the input", hint=hint)
        if source.is_dir() and source in real.parents:
            raise OutputError(f"{output}: the output lies inside the input folder {item}", hint=hint)
        read = _identities(item)
        for key in written.keys() & read.keys():
            raise OutputError(
                f"{written[key]}: the output is the same file as the input {read[key]}", hint=hint
            )


def _identities(path: Path) -> dict[tuple[int, int], Path]:
    """(device, inode) of a file, or of a folder and the files directly inside it, links followed."""
    found: dict[tuple[int, int], Path] = {}
    with contextlib.suppress(OSError):
        paths = [path, *path.iterdir()] if path.is_dir() else [path]
        for p in paths:
            with contextlib.suppress(OSError):
                status = p.stat()
                found[status.st_dev, status.st_ino] = p
    return found
