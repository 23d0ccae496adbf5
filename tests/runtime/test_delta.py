"""The gated delta net against a float64 recurrence and against transformers' own layers."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.kernels.cpu.pool import Pool
from trapetum.runtime.delta import DeltaHeads, DeltaNet
from trapetum.runtime.layers import Linear, Norm
from trapetum.runtime.matrix import build_matrix
from trapetum.tensors import DenseTensor

HIDDEN, TAPS = 48, 4
SHAPES = [DeltaHeads(2, 4, 16, 24), DeltaHeads(3, 3, 8, 8), DeltaHeads(1, 3, 5, 7)]


def linear(weight, pool):
    return Linear(build_matrix(DenseTensor(np.ascontiguousarray(weight)), pool, expand=True))


def random_net(heads, pool, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    weights = {
        "qkv": normal(heads.channels, HIDDEN) / 4,
        "z": normal(heads.value_width, HIDDEN) / 4,
        "b": normal(heads.values, HIDDEN) / 4,
        "a": normal(heads.values, HIDDEN) / 4,
        "conv": normal(heads.channels, TAPS),
        "A_log": np.log(rng.uniform(0.1, 16, heads.values)).astype(np.float32),
        "dt_bias": normal(heads.values),
        "norm": 1 + normal(heads.value_dim) / 8,
        "out": normal(HIDDEN, heads.value_width) / 4,
    }
    return weights, build(weights, heads, pool)


def build(weights, heads, pool, fused=False):
    parts = [weights[name] for name in ("qkv", "z", "b", "a")]
    if fused:
        qkvz, ba = heads.fused_order()
        both = []
        for order, pair in ((qkvz, parts[:2]), (ba, parts[2:])):
            mixed = np.empty((order.size, HIDDEN), np.float32)
            mixed[order] = np.concatenate(pair)
            both.append(mixed)
        parts = both
    return DeltaNet(
        heads,
        dict(zip(("qkvz", "ba") if fused else ("qkv", "z", "b", "a"), (linear(p, pool) for p in parts))),
        weights["conv"],
        np.exp(weights["A_log"]),
        weights["dt_bias"],
        Norm(weights["norm"], 1e-6),
        linear(weights["out"], pool),
    )


def recurrence(weights, heads, x):
    """The layer in float64 from its definition, one position after another; x [positions, HIDDEN]."""
    w = {k: v.astype(np.float64) for k, v in weights.items()}
    silu = lambda y: y / (1 + np.exp(-y))  # noqa: E731
    raw = x @ w["qkv"].T
    mixed = np.zeros_like(raw)
    for t in range(x.shape[0]):
        for back in range(TAPS):
            if t >= back:
                mixed[t] += w["conv"][:, TAPS - 1 - back] * raw[t - back]
    mixed = silu(mixed)
    k1, k2 = heads.key_width, 2 * heads.key_width
    q = mixed[:, :k1].reshape(-1, heads.keys, heads.key_dim)
    k = mixed[:, k1:k2].reshape(-1, heads.keys, heads.key_dim)
    v = mixed[:, k2:].reshape(-1, heads.values, heads.value_dim)
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    beta = 1 / (1 + np.exp(-(x @ w["b"].T)))
    decay = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(x @ w["a"].T + w["dt_bias"])))
    z = (x @ w["z"].T).reshape(-1, heads.values, heads.value_dim)
    out = np.empty((x.shape[0], heads.values, heads.value_dim))
    for h in range(heads.values):
        state, source = np.zeros((heads.key_dim, heads.value_dim)), h // (heads.values // heads.keys)
        for t in range(x.shape[0]):
            key = k[t, source]
            state = decay[t, h] * (state - beta[t, h] * np.outer(key, key @ state))
            state += beta[t, h] * np.outer(key, v[t, h])
            y = (q[t, source] / heads.key_dim**0.5) @ state
            out[t, h] = y / np.sqrt((y * y).mean() + 1e-6) * w["norm"] * silu(z[t, h])
    return out.reshape(x.shape[0], -1) @ w["out"].T


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("fused", [False, True])
def test_layer_equals_its_definition(heads, fused):
    pool = Pool(2)
    weights, _ = random_net(heads, pool)
    net = build(weights, heads, pool, fused)
    x = np.random.default_rng(1).standard_normal((2, 150, HIDDEN)).astype(np.float32)
    got = net(x, net.new_state(2, 150), 0, None, pool).reshape(x.shape)
    for one in range(2):
        expected = recurrence(weights, heads, x[one].astype(np.float64))
        assert np.abs(got[one] - expected).max() < 3e-5 * np.abs(expected).max()


@pytest.mark.parametrize("cuts", [[1] * 20, [3, 1, 2, 10, 4], [19, 1]])
def test_pieces_continue_where_the_last_one_ended(cuts):
    pool = Pool(1)
    heads = SHAPES[0]
    _, net = random_net(heads, pool)
    x = np.random.default_rng(2).standard_normal((2, 20, HIDDEN)).astype(np.float32)
    whole = net(x, net.new_state(2, 20), 0, None, pool).reshape(x.shape)
    state, got, start = net.new_state(2, 20), [], 0
    for cut in cuts:
        got.append(net(x[:, start : start + cut], state, start, None, pool).reshape(2, cut, HIDDEN))
        start += cut
    assert np.allclose(np.concatenate(got, axis=1), whole, atol=1e-5 * np.abs(whole).max())


def test_same_bits_at_any_thread_count():
    heads = SHAPES[0]
    x = np.random.default_rng(3).standard_normal((2, 70, HIDDEN)).astype(np.float32)
    results = []
    for threads in (1, 2, 5):
        pool = Pool(threads)
        _, net = random_net(heads, pool)
        with pool.session():
            results.append(net(x, net.new_state(2, 70), 0, None, pool))
        pool.close()
    assert all((r == results[0]).all() for r in results)


def test_transformers_layer_agrees():
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from transformers import Qwen3_5TextConfig

    heads = DeltaHeads(2, 4, 16, 32)
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=heads.keys,
        linear_num_value_heads=heads.values,
        linear_key_head_dim=heads.key_dim,
        linear_value_head_dim=heads.value_dim,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    pool = Pool(1)
    weights, net = random_net(heads, pool)
    layer = qwen.Qwen3_5GatedDeltaNet(config, 0).eval()
    names = {"in_proj_qkv.weight": "qkv", "in_proj_z.weight": "z", "in_proj_b.weight": "b", "A_log": "A_log"}
    names |= {"in_proj_a.weight": "a", "dt_bias": "dt_bias", "norm.weight": "norm", "out_proj.weight": "out"}
    state = {k: torch.from_numpy(weights[v]) for k, v in names.items()}
    layer.load_state_dict({**state, "conv1d.weight": torch.from_numpy(weights["conv"])[:, None]})
    x = np.random.default_rng(4).standard_normal((1, 200, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        expected = layer(torch.from_numpy(x))
    expected = (expected[0] if isinstance(expected, tuple) else expected).numpy()[0]
    got = net(x, net.new_state(1, 200), 0, None, pool)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
