"""Killed, terminated, out of disk, locked: the next run goes on, and the bytes are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trapetum.errors import OutputError
from trapetum.formats.atomic import FolderLock
from trapetum.progress import Progress
from trapetum.quantize.job import quantize_model

WORKER = Path(__file__).with_name("job_worker.py")
OPTIONS: dict[str, Any] = {"bits": 4, "max_shard_size": 40_000, "threads": 2, "effort": "fast"}


# Each kill is a process of 2 s, most of it imports.
SLOW_MOMENTS = [
    ("scan", "1"),
    ("quantize", "1"),
    ("line", "1"),
    ("line", "21"),
    ("writing shards", "1"),
    ("advance", "30"),
]


class Recorder(Progress):
    """Lines of finished tensors."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def advance(self, amount: int, line: str | None = None) -> None:
        if line:
            self.lines.append(line.split()[0])


def run(
    model: Path, out: Path, *stop: str, options: dict[str, Any] = OPTIONS
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(WORKER),
        str(model),
        str(out),
        json.dumps(options),
        *(stop or ("none", "", "0")),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    return make_model(shards=2)


@pytest.mark.parametrize(
    "moment",
    [
        ("hash", "1"),
        ("line", "9"),
        ("line", "22"),
        *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW_MOMENTS),
    ],
    ids="-".join,
)
def test_kill_9(
    model: Path, tmp_path: Path, identity: Callable[[Path], dict[str, bytes]], moment: tuple[str, str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantize_model(model, whole, **OPTIONS)
    killed = run(model, out, "KILL", *moment)
    assert killed.returncode == -9, killed.stdout + killed.stderr
    assert not (out / "trapetum.json").exists()
    recorder = Recorder()
    report = quantize_model(model, out, progress=recorder, **OPTIONS)
    assert identity(out) == identity(whole)
    assert not (out / ".trapetum").exists()
    if moment[0] == "line" and int(moment[1]) < 22:  # that many tensors were done and are not done again
        assert report.resumed == int(moment[1])
        assert len([n for n in recorder.lines if n.endswith(".weight")]) == 21 - report.resumed


@pytest.mark.parametrize(
    ("name", "printed"),
    [("TERM", "Terminated"), pytest.param("INT", "KeyboardInterrupt", marks=pytest.mark.slow)],
)
def test_a_signal_stops_between_tensors_and_can_be_resumed(
    model: Path, tmp_path: Path, identity: Callable[[Path], dict[str, bytes]], name: str, printed: str
) -> None:
    out = tmp_path / "out"
    stopped = run(model, out, name, "line", "5")
    assert (stopped.returncode, stopped.stdout) == (0, f"{printed}\n"), stopped.stderr
    assert not list(out.rglob("*.tmp"))
    report = quantize_model(model, out, **OPTIONS)
    assert report.resumed == 5
    quantize_model(model, tmp_path / "whole", **OPTIONS)
    assert identity(out) == identity(tmp_path / "whole")


@pytest.mark.slow
def test_the_command_line_exits_with_143(
    make_model: Callable[..., Path], tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    # Work of many seconds: it must not have ended before this process is told that it began.
    model = make_model(hidden_size=512, intermediate_size=1024, vocab_size=4096, head_dim=128)
    command = [sys.executable, "-m", "trapetum", "quantize", model, "-o", out, "--effort", "high"]
    process = start(*command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("quantize:"):
            process.terminate()
            break
    process.stderr.read()
    assert process.wait(300) == 143
    assert not (out / "trapetum.json").exists()


@pytest.mark.parametrize("limit", [3_000, 20_000])
def test_disk_full(
    model: Path, tmp_path: Path, identity: Callable[[Path], dict[str, bytes]], limit: int
) -> None:
    """A small limit hits a part, a larger one a shard."""
    out = tmp_path / "out"
    full = run(model, out, "limit", str(limit), "0")
    assert full.returncode == 0, full.stderr
    assert full.stdout.startswith("OutputError: ")
    assert full.stdout.count("\n") == 1
    assert "file-size limit" in full.stdout
    assert not (out / "trapetum.json").exists()
    assert not list(out.rglob("*.tmp"))
    quantize_model(model, out, **OPTIONS)
    quantize_model(model, tmp_path / "whole", **OPTIONS)
    assert identity(out) == identity(tmp_path / "whole")


@pytest.fixture
def half_done(model: Path, tmp_path: Path) -> Path:
    """An output folder with five finished tensors."""

    class Stop(Recorder):
        def advance(self, amount: int, line: str | None = None) -> None:
            super().advance(amount, line)
            if len(self.lines) == 5:
                raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_model(model, out, progress=Stop(), **OPTIONS)
    return out


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name != "lock"
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bits": 3}, 'recipe.name is "4bit-head8" there and "3bit" now'),
        ({"effort": "default"}, 'recipe.effort is "fast" there and "default" now'),
        ({"seed": 1}, "recipe.seed is 0 there and 1 now"),
        ({"max_shard_size": 50_000}, "max_shard_size is 40000 there and 50000 now"),
        (
            {"bits": None, "recipe": {"name": "4bit-head8", "rules": [{"role": "q", "keep": True}]}},
            "recipe.rules[0].role",
        ),
    ],
)
def test_another_recipe_is_refused_by_key(
    model: Path, half_done: Path, change: dict[str, Any], text: str
) -> None:
    before = files(half_done)
    with pytest.raises(OutputError) as caught:
        quantize_model(model, half_done, **{**OPTIONS, **change})
    assert text in caught.value.message
    assert files(half_done) == before


def test_another_source_is_refused_by_file(model: Path, half_done: Path) -> None:
    weights = model / "model-00002-of-00002.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(OutputError, match=r"source file model-00002-of-00002\.safetensors is not the one"):
        quantize_model(model, half_done, **OPTIONS)
    data[-3] ^= 1
    weights.write_bytes(data)  # the same bytes under a new time stamp
    assert quantize_model(model, half_done, **OPTIONS).resumed == 5


def test_threads_and_memory_may_change_on_resume(
    model: Path, half_done: Path, tmp_path: Path, identity: Callable[[Path], dict[str, bytes]]
) -> None:
    quantize_model(model, half_done, **{**OPTIONS, "threads": 3, "max_memory": 400 << 20})
    quantize_model(model, tmp_path / "whole", **OPTIONS)
    assert identity(half_done) == identity(tmp_path / "whole")


def test_no_resume_begins_anew(model: Path, half_done: Path) -> None:
    report = quantize_model(model, half_done, **{**OPTIONS, "bits": 3}, resume=False)
    assert report.resumed == 0
    assert report.plan.recipe.name == "3bit"


@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "garbage state", "empty state"])
def test_damaged_work_is_done_again(
    model: Path, half_done: Path, tmp_path: Path, identity: Callable[[Path], dict[str, bytes]], damage: str
) -> None:
    part = sorted((half_done / ".trapetum" / "parts").iterdir())[2]
    data = part.read_bytes()
    state = half_done / ".trapetum" / "job.json"
    target, content = {
        "empty": (part, b""),
        "cut": (part, data[:-7]),
        "flip": (part, data[:-7] + bytes([data[-7] ^ 1]) + data[-6:]),
        "garbage state": (state, b"lfs65d0{"),
        "empty state": (state, b""),
    }[damage]
    target.write_bytes(content)
    report = quantize_model(model, half_done, **OPTIONS)
    assert report.resumed == (0 if target == state else 4)
    quantize_model(model, tmp_path / "whole", **OPTIONS)
    assert identity(half_done) == identity(tmp_path / "whole")


