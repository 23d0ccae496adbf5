"""Activations, caps, and layers with norms in other places, against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trapetum.kernels.cpu.pool import Pool
from trapetum.models.config import ACTIVATIONS
from trapetum.runtime.layers import GATES, Head, Layer, Linear, Norm
from trapetum.runtime.matrix import build_matrix
from trapetum.tensors import DenseTensor

POOL = Pool(1)
X = np.concatenate([np.linspace(-12, 12, 481), [-1e4, -300.0, 0.0, 300.0, 1e4]]).astype(np.float32)
FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
    "gelu_pytorch_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: x / 2 * math.erfc(-x / math.sqrt(2)),
}


def linear(rng: np.random.Generator, rows: int, columns: int) -> Linear:
    return Linear(build_matrix(DenseTensor(rng.standard_normal((rows, columns)).astype(np.float32)), POOL))


def test_every_activation_that_a_config_may_name_is_computed() -> None:
    assert set(GATES) == set(ACTIVATIONS) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name: str) -> None:
    gate, up = X.copy(), np.full_like(X, 0.5)
    GATES[name](gate, up)
    expected = np.array([FORMULAS[name](float(x)) / 2 for x in X])
    np.testing.assert_allclose(gate, expected, rtol=2e-6, atol=5e-7)
    assert np.isfinite(gate).all()


def test_a_capped_head() -> None:
    rng = np.random.default_rng(0)
    plain = linear(rng, 30, 16)
    x = 4 * rng.standard_normal((5, 16)).astype(np.float32)
    raw = plain(x)
    assert np.abs(raw).max() > 9  # the cap does something
    np.testing.assert_array_equal(Head(plain.matrix)(x), raw)
    np.testing.assert_allclose(Head(plain.matrix, softcap=9.0)(x), 9 * np.tanh(raw / 9), rtol=1e-6, atol=1e-6)


class Mix:
    """Stands for any mixer: a linear map."""

    def __init__(self, inner: Linear) -> None:
        self.inner = inner

    def new_state(self, batch: int, capacity: int) -> None:
        return None

    def __call__(self, x: Any, state: Any, start: int, rotary: Any, pool: Pool, observe: Any) -> Any:
        return self.inner(x.reshape(-1, x.shape[-1]))


class Each:
    """Stands for any feed-forward."""

    def __init__(self, inner: Linear) -> None:
        self.inner = inner

    def __call__(self, x: Any, pool: Pool, observe: Any) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_norms_before_and_after(before: bool, after: bool) -> None:
    rng = np.random.default_rng(1)
    mix, each = linear(rng, 8, 8), linear(rng, 8, 8)
    norms = [Norm(rng.standard_normal(8).astype(np.float32), 1e-6) for _ in range(4)]
    chosen = [n if there else None for n, there in zip(norms, (before, before, after, after))]
    layer = Layer(Mix(mix), Each(each), *chosen)
    h = rng.standard_normal((2, 3, 8)).astype(np.float32)
    x = h.reshape(-1, 8).astype(np.float64)

    def normed(values: np.ndarray, norm: Norm, there: bool) -> np.ndarray:
        size = np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-6)
        return values / size * norm.weight if there else values

    for block, first, last in ((mix, norms[0], norms[2]), (each, norms[1], norms[3])):
        weight = block.matrix.tile(slice(0, 8)).astype(np.float64)
        x = x + normed(normed(x, first, before) @ weight.T, last, after)
    layer(h, None, 0, None, POOL)
    np.testing.assert_allclose(h.reshape(-1, 8), x, rtol=1e-5, atol=1e-5)
