"""From finished parts to a finished artifact, killed at any moment or not.

All state is in files that appear by rename, in this order (``W`` is ``DIR/.trapetum``):

1. ``W/out/``: side files, config.json, README.md, the index; then ``trapetum.json``: from here on
   (*sealed*) the parts are only copied, and the job can be finished without its source.
2. ``W/out/model-*.safetensors``, one by one; the parts of a shard are deleted when it is published.
3. ``W/out/SHA256SUMS``, then ``W/commit.json``, the list of files to move and of an old artifact's files
   to remove.
4. Old manifest and files are removed, new ones renamed into DIR, ``trapetum.json`` last; ``W`` is emptied.

A killed run is taken up by :func:`resume_assembly`, each step of which looks whether its result is
already there. A folder without ``trapetum.json`` is no artifact, so readers never see a half. Peak disk:
all weights once, plus one shard (the one being built), plus the old artifact where one is replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trapetum.errors import FormatError, OutputError
from trapetum.formats.atomic import (
    WORK_FOLDER,
    disk_errors,
    remove_leftovers,
    require_space,
    sync_folder,
    write_atomic,
)
from trapetum.formats.checksums import file_sha256, sums_bytes
from trapetum.formats.manifest import (
    INDEX,
    MANIFEST,
    RUN_LOG,
    SUMS,
    TensorRecord,
    is_plain_name,
    manifest_bytes,
    parse_manifest,
)
from trapetum.formats.output_folder import COMMIT, LOCK, OUT, PARTS, old_files, read_commit
from trapetum.formats.parts import part_path, read_part
from trapetum.formats.regions import copy_file
from trapetum.formats.safetensors_writer import SafetensorsWriter, index_bytes
from trapetum.formats.shard_layout import METADATA, Shard, make_shard, shard_layout
from trapetum.formats.stored_arrays import Arrays
from trapetum.formats.strict_json import parse_json
from trapetum.progress import Progress

__all__ = ["assemble", "resume_assembly"]


def assemble(
    folder: str | Path,
    manifest: Mapping[str, Any],
    files: Mapping[str, bytes | Path],
    *,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> Path:
    """Make the artifact from the parts of all its tensors; the caller holds the folder's lock.

    Parameters
    ----------
    folder : path
        The output folder ``DIR``; the parts are in ``DIR/.trapetum/parts``, numbered in the manifest's order.
    manifest : mapping
        From :func:`trapetum.formats.manifest.build_manifest`.
    files : mapping of file name to bytes or path
        Everything else: ``config.json`` (see ``artifact_config``), ``README.md``, tokenizer files ...;
        paths are copied.
    max_shard_bytes : int
        Data bytes a shard may hold; a tensor's arrays stay together.
    progress : Progress, optional

    Returns
    -------
    Path
        ``folder``.

    Raises
    ------
    OutputError
        If the disk cannot hold it; what is done stays and is taken up by the next run.
    FormatError
        If a part is missing or does not fit the manifest.
    """
    folder = Path(folder)
    work = folder / WORK_FOLDER
    out = work / OUT
    text = manifest_bytes(manifest)
    _, records = parse_manifest(text, str(folder / MANIFEST))
    shards = shard_layout({n: r.stored for n, r in records.items()}, max_shard_bytes)
    reserved = {INDEX, MANIFEST, SUMS, RUN_LOG, *(s.file for s in shards)}
    for name in files:
        if not is_plain_name(name) or name in reserved:
            raise OutputError(f"{folder}: {name!r} cannot be the name of a file beside the weights")
    for index, (name, record) in enumerate(records.items()):
        part = read_part(work / PARTS, index, name, check_data=False)
        if part is None or part.record != record:
            raise FormatError(
                f"{part_path(work / PARTS, index, name)}: not the finished part of tensor {name}"
            )
    require_space(folder, max(s.size for s in shards))
    with disk_errors(out):
        if out.exists():  # the unsealed beginning of a killed run
            shutil.rmtree(out)
        out.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            write_atomic(out / name, content)
        else:
            copy_file(content, out / name)
    write_atomic(out / INDEX, index_bytes({s.file: s.entries for s in shards}))
    write_atomic(out / MANIFEST, text)
    resume_assembly(folder, progress=progress)
    return folder


def resume_assembly(folder: str | Path, *, progress: Progress | None = None) -> bool:
    """Finish what :func:`assemble` of a killed run began; every run calls it first, under the folder's lock.

    Removes the temporary files of killed writers, too.

    Returns
    -------
    bool
        True if the artifact is now finished; False if there was nothing sealed (go on with the job).

    Raises
    ------
    OutputError, FormatError
        As :func:`assemble`.
    """
    folder = Path(folder)
    work = folder / WORK_FOLDER
    remove_leftovers(work / PARTS)
    with disk_errors(folder):
        commit = read_commit(work)
        if commit is None:
            sealed = _sealed(work / OUT)
            if sealed is None:
                return False
            remove_leftovers(work / OUT)
            commit = _commit(folder, _build(work, *sealed, progress or Progress()))
        _move(folder, commit)
    return True


def _sealed(out: Path) -> tuple[dict[str, TensorRecord], list[Shard]] | None:
    """What the sealed manifest and index announce; None where they are not there, or are not ours."""
    try:
        _, records = parse_manifest((out / MANIFEST).read_bytes(), str(out / MANIFEST))
        weight_map = parse_json((out / INDEX).read_bytes(), str(out / INDEX))["weight_map"]
        members: dict[str, dict[str, Arrays]] = {}
        for name, record in records.items():
            first = next(iter(record.arrays.values())).name
            members.setdefault(weight_map[first], {})[name] = record.stored
        if not all(map(is_plain_name, members)):
            return None
        return records, [make_shard(file, group) for file, group in members.items()]
    except (OSError, FormatError, KeyError, TypeError):
        return None


def _build(
    work: Path, records: Mapping[str, TensorRecord], shards: list[Shard], progress: Progress
) -> dict[str, str]:
    """Write the shards that are not there yet; SHA-256 of every file."""
    out = work / OUT
    numbers = {name: i for i, name in enumerate(records)}
    sums: dict[str, str] = {}
    progress.begin("writing shards", sum(s.size for s in shards))
    for shard in shards:
        path = out / shard.file
        parts = [part_path(work / PARTS, numbers[name], name) for name in shard.tensors]
        if not path.is_file():
            _write_shard(path, shard, records, work / PARTS, numbers)
        sums[shard.file] = file_sha256(path)  # while the pages are still in memory
        for part in parts:
            part.unlink(missing_ok=True)
        progress.advance(shard.size, shard.file)
    progress.end()
    for entry in sorted(os.scandir(out), key=lambda e: e.name):
        if is_plain_name(entry.name) and entry.name not in {SUMS, *sums}:
            sums[entry.name] = file_sha256(entry.path)
    return sums


def _write_shard(
    path: Path, shard: Shard, records: Mapping[str, TensorRecord], folder: Path, numbers: Mapping[str, int]
) -> None:
    place: dict[str, tuple[Path, int]] = {}  # stored name -> part file, offset
    for name in shard.tensors:
        part = read_part(folder, numbers[name], name, check_data=False)
        if part is None:
            raise FormatError(
                f"{part_path(folder, numbers[name], name)}: the part of tensor {name} is missing or damaged",
                hint="Run again with --no-resume to begin anew.",
            )
        place |= {e.name: (part.path, part.offsets[suffix]) for suffix, e in records[name].arrays.items()}
    with SafetensorsWriter(path, shard.entries, METADATA) as writer:
        for entry in shard.entries:
            source, offset = place[entry.name]
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                writer.copy(entry.name, fd, offset)
            finally:
                os.close(fd)


def _commit(folder: Path, sums: Mapping[str, str]) -> dict[str, list[str]]:
    """The point of no return: everything is complete in ``out`` and the list of moves is on disk."""
    work = folder / WORK_FOLDER
    write_atomic(work / OUT / SUMS, sums_bytes(sums))
    files = [*sorted(sums), SUMS]
    for name in [*files, MANIFEST]:
        if (folder / name).is_dir():
            raise OutputError(
                f"{folder / name}: is a folder where a file must be written", hint="Move it away."
            )
    kept = {*files, RUN_LOG} if (work / RUN_LOG).is_file() else {*files}  # a new log replaces the old one
    remove = [name for name in old_files(folder) if name not in kept]
    commit = {"files": files, "remove": remove}
    write_atomic(work / COMMIT, json.dumps(commit).encode())
    return commit


def _move(folder: Path, commit: Mapping[str, list[str]]) -> None:
    """Carry out the commit record, from the beginning or from anywhere in it."""
    work = folder / WORK_FOLDER
    out = work / OUT
    if (out / MANIFEST).is_file():  # it moves last: until then the folder is no artifact
        for name in [MANIFEST, *commit["remove"]]:
            (folder / name).unlink(missing_ok=True)
        sync_folder(folder)
        for name in commit["files"]:
            if name == MANIFEST:
                continue
            if (out / name).is_file():
                os.replace(out / name, folder / name)
            elif not (folder / name).is_file():
                raise FormatError(f"{out / name}: vanished while the artifact was put in place")
        if (work / RUN_LOG).is_file():
            os.replace(work / RUN_LOG, folder / RUN_LOG)
        sync_folder(folder)
        os.replace(out / MANIFEST, folder / MANIFEST)
        sync_folder(folder)
    for entry in os.scandir(work):
        if entry.name in (LOCK, COMMIT):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    (work / COMMIT).unlink()
