"""The gated delta rule, token by token: the recurrence of linear-attention layers (Yang et al. 2024, Qwen3-Next).

Each value head keeps a matrix S [key, value]. A token with key k, value v, decay d and step b turns it into

    S <- d S + k (b (v - d k S))        and gives        y = q S

With a = q S, m = k S of the old S and u = b (v - d m), y = d a + (q k) u: the state is read once for both products and
passed over once more to be renewed. A state of 128 x 128 float32 is 64 KB, so both passes stay in the second-level
cache; the recurrence is bound by their 32,768 multiplications a head and token, one hundredth of the layer's matrix
products at 4096 inputs, and a chunked form (which only BLAS would make faster) is not worth its rounding.
Heads are independent: callers spread them over threads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["delta_rule"]

Floats = NDArray[np.float32]


@jit()
def delta_rule(
    q: Floats,
    k: Floats,
    v: Floats,
    decay: Floats,
    step: Floats,
    state: Floats,
    out: Floats,
    begin: int,
    end: int,
) -> None:
    """Advance value heads ``begin .. end - 1`` of one sequence.

    Parameters
    ----------
    q, k : ndarray of float32, shape (tokens, key_heads, key_dim)
        Already normalised and scaled. Value head h reads key head ``h // (value_heads / key_heads)``.
    v : ndarray of float32, shape (tokens, value_heads, value_dim)
    decay, step : ndarray of float32, shape (tokens, value_heads)
        Factor of the old state (0 .. 1), and how far the new value replaces the remembered one (0 .. 1).
    state : ndarray of float32, shape (value_heads, key_dim, value_dim)
        Changed in place.
    out : ndarray of float32, shape (tokens, value_heads, value_dim)
    begin, end : int
    """
    tokens, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[1], v.shape[2]
    group = value_heads // key_heads
    asked, known = np.empty(value_dim, np.float32), np.empty(value_dim, np.float32)
    for h in range(begin, end):
        source = h // group
        s = state[h]
        for t in range(tokens):
            keys, queries, d = k[t, source], q[t, source], decay[t, h]
            asked[:] = 0
            known[:] = 0
            product = np.float32(0)
            for i in range(key_dim):
                key, query = keys[i], queries[i]
                product += key * query
                row = s[i]
                for j in range(value_dim):
                    asked[j] += query * row[j]
                    known[j] += key * row[j]
            for j in range(value_dim):
                known[j] = step[t, h] * (v[t, h, j] - d * known[j])
                out[t, h, j] = d * asked[j] + product * known[j]
            for i in range(key_dim):
                key = keys[i]
                row = s[i]
                for j in range(value_dim):
                    row[j] = d * row[j] + key * known[j]
