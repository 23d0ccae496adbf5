"""Fixtures that every folder of tests shares."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# A shell gives its background jobs an ignored SIGINT, and every child inherits it: without this line, tests
# that interrupt a command wait for ever when the suite itself runs in the background (`make test &`, nohup, CI).
signal.signal(signal.SIGINT, signal.default_int_handler)


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
