"""Triton kernels without a card: what they compute, in Triton's interpreter, and what its compiler makes of them.

The interpreter is chosen when triton is first imported, and other libraries import it, too; so each set of tests runs
in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trapetum.errors import KernelUnavailable

HERE = Path(__file__).parent
PRESENT = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
needs_triton = pytest.mark.skipif(not PRESENT, reason="torch or triton is not installed")


def run(file: str, chosen: str, cache: Path, **environment: str) -> str:
    """Run a file of tests; the report of pytest where one fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, str(HERE / file)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), **environment},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    return done.stdout


@needs_triton
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("file", "interpreted"),
    [("triton_products.py", "1"), ("triton_compiled.py", "0")],
    ids=["products", "compiled"],
)
def test_without_a_card(file: str, interpreted: str, chosen: str, tmp_path: Path) -> None:
    assert "passed" in run(file, chosen, tmp_path, TRITON_INTERPRET=interpreted, CUDA_VISIBLE_DEVICES="")


@needs_triton
@pytest.mark.gpu
def test_on_a_card(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no card")
    assert "passed" in run("triton_products.py", "slow or not slow", tmp_path, TRITON_INTERPRET="0")


def test_a_sentence_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trapetum.kernels.triton.pq2", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelUnavailable, match=r"need torch and triton; t.* cannot be imported") as caught:
        importlib.import_module("trapetum.kernels.triton.pq2")
    assert "trapetum[triton]" in (caught.value.hint or "")
