"""Full disks, folders that cannot be written, two processes on one output, clocks that jump, little memory."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trapetum
from trapetum.errors import OutputError
from trapetum.progress import Progress

OPTIONS: dict[str, Any] = {"effort": "fast", "max_shard_size": 150_000}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "trapetum", *map(str, arguments)]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small file system of its own, where this user may mount one."""
    made: list[Path] = []
    if shutil.which("mount") is None:
        pytest.skip("no file system can be mounted here")

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True
        )
        if done.returncode:
            pytest.skip("no file system can be mounted here")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


@pytest.mark.parametrize("size", ["60k", "150k", "280k"])
def test_a_disk_that_fills_up(
    size: str,
    small_model: Path,
    tmp_path: Path,
    mounted: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    identity: Callable[[Path], dict[str, bytes]],
) -> None:
    """The check before the work is switched off: another program may fill the disk while the job runs."""
    disk = mounted(f"size={size}")
    for module in ("quantize.job", "formats.assemble"):
        monkeypatch.setattr(f"trapetum.{module}.require_space", lambda folder, wanted: None)
    with pytest.raises(OutputError, match="the disk is full") as caught:
        trapetum.quantize_model(small_model, disk / "out", **OPTIONS)
    assert str(disk) in caught.value.message
    assert not (disk / "out" / "trapetum.json").exists()
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    trapetum.quantize_model(small_model, disk / "out", **OPTIONS)
    trapetum.quantize_model(small_model, tmp_path / "whole", **OPTIONS)
    assert identity(disk / "out") == identity(tmp_path / "whole")


def test_little_space_is_said_before_the_work(small_model: Path, mounted: Callable[[str], Path]) -> None:
    disk = mounted("size=300k")
    with pytest.raises(OutputError, match=r"are needed, .* are free"):
        trapetum.quantize_model(small_model, disk / "out", **OPTIONS)
    assert list(disk.iterdir()) == []


def test_a_read_only_file_system(small_model: Path, mounted: Callable[[str], Path]) -> None:
    disk = mounted("ro")
    for job in (
        lambda: trapetum.quantize_model(small_model, disk / "out", **OPTIONS),
        lambda: trapetum.export_artifact(small_model, "hf", disk / "hf"),
        lambda: trapetum.export_artifact(small_model, "gguf", disk / "x.gguf"),
    ):
        with pytest.raises(OutputError, match="Read-only file system"):
            job()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_of_another_user(small_model: Path, tmp_path: Path) -> None:
    script = (
        "import os, sys; os.setgid(65534); os.setuid(65534)\n"
        "import trapetum\n"
        "from trapetum.errors import TrapetumError\n"
        "try: trapetum.quantize_model(sys.argv[1], sys.argv[2])\n"
        "except TrapetumError as error: print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(small_model), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
    )
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("another user cannot read this Python")
    assert "ermission denied" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


@pytest.mark.slow
def test_two_processes_on_one_output(
    demo_model: Path,
    tmp_path: Path,
    identity: Callable[[Path], dict[str, bytes]],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    """Whoever comes second says so, or finds the finished artifact; the bytes are those of one run."""
    out = tmp_path / "out"
    line = command("quantize", demo_model, "-o", out, "--effort", "fast")
    both = [start(*line, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 1])
    if codes == [0, 1]:
        failed = said[[p.returncode for p in both].index(1)]
        assert re.search(
            r"error: .*(in use by another trapetum process|already holds a finished artifact)", failed
        )
        assert "internal error" not in failed
    trapetum.quantize_model(demo_model, tmp_path / "whole", effort="fast")
    assert identity(out) == identity(tmp_path / "whole")


@pytest.mark.parametrize("stamp", [0, 4102444800])  # 1970; 2100
def test_times_of_files_mean_nothing(
    stamp: int, small_model: Path, tmp_path: Path, identity: Callable[[Path], dict[str, bytes]]
) -> None:
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    trapetum.quantize_model(model, tmp_path / "before", **OPTIONS)
    for path in model.iterdir():
        os.utime(path, (stamp, stamp))
    trapetum.quantize_model(model, tmp_path / "after", **OPTIONS)
    assert identity(tmp_path / "before") == identity(tmp_path / "after")


def test_a_clock_that_jumps(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    identity: Callable[[Path], dict[str, bytes]],
) -> None:
    """Wall time runs backwards by an hour a call, within a job that is stopped and goes on."""
    now = [time.time()]

    def backwards() -> float:
        now[0] -= 3600
        return now[0]

    class Stop(Progress):
        left = 4

        def advance(self, amount: int, line: str | None = None) -> None:
            if line is not None:
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt

    monkeypatch.setattr(time, "time", backwards)
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(small_model, tmp_path / "out", progress=Stop(), **OPTIONS)
    report = trapetum.quantize_model(small_model, tmp_path / "out", **OPTIONS)
    assert report.resumed == 4
    assert report.seconds is not None
    assert report.seconds >= 0
    monkeypatch.undo()
    trapetum.quantize_model(small_model, tmp_path / "whole", **OPTIONS)
    assert identity(tmp_path / "out") == identity(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("mib", [500, 800, 1100, 2000])
def test_a_limit_of_addresses(mib: int, demo_model: Path, tmp_path: Path) -> None:
    """ulimit -v: it works, or one sentence says that memory is short; never a crash, never half an artifact."""
    # Kernels are compiled and kept before: LLVM ends the process where it finds no memory.
    trapetum.quantize_model(demo_model, tmp_path / "before", threads=2, effort="fast")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))

    done = subprocess.run(
        command("quantize", demo_model, "-o", tmp_path / "out", "--threads", "2", "--effort", "fast"),
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    if done.returncode == 0:
        assert mib > 500  # the interpreter with its libraries takes more
        with trapetum.open_artifact(tmp_path / "out") as artifact:
            assert artifact.check_sums() == []
        return
    assert mib < 2000, done.stderr  # that is enough
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1, done.stderr
    assert "memory" in errors[0]
    assert "internal error" not in done.stderr
    assert not (tmp_path / "out" / "trapetum.json").exists()