def test_two_processes_cannot_share_a_folder(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FolderLock(out):
        second = run(model, out)
    assert second.stdout.startswith("OutputError: ")
    assert f"in use by another trapetum process (process {os.getpid()} on " in second.stdout
    assert run(model, out).stdout == "done\n"


def test_a_finished_artifact_is_replaced_only_when_asked(
    model: Path, tmp_path: Path, identity: Callable[[Path], dict[str, bytes]]
) -> None:
    out = tmp_path / "out"
    quantize_model(model, out, **OPTIONS)
    before = identity(out)
    for options in ({}, {"resume": False}):
        with pytest.raises(OutputError, match="already holds a finished artifact"):
            quantize_model(model, out, **{**OPTIONS, "bits": 3}, **options)
    stopped = run(model, out, "KILL", "line", "3", options={**OPTIONS, "bits": 3, "overwrite": True})
    assert stopped.returncode == -9
    assert identity(out) == before  # the old one is whole until the new one is complete
    with pytest.raises(OutputError, match="already holds a finished artifact"):
        quantize_model(model, out, **{**OPTIONS, "bits": 3}, resume=False)
    quantize_model(model, out, **{**OPTIONS, "bits": 3})
    assert json.loads((out / "trapetum.json").read_text())["recipe"]["bits"] == 3


def test_output_must_not_be_or_hold_the_input(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(model)
    before = files(model)
    for out in (model, model / "sub", link, model / ".." / "model"):
        with pytest.raises(OutputError, match="the output"):
            quantize_model(model, out, overwrite=True, **OPTIONS)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    with pytest.raises(OutputError, match="is not empty and holds neither an artifact nor an unfinished job"):
        quantize_model(model, other, overwrite=True, **OPTIONS)
    assert files(model) == files(other) == before
