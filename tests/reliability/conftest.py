"""A model of a few hundred kilobytes, and how to compare what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz_inputs import make_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 256 in two files, with a tokenizer; the one that the fuzz targets damage."""
    return make_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def identity() -> Callable[[Path], dict[str, bytes]]:
    """File name -> bytes of an artifact, without the log of the run."""

    def read(folder: Path) -> dict[str, bytes]:
        return {
            p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.name != "run.jsonl"
        }

    return read
