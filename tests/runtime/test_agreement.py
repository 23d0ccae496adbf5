"""Every layout's forms agree with NumPy within the limits, with room to spare; a form that is off does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.prepare import every_form
from trapetum.kernels.cpu.prepared import Codebook16, Expanded, Table, Ternary
from trapetum.runtime.agreement import LIMITS, deviations
from trapetum.runtime.bench_cases import random_blocks
from trapetum.tensors import AdditiveTensor, BlockTensor, CodebookTensor, TernaryTensor


def _codebook(entries: int) -> CodebookTensor:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, entries, (40, 512), dtype=np.uint8)
    return CodebookTensor(codes, rng.standard_normal((40, entries)).astype(np.float16))


def _outlier() -> CodebookTensor:
    """One weight of each row is a hundred times the others: the coarsest that 14 bits can be."""
    tensor = _codebook(16)
    tensor.codes[:] %= 15
    tensor.codes[:, 7] = 15
    tensor.codebook[:, 15] = 100
    return tensor


def _ternary() -> TernaryTensor:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 3, (40, 512), dtype=np.uint8)
    return TernaryTensor(codes, rng.uniform(0.1, 1, (40, 4)).astype(np.float16))


def _additive() -> AdditiveTensor:
    rng = np.random.default_rng(2)
    return AdditiveTensor(
        rng.integers(0, 256, (2, 64, 40), dtype=np.uint8),
        rng.standard_normal((2, 256, 8)).astype(np.float16),
        np.ones(40, np.float16),
    )


@pytest.mark.parametrize(
    ("tensor", "forms"),
    [
        (_codebook(16), [Codebook16]),
        (_outlier(), [Codebook16]),
        (_codebook(200), [Table, Expanded]),
        (_ternary(), [Ternary, Ternary]),
        (BlockTensor("Q2_0", random_blocks("Q2_0", 20, 512)), [Ternary, Ternary]),
        (BlockTensor("Q6_K", random_blocks("Q6_K", 20, 512)), None),
        (_additive(), None),
    ],
)
def test_good_kernels(tensor: Any, forms: list[type] | None) -> None:
    if forms is not None:
        assert [type(form) for form in every_form(tensor)] == forms
    found = list(deviations(tensor, Pool(1), np.random.default_rng(3)))
    assert len(found) == 3 + 2 * len(every_form(tensor))
    for what, deviation, limit in found:
        assert deviation <= limit / 2, what


@pytest.mark.parametrize("kind", [Ternary, Expanded, Table, Codebook16])
def test_a_row_that_is_exchanged_shows(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = kind.multiply

    def exchanged(self: Any, form: Any, out: Any, begin: int, end: int) -> None:
        multiply(self, form, out, begin, end)
        out[:, [begin, begin + 1]] = out[:, [begin + 1, begin]]

    monkeypatch.setattr(kind, "multiply", exchanged)
    tensor = {Ternary: _ternary, Codebook16: lambda: _codebook(16)}.get(kind, lambda: _codebook(200))()
    wrong = [
        what for what, found, limit in deviations(tensor, Pool(1), np.random.default_rng(3)) if found > limit
    ]
    assert len(wrong) >= 2
    assert {f"the fused product of {kind.__name__}"} == set(wrong)
    assert kind in LIMITS


@pytest.mark.parametrize("entries", [16, 200])
def test_weights_near_the_largest_float(entries: int) -> None:
    """Their products with Gaussian inputs would be infinite, and no fault of a kernel."""
    tensor = _codebook(entries)
    tensor = CodebookTensor(tensor.codes, np.ldexp(tensor.codebook.astype(np.float32), 124))
    assert all(found <= limit for _, found, limit in deviations(tensor, Pool(1), np.random.default_rng(0)))
