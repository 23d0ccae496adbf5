"""Fixtures that every folder of tests shares."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing

REPOSITORY = Path(__file__).resolve().parents[1]

# Folders whose helper modules tests import by name; tests are no package.
sys.path.extend(str(REPOSITORY / name) for name in ("tests/formats", "tests/fuzz", "tests/hub", "benchmarks"))

# A shell gives its background jobs an ignored SIGINT, and every child inherits it: without this line, tests
# that interrupt a command wait for ever when the suite itself runs in the background (`make test &`, nohup, CI).
signal.signal(signal.SIGINT, signal.default_int_handler)


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
