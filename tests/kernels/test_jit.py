"""Kernels and their parts: a part is the function itself to Python and has no code of its own to the compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary

from trapetum.kernels.jit import inline, jit


@inline
def _both(x: Any, i: int) -> Any:
    """Two results, of which one comes from another part."""
    return _twice(x[i]), x[i]


@inline
def _twice(value: Any) -> Any:
    return value + value


@inline
def _sum(x: Any) -> Any:
    total = x[0] - x[0]
    for i in range(x.shape[0]):
        twice, once = _both(x, i)
        total += twice * once
    return total


@jit(cache=False)
def _kernel(x: Any) -> Any:
    return _sum(x) + _twice(x[0])


_alone = jit(cache=False)(_sum)


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the libraries that become machine code."""
    jit(cache=False)(lambda value: value)(1)  # what numba compiles for itself
    names: list[str] = []
    finish = JITCodeLibrary._finalize_specific

    def counted(library: JITCodeLibrary) -> None:
        names.append(library.name)
        finish(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", counted)
    return names


def test_a_kernel_with_its_parts_is_translated_once(translated: list[str]) -> None:
    x = np.arange(1, 5, dtype=np.float64)
    assert _kernel(x) == 2 * (x * x).sum() + 2
    assert translated == ["_kernel"]
    assert _kernel(x.astype(np.int32)) == 62  # the same parts for other types
    assert translated == ["_kernel", "_kernel"]


def test_a_part_is_a_function_and_can_be_a_kernel(translated: list[str]) -> None:
    x = np.arange(1, 5, dtype=np.float32)
    assert _twice(21) == 42
    assert _sum(x) == 60
    assert not translated
    assert _alone(x) == 60
    assert translated == ["_sum"]
