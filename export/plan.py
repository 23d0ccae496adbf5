"""What every exporter shares: a plan that is checked before any work, its report, and folders that appear whole.

An exporter is a function ``plan_X(request) -> ExportPlan``: it reads names, shapes and the config, refuses
what the format cannot hold (all offenders in one message), and predicts the size. ``ExportPlan.write`` then
streams.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from trapetum.errors import CheckpointError, OutputError
from trapetum.formats.atomic import disk_errors, sync_folder
from trapetum.formats.checksums import GGUF_SUMS
from trapetum.formats.manifest import SUMS
from trapetum.formats.source import TensorSource
from trapetum.models.architectures import Architecture, Role
from trapetum.progress import Progress

__all__ = ["ExportPlan", "ExportRequest", "ExportRow", "new_folder", "refuse_existing", "same_tensor"]

# Lists of checksums that folders of exports hold one of; a model's own folder has none.
_SIGNS = (SUMS, f"*{GGUF_SUMS}", "manifest.json")


@dataclass(frozen=True)
class ExportRequest:
    """What the caller asks for.

    Parameters
    ----------
    artifact : TensorSource
        Open; the caller closes it.
    out : Path
    source : TensorSource, optional
        The unquantized model: values for tensors that have to be quantized again.
    dtype : str, optional
        ``f32``, ``bf16`` or ``f16``, for formats with dense weights.
    gguf_type : str, optional
        ``gguf``: ``auto`` (the default) or a type.
    max_shard_size : int
        Bytes of a shard.
    fuse : bool
        ``planes``: lay matrices that read one activation out as one.
    overwrite : bool
    threads : int, optional
        All that the process may use by default.
    magic : str, optional
        ``cbk``: the layout, where a family has several.
    """

    artifact: TensorSource
    out: Path
    source: TensorSource | None = None
    dtype: str | None = None
    gguf_type: str | None = None
    max_shard_size: int = 5_000_000_000
    fuse: bool = False
    overwrite: bool = False
    threads: int | None = None
    magic: str | None = None


@dataclass
class ExportRow:
    """What happens to one tensor.

    Parameters
    ----------
    name : str
        In the output.
    action : str
        One word: ``exact``, ``rounded``, ``quantized`` or ``zeros``.
    detail : str
        From what to what.
    relative_error : float, optional
        Squared error that the export adds over the squared norm; known after writing, None where nothing
        can change.
    changed : int
        Values that rounding changed; known after writing.
    """

    name: str
    action: str
    detail: str
    relative_error: float | None = None
    changed: int = 0


@dataclass
class ExportPlan(ABC):
    """A checked export that has not been written.

    Attributes
    ----------
    request : ExportRequest
    size : int
        Exact bytes of the weight files.
    files : dict of str to int
        Weight files and their bytes, names relative to the output.
    rows : list of ExportRow
    notes : list of str
        What a person should know.
    """

    format: ClassVar[str]
    request: ExportRequest
    size: int
    files: dict[str, int]
    rows: list[ExportRow]
    notes: list[str] = field(default_factory=list)

    @abstractmethod
    def write(self, progress: Progress | None = None) -> Path:
        """Write everything; the output appears under its name when it is complete.

        Returns
        -------
        Path
            The output.
        """

    def report(self) -> dict[str, Any]:
        """The plan, or what was written, as JSON values."""
        return {
            "format": self.format,
            "size": self.size,
            "files": dict(self.files),
            "tensors": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }


def same_tensor(
    source: TensorSource, architecture: Architecture, role: Role, artifact: TensorSource, name: str
) -> str:
    """Name in ``--source`` of a tensor of the artifact; role and shape must be the same.

    Raises
    ------
    CheckpointError
    """
    found = architecture.index(source.names()).get(role)
    if found is None or source.shape(found) != artifact.shape(name):
        raise CheckpointError(
            f"{source.path}: has no tensor {name} of shape {list(artifact.shape(name))}",
            hint="Give the model that the artifact was made from.",
        )
    return found


def refuse_existing(out: Path, known: tuple[str, ...], *, overwrite: bool) -> None:
    """Refuse an output that exists; with ``overwrite``, one that an export did not write.

    Parameters
    ----------
    out : Path
        File or folder. An empty folder counts as absent.
    known : tuple of str
        Patterns of file names that may stand in a folder that is replaced; one of them must be a list of checksums.
    overwrite : bool

    Raises
    ------
    OutputError
    """
    if not os.path.lexists(out):
        return
    entries = sorted(p.name for p in out.iterdir()) if out.is_dir() else [out.name]
    if not entries:
        return
    if not overwrite:
        raise OutputError(f"{out}: exists", hint="Give --overwrite to replace it, or another output with -o.")
    if not out.is_dir():
        return
    foreign = [name for name in entries if not any(fnmatch(name, pattern) for pattern in known)]
    if foreign:
        raise OutputError(
            f"{out}: holds {foreign[0]}, which an export does not write; the folder is not replaced",
            hint="Move that file away or choose another output with -o.",
        )
    if not any(fnmatch(name, pattern) for name in entries for pattern in _SIGNS):
        raise OutputError(
            f"{out}: holds {entries[0]} and no list of checksums, so no export wrote it; the folder is not replaced",
            hint="It may be a model of yours: choose another output with -o.",
        )


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of ``out`` when the block ends without an exception.

    What a killed export of this name left beside ``out`` is removed; an older export that it had already moved aside is
    put back first. Living ones are told by the lock on their folder.

    Parameters
    ----------
    out : Path
        Checked with :func:`refuse_existing` before.

    Yields
    ------
    Path
        The folder to fill, beside ``out``.

    Raises
    ------
    OutputError
        If it cannot be made or renamed.
    """
    token = secrets.token_hex(4)
    target = out.resolve()
    temporary, old = (target.with_name(f".{target.name}.{token}.{kind}") for kind in ("tmp", "old"))
    held = None
    try:
        with disk_errors(out):
            _sweep(target)
            temporary.mkdir(parents=True)
            held = _lock(temporary)
        yield temporary
        with disk_errors(out):
            sync_folder(temporary)
            if target.exists():
                os.rename(target, old)
            os.rename(temporary, target)
            sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        else:  # a file had the name
            with contextlib.suppress(OSError):
                old.unlink(missing_ok=True)
        if held is not None:
            os.close(held)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock on a folder until it is closed or its process dies; None if another has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks: then nothing is ever swept
        os.close(fd)
        return None
    return fd


def _sweep(target: Path) -> None:
    """Remove what killed exports of ``target`` left."""
    if not target.parent.is_dir():
        return
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(tmp|old)")
    for path in sorted(target.parent.iterdir()):
        match = left.fullmatch(path.name)
        if match is None or not path.is_dir() or path.is_symlink():
            continue
        fd = _lock(path)
        if fd is None:
            continue
        if match[1] == "old" and not target.exists():
            os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)
        os.close(fd)
