"""Writing an artifact: killed anywhere, full disk, replaced artifacts, foreign folders, predicted sizes, parts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import artifact_worker
import numpy as np
import pytest

from trapetum.errors import FormatError, OutputError
from trapetum.formats.artifact import Artifact
from trapetum.formats.assemble import assemble, resume_assembly
from trapetum.formats.output_folder import discard_job, old_files, output_state
from trapetum.formats.parts import PartWriter, part_path, read_part, write_part
from trapetum.formats.shard_layout import shard_layout
from trapetum.formats.stored_arrays import stored_entries

WORKER = Path(__file__).with_name("artifact_worker.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "out"
    artifact_worker.write(folder)
    return folder


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("old", [[], ["1"]], ids=["new", "replacing"])
def test_killed_at_any_moment_the_next_run_makes_the_same_bytes(
    tmp_path: Path, old: list[str], stride: int
) -> None:
    command = [sys.executable, str(WORKER), "kill", str(tmp_path), str(stride), *old]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] > 100
    assert figures["runs"] > 3
    assert 0 < figures["whole"] < figures["steps"]


def test_a_full_disk_corrupts_nothing(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = f'ulimit -f 1; trap "" XFSZ; exec "{sys.executable}" -B "{WORKER}" write "{out}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("OutputError: ")
    assert done.stdout.count("\n") == 1
    assert "file-size limit" in done.stdout
    assert "bytes wanted" in done.stdout
    assert str(out) in done.stdout
    assert os.listdir(out) == [".trapetum"]
    assert not list(out.rglob("*.tmp"))
    artifact_worker.write(out)
    assert artifact_worker.content(out) == artifact_worker.content(finished)


def test_a_disk_that_fills_up_while_shards_are_built(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = 0

    def fill_up(source: int, target: int, count: int, *offsets: int) -> int:
        nonlocal copied
        copied += 1
        if copied == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(source, target, min(count, 4000), *offsets)

    real = os.copy_file_range
    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", fill_up)
        with pytest.raises(
            OutputError, match=r"model-0000[\d].*: the disk is full; [\d,]+ bytes wanted, [\d,]+ bytes free"
        ):
            artifact_worker.write(tmp_path)
    assert os.listdir(tmp_path) == [".trapetum"]
    assert not list(tmp_path.rglob("*.tmp"))
    artifact_worker.write(tmp_path)
    assert artifact_worker.content(tmp_path) == artifact_worker.content(finished)


def test_the_same_input_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    artifact_worker.write(tmp_path / "again")
    assert artifact_worker.content(tmp_path / "again") == artifact_worker.content(finished)


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        artifact_worker.write(tmp_path / "out")
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o640}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("limit", [1, 150, 300, 1 << 40])
def test_predicted_sizes_are_exact(tmp_path: Path, limit: int) -> None:
    artifact_worker.write(tmp_path, max_shard_bytes=limit)
    arrays = {
        name: {s: (a.dtype, a.shape) for s, a in t.to_arrays().items()}
        for name, t in artifact_worker.tensors(0).items()
    }
    shards = shard_layout(arrays, limit)
    assert [s.file for s in shards] == sorted(p.name for p in tmp_path.glob("*.safetensors"))
    for shard in shards:
        assert (tmp_path / shard.file).stat().st_size == shard.size
        held = sum(e.nbytes for e in shard.entries)
        assert held <= limit or len([n for n in shard.tensors if n != "empty"]) == 1
    assert [n for s in shards for n in s.tensors] == list(arrays)
    with Artifact.open(tmp_path) as art:
        assert art.check_sums() == []


def test_stored_names_that_clash_are_refused_before_work() -> None:
    u8 = np.dtype(np.uint8)
    with pytest.raises(FormatError, match=r"tensors w and w\.codes would both be stored as w\.codes"):
        shard_layout({"w": {"codes": (u8, (1, 1))}, "w.codes": {"": (u8, (1,))}}, 1 << 30)


def test_replacing_removes_only_what_the_old_artifact_lists(tmp_path: Path) -> None:
    out = tmp_path / "out"
    artifact_worker.write(out, seed=1, max_shard_bytes=1)
    (out / "run.jsonl").write_text("old")
    (out / "model-old.safetensors").write_text("not in any list")
    (out / "deep").mkdir()
    with open(out / "SHA256SUMS", "a") as file:
        for name in ("../outside", "deep", "/etc/hostname", ".hidden"):
            file.write("0" * 64 + f"  {name}\n")
    (tmp_path / "outside").write_text("stays")
    (out / ".hidden").write_text("stays")
    assert {"../outside", "deep", "/etc/hostname", ".hidden", "model-old.safetensors"}.isdisjoint(
        old_files(out)
    )
    artifact_worker.write(out, seed=2)
    artifact_worker.write(tmp_path / "fresh", seed=2)
    found = artifact_worker.content(out)
    extra = {k: found.pop(k) for k in ("model-old.safetensors", ".hidden")}
    assert extra == {"model-old.safetensors": b"not in any list", ".hidden": b"stays"}
    assert found == artifact_worker.content(tmp_path / "fresh")
    assert (tmp_path / "outside").read_text() == "stays"
    assert (out / "deep").is_dir()


def test_an_old_artifact_with_damaged_lists_still_goes(tmp_path: Path) -> None:
    artifact_worker.write(tmp_path, seed=1)
    (tmp_path / "SHA256SUMS").write_text("garbage")
    shards = {p.name for p in tmp_path.glob("*.safetensors")}
    assert shards <= set(old_files(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert old_files(tmp_path) == ["SHA256SUMS", "model.safetensors.index.json", "run.jsonl", "trapetum.json"]


def test_a_folder_in_the_way_is_found_before_anything_is_removed(tmp_path: Path) -> None:
    artifact_worker.write(tmp_path, seed=1)
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").mkdir()
    before = artifact_worker.content(tmp_path)
    with pytest.raises(OutputError, match=r"README.md: is a folder"):
        artifact_worker.write(tmp_path, seed=2)
    after = {k: v for k, v in artifact_worker.content(tmp_path).items() if not k.startswith(".trapetum")}
    assert after == before
    (tmp_path / "README.md").rmdir()
    artifact_worker.write(tmp_path, seed=2)
    assert (tmp_path / "README.md").read_bytes() == b"card\n"


@pytest.mark.parametrize(
    "record",
    [{"files": [], "remove": ["../precious"]}, {"files": ["../precious"], "remove": []}, {}, [], "x"],
)
def test_bad_state_is_ignored(finished: Path, tmp_path: Path, record: object) -> None:
    (tmp_path / "precious").write_text("stays")
    folder = tmp_path / "out"
    (folder / ".trapetum" / "out").mkdir(parents=True)
    (folder / ".trapetum" / "out" / "trapetum.json").write_text(json.dumps(record))
    (folder / ".trapetum" / "commit.json").write_text(json.dumps(record))
    assert not resume_assembly(folder)
    artifact_worker.write(folder)
    assert artifact_worker.content(folder) == artifact_worker.content(finished)
    assert (tmp_path / "precious").read_text() == "stays"


def test_a_linked_work_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("stays")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".trapetum").symlink_to(tmp_path / "home")
    with pytest.raises(OutputError, match="symbolic link"):
        artifact_worker.write(tmp_path / "out")
    assert os.listdir(tmp_path / "home") == ["precious"]


def test_foreign_folders_are_never_written_to(tmp_path: Path) -> None:
    assert output_state(tmp_path / "absent") == output_state(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(OutputError, match=r"neither an artifact nor an unfinished job.*notes.txt"):
        output_state(tmp_path)
    with pytest.raises(OutputError, match="is a file"):
        output_state(tmp_path / "notes.txt")
    (tmp_path / ".trapetum").mkdir()
    assert output_state(tmp_path).job
    (tmp_path / "trapetum.json").write_text("")
    assert output_state(tmp_path).artifact


def test_discarding_a_job_keeps_the_artifact(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    before = artifact_worker.content(out)
    write_part(out / ".trapetum" / "parts", 0, "x", {"": np.zeros(3)}, DENSE | {"shape": [3]})
    (out / ".trapetum" / "job.json").write_text("{}")
    (out / ".trapetum" / "lock").write_text("")
    discard_job(out)
    assert os.listdir(out / ".trapetum") == ["lock"]
    shutil.rmtree(out / ".trapetum")
    assert artifact_worker.content(out) == before
    discard_job(out)


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert not resume_assembly(tmp_path)
    assert os.listdir(tmp_path) == []


DENSE = {"layout": "dense", "scheme": {"name": "keep"}}
MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)


def matrix_part(folder: Path) -> Path:
    write_part(folder, 7, "a/b.weight", {"": MATRIX}, DENSE | {"shape": (2, 3), "role": "q"})
    return part_path(folder, 7, "a/b.weight")


def test_a_part_holds_its_manifest_entry(tmp_path: Path) -> None:
    path = matrix_part(tmp_path)
    assert os.listdir(tmp_path) == [path.name]
    part = read_part(tmp_path, 7, "a/b.weight")
    assert part is not None
    assert part.entry["role"] == "q"
    assert part.entry["bytes"] == 24
    assert part.entry["relative_error"] is None
    assert part.record.shape == (2, 3)
    assert path.read_bytes()[part.offsets[""] :] == MATRIX.tobytes()
    for index, name in ((8, "a/b.weight"), (7, "a/c.weight")):
        assert read_part(tmp_path, index, name) is None


def test_a_damaged_part_counts_as_absent(tmp_path: Path) -> None:
    path = matrix_part(tmp_path)
    data = path.read_bytes()
    ignored = 0
    for damaged in [b"", data[:-1], data + b"x", data[:100], *flips(data)]:
        path.write_bytes(damaged)
        ignored += read_part(tmp_path, 7, "a/b.weight") is None
    # Flips that leave the JSON's meaning (a bit of padding, of a free-form value) are no damage to the tensor.
    assert ignored > 250
    path.write_bytes(data[:-1] + b"x")
    assert read_part(tmp_path, 7, "a/b.weight") is None
    assert read_part(tmp_path, 7, "a/b.weight", check_data=False) is not None


def flips(data: bytes) -> Iterator[bytes]:
    end = data.index(b"    ")
    for position in [*range(end), *range(len(data) - 24, len(data))]:
        yield data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


def test_a_part_of_another_tensor_does_not_pass(tmp_path: Path) -> None:
    path = matrix_part(tmp_path)
    shutil.copy(path, part_path(tmp_path, 3, "other"))
    assert read_part(tmp_path, 3, "other") is None


def test_a_part_is_published_complete_or_not_at_all(tmp_path: Path) -> None:
    arrays = {"": (MATRIX.dtype, MATRIX.shape)}

    def attempt(finish: bool, *blocks: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
        with PartWriter(tmp_path, 0, "w", arrays) as part:
            for block in blocks:
                part.write(block)
            if finish:
                part.finish(DENSE | {"shape": (2, 3)})

    for finish, blocks, message in (
        (False, [{"": MATRIX}], "finish"),
        (True, [{"": MATRIX[:1]}], "12 of 24 bytes"),
        (True, [{"codes": MATRIX}], "codes"),
        (True, [], "0 of 24 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt(finish, *blocks)
        assert os.listdir(tmp_path) == []
    with pytest.raises(FormatError, match="layout 'vq'"):
        write_part(tmp_path, 0, "w", {"": MATRIX}, {"layout": "vq", "shape": (2, 3), "scheme": {}})
    assert os.listdir(tmp_path) == []


def test_assembling_wants_all_parts_and_harmless_names(tmp_path: Path) -> None:
    parts = tmp_path / ".trapetum" / "parts"
    entry = write_part(parts, 0, "w", {"": MATRIX}, DENSE | {"shape": (2, 3)})
    header = {"format_version": 1, "source": {}, "recipe": {}, "totals": {"tensors": 1, "bytes": 24}}
    manifest = {**header, "tensors": {"w": entry}}
    for name in (
        "../x",
        "trapetum.json",
        "SHA256SUMS",
        "run.jsonl",
        "model-00001-of-00001.safetensors",
        ".x",
    ):
        with pytest.raises(OutputError, match="cannot be the name"):
            assemble(tmp_path, manifest, {name: b""}, max_shard_bytes=100)
    other = write_part(parts, 0, "w", {"": MATRIX + 1}, DENSE | {"shape": (2, 3)})
    assert other != entry
    with pytest.raises(FormatError, match="not the finished part of tensor w"):
        assemble(tmp_path, manifest, {}, max_shard_bytes=100)
    assert not (tmp_path / ".trapetum" / "out").exists()
    assert [e.name for e in stored_entries("w", {"": (MATRIX.dtype, (2, 3))})] == ["w"]
