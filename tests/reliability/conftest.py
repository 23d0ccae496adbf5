"""A model of a few hundred kilobytes, and how to compare what came of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 256 in two files, with a tokenizer; the one that the fuzz targets damage."""
    path = Path(__file__).parents[1] / "fuzz" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("trapetum_test_small_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    made: Path = module.make_model(tmp_path_factory.mktemp("small") / "model")
    return made


@pytest.fixture(scope="session")
def identity() -> Callable[[Path], dict[str, bytes]]:
    """File name -> bytes of an artifact, without the log of the run."""

    def read(folder: Path) -> dict[str, bytes]:
        return {
            p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.name != "run.jsonl"
        }

    return read
