"""What an output folder already holds, and which of its files are ours to remove."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from trapetum.errors import FormatError, OutputError
from trapetum.formats.atomic import WORK_FOLDER, disk_errors
from trapetum.formats.checksums import parse_sums
from trapetum.formats.manifest import INDEX, MANIFEST, RUN_LOG, SUMS, is_plain_name
from trapetum.formats.strict_json import parse_json

__all__ = [
    "COMMIT",
    "LOCK",
    "OUT",
    "PARTS",
    "OutputState",
    "discard_job",
    "old_files",
    "output_state",
    "read_commit",
]

LOCK, COMMIT, OUT, PARTS = "lock", "commit.json", "out", "parts"


@dataclass(frozen=True)
class OutputState:
    """What a usable output folder holds.

    Parameters
    ----------
    job : bool
        An unfinished job (``.trapetum``), to be resumed or discarded.
    artifact : bool
        A finished artifact (``trapetum.json``), to be replaced only when asked to.
    """

    job: bool
    artifact: bool


def output_state(folder: str | Path) -> OutputState:
    """Look at an output folder before anything is written.

    Parameters
    ----------
    folder : path
        Need not exist.

    Raises
    ------
    OutputError
        If it is a file, cannot be read, or holds something that is neither a job nor an artifact: such a
        folder is never written to, whatever is asked for.
    """
    folder = Path(folder)
    try:
        names = {e.name for e in os.scandir(folder)}
    except FileNotFoundError:
        return OutputState(False, False)
    except NotADirectoryError:
        raise OutputError(
            f"{folder}: is a file; the output of quantize is a folder", hint="Choose another name with -o."
        ) from None
    except OSError as error:
        raise OutputError(f"{folder}: cannot be read: {error.strerror}") from None
    state = OutputState(WORK_FOLDER in names, MANIFEST in names)
    if names and not state.job and not state.artifact:
        raise OutputError(
            f"{folder}: is not empty and holds neither an artifact nor an unfinished job "
            f"({len(names)} entries, such as {min(names)!r})",
            hint="Choose a new or empty folder with -o; --overwrite replaces artifacts only.",
        )
    return state


def old_files(folder: Path) -> list[str]:
    """Names of the files of the artifact in ``folder``, by its own lists: nothing else is ever removed."""
    if not (folder / MANIFEST).is_file():
        return []
    names = {MANIFEST, SUMS, INDEX, RUN_LOG}
    try:
        names |= parse_sums(folder / SUMS).keys()
    except FormatError:  # damaged: what the index names is ours, too
        pass
    try:
        index = parse_json((folder / INDEX).read_bytes(), INDEX)
        names |= set(index["weight_map"].values())
    except (OSError, FormatError, KeyError, TypeError, AttributeError):
        pass
    return sorted(n for n in names if is_plain_name(n) and (folder / n).is_file())


def read_commit(work: Path) -> dict[str, list[str]] | None:
    """The commit record in ``.trapetum``: ``files`` to move up, old ones to ``remove``.

    Returns
    -------
    dict or None
        None where there is none, or it is damaged or names anything outside the folder: not ours, so ignored.
    """
    try:
        commit = parse_json((work / COMMIT).read_bytes(), COMMIT)
        names = [*commit["files"], *commit["remove"]]
    except (OSError, FormatError, KeyError, TypeError):
        return None
    return commit if all(map(is_plain_name, names)) else None


def discard_job(folder: str | Path, *, keep_locks: bool = False) -> None:
    """Forget an unfinished job (``--no-resume``); the caller holds the folder's lock.

    A job that is already being moved into place is finished instead: its old artifact may be half gone.

    Parameters
    ----------
    folder : path
    keep_locks : bool
        Leave every file that ends in ``lock``: the caller shares the folder with other parts of the job.
    """
    from trapetum.formats.assemble import resume_assembly

    work = Path(folder) / WORK_FOLDER
    if read_commit(work) is not None:
        resume_assembly(folder)
        return
    with disk_errors(work):
        for entry in os.scandir(work) if work.is_dir() else ():
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != LOCK and not (keep_locks and entry.name.endswith(LOCK)):
                os.unlink(entry.path)
