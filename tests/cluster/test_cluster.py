"""Real clusters of several processes, a worker of each killed at work: the bytes of a single run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trapetum.errors import KernelUnavailable, OutputError
from trapetum.formats.atomic import FolderLock
from trapetum.progress import Progress
from trapetum.quantize.job import quantize_model

pytest.importorskip("distributed")
psutil = pytest.importorskip("psutil")  # comes with distributed

OPTIONS: dict[str, Any] = {"bits": 4, "effort": "fast", "threads": 2, "max_shard_size": 1_000_000}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != "run.jsonl"}


@pytest.fixture(scope="module")
def whole(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize_model(demo_model, out, **OPTIONS)
    return contents(out)


class Killer(Progress):
    """Call ``kill`` once, when the first tensor is reported done: the others are being made."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.kill: Callable[[], None] | None = kill
        self.lines: list[str] = []

    def advance(self, amount: int, line: str | None = None) -> None:
        if line is None:
            return
        self.lines.append(line.split()[0])
        if self.kill is not None:
            self.kill()
            self.kill = None


@pytest.mark.slow
def test_local_workers_of_which_one_is_killed(
    demo_model: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    killed = []

    def kill() -> None:
        children = psutil.Process().children(recursive=True)
        parents = {c.ppid() for c in children}
        workers = [c for c in children if c.pid not in parents and "multiprocessing" in " ".join(c.cmdline())]
        workers = [c for c in workers if "spawn_main" in " ".join(c.cmdline())]
        assert len(workers) == 2  # spawned, not forked: their command line is the interpreter's own
        workers[0].kill()
        killed.append(workers[0].pid)

    progress = Killer(kill)
    out = tmp_path / "out"
    quantize_model(demo_model, out, workers=2, progress=progress, **OPTIONS)
    assert contents(out) == whole
    assert not psutil.pid_exists(killed[0])
    assert sorted(progress.lines[:29]) == sorted(set(progress.lines[:29]))


@pytest.fixture
def cluster(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> tuple[str, dict[str, subprocess.Popen[bytes]]]:
    """A scheduler and two workers as an administrator starts them, on three addresses of the loopback."""
    file = tmp_path / "scheduler.json"
    module = "distributed.cli.dask_"
    scheduler = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    workers = [
        ["worker", "--host", address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
        for address in ("127.0.0.2", "127.0.0.3")
    ]
    running = {}
    for command in (scheduler, *workers):
        line = (sys.executable, "-m", module + command[0], *command[1:], "--scheduler-file", file)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running[command[2]] = start(*line, cwd=tmp_path, **quiet)
    while not file.exists() or not file.read_text():  # first empty, then written
        time.sleep(0.1)
        assert running["127.0.0.1"].poll() is None
    return json.loads(file.read_text())["address"], running


@pytest.mark.slow
def test_a_running_cluster_that_loses_a_worker(
    demo_model: Path,
    tmp_path: Path,
    whole: dict[str, bytes],
    cluster: tuple[str, dict[str, subprocess.Popen[bytes]]],
) -> None:
    address, running = cluster
    progress = Killer(lambda: os.kill(running["127.0.0.2"].pid, signal.SIGKILL))
    out = tmp_path / "out"
    quantize_model(demo_model, out, scheduler=address, progress=progress, **OPTIONS)
    assert contents(out) == whole
    assert running["127.0.0.2"].wait(300) == -signal.SIGKILL
    log = (out / "run.jsonl").read_text()
    assert "127.0.0.3" in log

    with FolderLock(tmp_path / "locked"), pytest.raises(OutputError, match="in use by another"):
        quantize_model(demo_model, tmp_path / "locked", scheduler=address, **OPTIONS)


def test_no_cluster_there(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dask

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(KernelUnavailable, match=r"tcp://127\.0\.0\.1:1: no Dask cluster"),
    ):
        quantize_model(demo_model, tmp_path / "out", scheduler="tcp://127.0.0.1:1", **OPTIONS)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(KernelUnavailable, match="not installed") as caught:
        quantize_model(demo_model, tmp_path / "out", workers=2, **OPTIONS)
    assert "trapetum[cluster]" in str(caught.value.hint)
