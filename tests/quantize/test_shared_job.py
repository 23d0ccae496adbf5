"""Parts in one folder: any order, at once, killed, twice, incomplete, on unlike CPUs; the bytes of a single run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trapetum.errors import CheckpointError, OutputError, RecipeError
from trapetum.formats.atomic import FolderLock
from trapetum.progress import Progress
from trapetum.quantize import cpu, stream
from trapetum.quantize.job import quantize_model
from trapetum.quantize.shared_job import merge_parts

WORKER = Path(__file__).with_name("job_worker.py")
OPTIONS: dict[str, Any] = {"bits": 4, "max_shard_size": 40_000, "threads": 1, "effort": "fast"}
Identity = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    return make_model(shards=2)


@pytest.fixture
def whole(model: Path, tmp_path: Path, identity: Identity) -> dict[str, bytes]:
    quantize_model(model, tmp_path / "whole", **OPTIONS)
    return identity(tmp_path / "whole")


def part(model: Path, out: Path, text: str, **options: Any) -> Any:
    return quantize_model(model, out, part=text, **OPTIONS, **options)


@pytest.fixture
def start_part(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    def begin(model: Path, out: Path, text: str, *stop: str) -> subprocess.Popen[str]:
        command = [sys.executable, WORKER, model, out, json.dumps({**OPTIONS, "part": text})]
        command += stop or ("none", "", "0")
        return start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


def test_any_order_and_any_count(
    model: Path, tmp_path: Path, identity: Identity, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    last = part(model, out, "3/3")
    assert (last.share, last.resumed) == ("3/3", 0)
    assert not (out / "trapetum.json").exists()
    part(model, out, "2/2")
    assert part(model, out, "3/3").resumed == len(last.rows)
    part(model, out, "1/2")
    merge_parts(out)
    assert identity(out) == whole
    assert not (out / ".trapetum").exists()
    events = [json.loads(line)["event"] for line in (out / "run.jsonl").read_text().splitlines()]
    assert (events.count("start"), events.count("tensor")) == (4, 21)
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    assert merge_parts(out) == out  # once more: nothing to do
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before


def test_at_once_and_one_killed(
    model: Path,
    tmp_path: Path,
    identity: Identity,
    whole: dict[str, bytes],
    start_part: Callable[..., subprocess.Popen[str]],
) -> None:
    out = tmp_path / "out"
    killed, other = start_part(model, out, "1/2", "KILL", "line", "3"), start_part(model, out, "2/2")
    assert (other.communicate(timeout=300)[0], other.returncode) == ("done\n", 0)
    killed.communicate(timeout=300)
    assert killed.returncode == -9
    with pytest.raises(OutputError, match=r"tensors are missing: part 1/2 \(stopped\): model\.") as caught:
        merge_parts(out)
    assert "2/2" not in caught.value.message
    assert part(model, out, "1/2").resumed == 3
    merge_parts(out)
    assert identity(out) == whole


def test_what_is_missing_is_named_and_a_plain_run_does_it(
    model: Path, tmp_path: Path, identity: Identity, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    part(model, out, "1/2")
    damaged = next((out / ".trapetum" / "parts").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    with pytest.raises(OutputError, match=r"part 1/2 \(stopped\): [\w.]+; part 2/2 \(never begun\): "):
        merge_parts(out)
    quantize_model(model, out, **OPTIONS)
    assert identity(out) == whole


def test_a_killed_merge_goes_on_without_the_source(
    model: Path, tmp_path: Path, identity: Identity, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    for text in ("1/2", "2/2"):
        part(model, out, text)

    class Stop(Progress):
        def advance(self, amount: int, line: str | None = None) -> None:
            if line is not None and "00002-of" in line:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_parts(out, progress=Stop())
    with pytest.raises(OutputError, match="a merge has begun"):
        part(model, out, "1/2")
    shutil.rmtree(model)
    merge_parts(out)
    assert identity(out) == whole


def test_locks(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    part(model, out, "1/2")
    with FolderLock(out, shared=True), FolderLock(out, "part-2-of-2.lock"):  # as a living part holds them
        with pytest.raises(OutputError, match=r"part 2/2 is still at work: .* process"):
            merge_parts(out)
        with pytest.raises(OutputError, match="in use by another"):
            part(model, out, "2/2")
        with pytest.raises(OutputError, match="in use by another"):
            quantize_model(model, out, **OPTIONS)
        part(model, out, "1/2")  # another share may work beside it
    with FolderLock(out), pytest.raises(OutputError, match="in use by another"):
        part(model, out, "1/2")


def test_unlike_cpus(
    model: Path, tmp_path: Path, identity: Identity, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    part(model, out, "1/2")
    features = cpu.cpu_features()
    monkeypatch.setattr(stream, "cpu_features", lambda: f"{features},wider")
    with pytest.raises(OutputError, match="this machine: with wider"):
        quantize_model(model, out, **OPTIONS)
    part(model, out, "2/2")
    with pytest.raises(OutputError, match="CPUs with different features") as caught:
        merge_parts(out)
    assert "more: with wider" in caught.value.message
    assert "more: only with what all have" in caught.value.message
    assert "--mixed-cpus" in str(caught.value.hint)
    merge_parts(out, mixed_cpus=True)
    assert identity(out) == whole  # here only the name of the CPU differs, which is no part of the artifact


def test_other_settings_and_other_sources_are_refused(
    model: Path, make_model: Callable[..., Path], tmp_path: Path, identity: Identity, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    part(model, out, "1/2")
    with pytest.raises(OutputError, match=r"other settings: recipe\.effort"):
        quantize_model(model, out, part="2/2", **{**OPTIONS, "effort": "high"})
    with pytest.raises(OutputError, match=r"source\.name is .model. there"):
        part(make_model(shards=2, name="other", rope_theta=5e4), out, "2/2")
    part(model, out, "2/2")
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="is not there"):
        merge_parts(out)
    (moved / "config.json").write_text((moved / "config.json").read_text() + " ")
    with pytest.raises(CheckpointError, match=r"config\.json is not the file"):
        merge_parts(out, source=moved)
    (moved / "config.json").write_text((moved / "config.json").read_text()[:-1])
    merge_parts(out, source=moved)
    assert identity(out) == whole


def test_a_job_with_calibration_is_not_merged(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    part(model, out, "1/2")
    journal = out / ".trapetum" / "job.json"
    stored = json.loads(journal.read_text())
    stored["identity"]["calibration"] = {"file": "a.txt", "sha256": "0" * 64, "tokens": 512}
    journal.write_text(json.dumps(stored))
    with pytest.raises(OutputError, match="holds a job with calibration"):
        merge_parts(out)


def test_nothing_begun_leaves_nothing(model: Path, make_model: Callable[..., Path], tmp_path: Path) -> None:
    import numpy as np

    broken = make_model(name="broken", change={"model.norm.weight": np.full(64, np.nan, np.float32)})
    with pytest.raises(CheckpointError, match="NaN"):
        part(broken, tmp_path / "out", "1/2")
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError, match="no job to merge"):
        merge_parts(tmp_path / "out")
    with pytest.raises(RecipeError, match="cannot begin anew"):
        part(model, tmp_path / "out", "1/2", resume=False)
    with pytest.raises(RecipeError, match="part and scheduler exclude each other"):
        part(model, tmp_path / "out", "1/2", scheduler="tcp://127.0.0.1:1")
    report = part(model, tmp_path / "out", "2/2", dry_run=True)
    assert "part 2/2 would make" in report.notes[-1]
    assert not (tmp_path / "out").exists()


def test_a_finished_artifact_is_replaced_only_by_the_merge(
    model: Path, tmp_path: Path, identity: Identity, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "whole"
    with pytest.raises(OutputError, match="finished artifact"):
        part(model, out, "1/2")
    for text in ("1/2", "2/2"):
        part(model, out, text, overwrite=True)
        assert identity(out) == whole
    merge_parts(out)
    assert identity(out) == whole
