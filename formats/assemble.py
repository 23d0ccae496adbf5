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
from trapetum.formats.output_folder import COMMIT, LOCK, OUT, PARTS, old_files
from trapetum.formats.parts import part_path, read_part
from trapetum.formats.regions import copy_file
from trapetum.formats.safetensors_writer import SafetensorsWriter, index_bytes
from trapetum.formats.shard_layout import METADATA, Shard, make_shard, shard_layout
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
        if not (work / COMMIT).is_file():
            if not (work / OUT / MANIFEST).is_file():
                return False
            remove_leftovers(work / OUT)
            _commit(folder, _build(work, progress or Progress()))
        _move(folder)
    return True


def _build(work: Path, progress: Progress) -> dict[str, str]:
    """Write the shards that are not there yet; SHA-256 of every file."""
    out = work / OUT
    _, records = parse_manifest((out / MANIFEST).read_bytes(), str(out / MANIFEST))
    numbers = {name: i for i, name in enumerate(records)}
    sums: dict[str, str] = {}
    shards = _sealed_shards(out, records)
    progress.begin("writing shards", sum(s.size for s in shards))
    for shard in shards:
        path = out / shard.file
        parts = {name: part_path(work / PARTS, numbers[name], name) for name in shard.tensors}
        if not path.is_file():
            _write_shard(path, shard, records, work / PARTS, numbers)
        sums[shard.file] = file_sha256(path)  # while the pages are still in memory
        for part in parts.values():
            part.unlink(missing_ok=True)
        progress.advance(shard.size, shard.file)
    progress.end()
    for entry in sorted(os.scandir(out), key=lambda e: e.name):
        if is_plain_name(entry.name) and entry.name not in {SUMS, RUN_LOG, *sums}:
            sums[entry.name] = file_sha256(entry.path)
    return sums


def _sealed_shards(out: Path, records: Mapping[str, TensorRecord]) -> list[Shard]:
    """The shards that the sealed index announces; the order inside follows from the manifest."""
    weight_map = parse_json((out / INDEX).read_bytes(), str(out / INDEX))["weight_map"]
    members: dict[str, dict[str, TensorRecord]] = {}
    for name, record in records.items():
        first = next(iter(record.arrays.values())).name
        members.setdefault(weight_map[first], {})[name] = record
    return [make_shard(file, {n: r.stored for n, r in group.items()}) for file, group in members.items()]


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


def _commit(folder: Path, sums: Mapping[str, str]) -> None:
    """The point of no return: everything is complete in ``out`` and the list of moves is on disk."""
    work = folder / WORK_FOLDER
    write_atomic(work / OUT / SUMS, sums_bytes(sums))
    files = [*sorted(sums), SUMS]
    log = work / RUN_LOG
    if log.is_file():
        os.replace(log, work / OUT / RUN_LOG)
    if (work / OUT / RUN_LOG).is_file():
        files.append(RUN_LOG)
    for name in [*files, MANIFEST]:
        if (folder / name).is_dir():
            raise OutputError(
                f"{folder / name}: is a folder where a file must be written", hint="Move it away."
            )
    remove = [name for name in old_files(folder) if name not in files]
    write_atomic(work / COMMIT, json.dumps({"files": files, "remove": remove}).encode())


def _move(folder: Path) -> None:
    """Carry out the commit record, from the beginning or from anywhere in it."""
    work = folder / WORK_FOLDER
    out = work / OUT
    commit = parse_json((work / COMMIT).read_bytes(), str(work / COMMIT))
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
