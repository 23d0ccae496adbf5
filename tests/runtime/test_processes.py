"""The runtime where programs put it: several threads, spawned workers, an installation that cannot be written to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from child import measured

import trapetum

WORKER = Path(__file__).with_name("process_worker.py")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    path = tmp_path_factory.mktemp("processes") / "artifact"
    trapetum.quantize_model(demo_model, path, bits=4)
    return path


@pytest.fixture(scope="module")
def expected(artifact: Path) -> list[int]:
    with trapetum.load(artifact, threads=1, precision="fast") as model:
        return model.generate(PROMPT, 12, stop_ids=())


def work(artifact: Path, how: str, **environment: str) -> object:
    done = subprocess.run(
        [sys.executable, str(WORKER), str(artifact), how],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_threads_that_share_a_model_and_its_threads(artifact: Path, expected: list[int]) -> None:
    with trapetum.load(artifact, threads=3, precision="fast") as model, ThreadPoolExecutor(4) as several:
        jobs = [several.submit(model.generate, PROMPT, 12, stop_ids=()) for _ in range(8)]
        logits = [several.submit(model.logits, PROMPT) for _ in range(4)]
        assert [job.result() for job in jobs] == [expected] * 8
        alone = model.logits(PROMPT)
        assert all((found.result() == alone).all() for found in logits)


def test_models_in_several_threads(artifact: Path, expected: list[int]) -> None:
    def run(threads: int) -> list[int]:
        with trapetum.load(artifact, threads=threads, precision="fast") as model:
            return model.generate(PROMPT, 12, stop_ids=())

    with ThreadPoolExecutor(3) as several:
        assert list(several.map(run, (1, 2, 8))) == [expected] * 3


@pytest.mark.slow
def test_spawned_workers(artifact: Path, expected: list[int]) -> None:
    assert work(artifact, "spawn") == [expected] * 4


@pytest.mark.slow
def test_nowhere_to_keep_compiled_kernels(artifact: Path, expected: list[int], tmp_path: Path) -> None:
    # A copy of the package in which a file stands where numba would make each cache folder: not even root writes there.
    package = tmp_path / "site" / "trapetum"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(trapetum.__file__).parent, package, ignore=ignore)
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").touch()
    before = sorted(package.rglob("*"))
    nowhere = "/proc/nowhere"
    found = work(
        artifact,
        "one",
        PYTHONPATH=str(package.parent),
        HOME=nowhere,
        XDG_CACHE_HOME=nowhere,
        NUMBA_CACHE_DIR="",
    )
    assert found == expected
    assert sorted(package.rglob("*")) == before


@pytest.mark.slow
def test_kernels_of_a_model_compile_in_fifteen_seconds(
    artifact: Path, tmp_path: Path, cpu_limit: Any
) -> None:
    # CPU seconds of whole processes: on a busy machine the wall says nothing
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    cold, warm = (
        measured(sys.executable, str(WORKER), str(artifact), "one", env=environment).cpu_seconds
        for _ in range(2)
    )
    cpu_limit.check(warm, 4)  # imports, a model, and reading the cache
    cpu_limit.check(cold - warm, 15)


_COUNT = """
import sys
from numba.core.codegen import JITCodeLibrary
count, finish = 0, JITCodeLibrary._finalize_specific
def counted(library):
    global count
    count += 1
    finish(library)
JITCodeLibrary._finalize_specific = counted
import trapetum
with trapetum.load(sys.argv[1], threads=2, precision="fast") as model:
    model.generate([(7 * i + 3) % 200 for i in range(39)], 4, stop_ids=())
print(count)
"""


@pytest.mark.slow
def test_a_first_start_translates_whole_kernels_only(artifact: Path, tmp_path: Path) -> None:
    # What a first start costs on any machine: each translation is some 60 ms, 71 of them were half of its time.
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, str(artifact)],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 9 < int(done.stdout) <= 22


@pytest.mark.slow
def test_a_cpu_without_avx2_generates(artifact: Path, expected: list[int], tmp_path: Path) -> None:
    found = work(
        artifact, "one", NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path)
    )
    assert found == expected
