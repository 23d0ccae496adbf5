"""Fixtures that every folder of tests shares."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import typer.main
import typer.testing

REPOSITORY = Path(__file__).resolve().parents[1]
_BEGINNING = pytest.StashKey[Any]()  # of the random numbers of a module

# Folders whose helper modules tests import by name; tests are no package.
sys.path.extend(str(REPOSITORY / name) for name in ("tests/formats", "tests/fuzz", "tests/hub", "benchmarks"))

# A shell gives its background jobs an ignored SIGINT, and every child inherits it: without these lines, tests
# that interrupt a command wait for ever when the suite itself runs in the background (`make test &`, nohup, CI).
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)

# The same examples in every run and on every machine, and no clock: what passes here passes elsewhere. Other examples:
# ``pytest --hypothesis-profile=default --hypothesis-seed=N``.
hypothesis.settings.register_profile(
    "trapetum",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("trapetum")

# What the machine says to programs, and tests must say themselves: the share of a batch system's task, a Hub and a
# token, switches that show tracebacks and warnings. Servers of tests are on the loopback, which no proxy reaches.
_SPOKEN = (
    *("SLURM_", "JOB_COMPLETION_INDEX", "TRAPETUM_PART", "TRAPETUM_DEBUG", "DASK_"),
    *("HF_", "HUGGING", "TRANSFORMERS_", "PYTHONWARNINGS", "PYTHONDEVMODE"),
)
for _name in [name for name in os.environ if name.startswith(_SPOKEN)]:
    del os.environ[_name]
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1,localhost")))


def _work() -> None:
    """What reading headers and running commands consists of: JSON, dictionaries, small objects."""
    text = json.dumps({f"tensor.{i}": {"shape": [i], "at": [i, i + 4]} for i in range(30_000)})
    assert sum(entry["at"][1] for entry in json.loads(text).values()) > 0


_WORK_SECONDS = 0.115  # of CPU, for _work where the limits were set: a shared Xeon core of 2023


class CpuLimit:
    """CPU seconds that something may take where the limits were set; a slower machine gets as much more."""

    def check(self, spent: float, limit: float) -> None:
        """Compare what was spent with a limit; only what seems too slow is worth asking how slow the machine is."""
        if spent > limit:
            begun = time.process_time()
            _work()
            slowness = max(1.0, (time.process_time() - begun) / _WORK_SECONDS)
            assert spent <= limit * slowness, f"{spent:.2f} s on a machine {slowness:.2f} times as slow"

    @contextlib.contextmanager
    def __call__(self, limit: float) -> Iterator[None]:
        """A block of at most ``limit`` CPU seconds. The collector leaves out what other tests left in memory."""
        gc.collect()
        gc.freeze()
        begun = time.process_time()
        try:
            yield
            self.check(time.process_time() - begun, limit)
        finally:
            gc.unfreeze()


@pytest.fixture(scope="session")
def cpu_limit() -> CpuLimit:
    """``with cpu_limit(0.5): ...``, or ``cpu_limit.check(spent, 0.5)`` for what another process spent."""
    return CpuLimit()


@pytest.fixture(scope="session", autouse=True)
def _no_idle_waits() -> Iterator[None]:
    """Leave out what costs a fifth of the time and tells nothing.

    What is written is read back from memory, so waiting for the disk (4 ms a file) shows nothing: that a file is synced
    before it gets its name is a test of its own. And the command line is built once, not for every call (64 ms).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command), raising=False)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note where the random numbers of a module begin, before anything draws one."""
    for item in items:
        generator = getattr(getattr(item, "module", None), "RNG", None)
        if generator is not None:
            item.stash[_BEGINNING] = generator.bit_generator.state


def pytest_runtest_call(item: pytest.Item) -> None:
    """A module's ``RNG`` begins anew with each test: what ran before it must not choose its numbers."""
    if _BEGINNING in item.stash:
        item.module.RNG.bit_generator.state = item.stash[_BEGINNING]  # type: ignore[attr-defined]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """Start a process as ``subprocess.Popen`` does; none outlives its test, nor do its children, whatever fails."""
    running: list[subprocess.Popen[Any]] = []

    def begin(*command: object, **settings: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen([str(word) for word in command], start_new_session=True, **settings)
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The 2.5 M parameter Llama-architecture model that the repository carries."""
    return REPOSITORY / "models" / "books-2m"


@pytest.fixture(scope="session")
def demo_text() -> Path:
    """100 kB of text that the demo model never saw."""
    return REPOSITORY / "models" / "sample.txt"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of outside truth (reference files, bigger models); tests that want it skip without it."""
    folder = Path(os.environ.get("TRAPETUM_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip("the folder of reference files is not beside the source tree")
    return folder
