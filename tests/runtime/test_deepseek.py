"""DeepSeek V2 and V3 against transformers, latent attention against its definition, routers against plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.export import export_artifact
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.config import parse_config
from trapetum.models.deepseek import LatentOptions
from trapetum.models.experts import Routing
from trapetum.runtime.attention import rotary_tables
from trapetum.runtime.layers import Linear, Norm
from trapetum.runtime.matrix import build_matrix
from trapetum.runtime.mla import LatentAttention, rotate_pairs
from trapetum.runtime.routers import ROUTERS
from trapetum.tensors import DenseTensor

COMMON = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "rope_theta": 10000.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {
    "v2-lite": (
        "V2",
        {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
        },
    ),
    "v2": (
        "V2",
        {
            "q_lora_rank": 96,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "rope_parameters": PLAIN,
        },
    ),
    "v3": (
        "V3",
        {
            "q_lora_rank": 96,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "v3-halves": (
        "V3",
        {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "rope_parameters": PLAIN,
        },
    ),
}


def make(folder: Path, family: str):
    """A random model that transformers saves; returns it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    version, options = FAMILIES[family]
    config = getattr(transformers, f"Deepseek{version}Config")(**COMMON, **options)
    model = getattr(transformers, f"Deepseek{version}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(values.shape, generator=generator)
            if "norm" in name or "correction" in name:
                values.copy_(0.1 * noise + ("norm" in name))
            else:
                values.copy_(noise * (1.0 if "embed" in name else values.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_text_are_transformers(family, tmp_path):
    """Prompts longer than the original context of the rope; generation runs token by token on cached latents."""
    torch = pytest.importorskip("torch")
    model = make(tmp_path / "m", family)
    ids = np.random.default_rng(1).integers(0, COMMON["vocab_size"], 90)
    with torch.no_grad():
        expected = model(torch.tensor(ids)[None]).logits[0].numpy()
        text = model.generate(
            torch.tensor(ids[:40])[None], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 40:].tolist()
    with trapetum.load(tmp_path / "m") as ours:
        logits = ours.logits(ids)
        assert ours.generate(ids[:40].tolist(), 8, stop_ids=[]) == text
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 1e-5
    assert np.array_equal(logits.argmax(1), expected.argmax(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["v2-lite", "v3"])
def test_quantized_artifact_runs_as_its_decoded_values(family, tmp_path):
    torch = pytest.importorskip("torch")
    model = make(tmp_path / "m", family)
    trapetum.quantize_model(tmp_path / "m", tmp_path / "a", bits=4)
    ids = np.random.default_rng(2).integers(0, COMMON["vocab_size"], 50)
    with trapetum.open_artifact(tmp_path / "a") as artifact:
        layouts = {name: artifact.layout(name) for name in artifact.names()}
        state = {name: torch.tensor(artifact[name].dequantize()) for name in artifact.names()}
    assert layouts["model.layers.1.mlp.experts.3.up_proj.weight"] == "codebook"
    assert layouts["model.layers.1.self_attn.kv_b_proj.weight"] == "codebook"
    assert layouts["model.layers.1.mlp.gate.weight"] == "dense"
    # transformers stacks experts in memory: load the decoded values through its own loader
    from safetensors.torch import save_file

    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "d").mkdir()
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous() for k, v in state.items()}, tmp_path / "d/model.safetensors", {"format": "pt"}
    )
    decoded = type(model).from_pretrained(tmp_path / "d").eval()
    with torch.no_grad():
        expected = decoded(torch.tensor(ids)[None]).logits[0].numpy()
    with trapetum.load(tmp_path / "a") as ours:
        logits = ours.logits(ids)
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 1e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", ["ternary", "gguf:Q4_0", "kmeans"])
def test_every_layout_runs_as_its_dense_export(scheme, tmp_path):
    """Prompt and decoding: both orders of latent attention read decoded rows of kv_b."""
    make(tmp_path / "m", "v3")
    options = {"bits": 3} if scheme == "kmeans" else {"group_size": 64} if scheme == "ternary" else {}
    trapetum.quantize_model(tmp_path / "m", tmp_path / "a", scheme=scheme, **options)
    export_artifact(tmp_path / "a", "hf", tmp_path / "h")
    ids = np.random.default_rng(2).integers(0, COMMON["vocab_size"], 40).tolist()
    with trapetum.load(tmp_path / "a") as ours, trapetum.load(tmp_path / "h") as dense_model:
        expected = dense_model.logits(ids)
        assert np.abs(ours.logits(ids) - expected).max() < 1e-5 * np.abs(expected).max()
        assert ours.generate(ids, 5, stop_ids=[]) == dense_model.generate(ids, 5, stop_ids=[])


def dense(rng, rows, inputs, pool):
    values = (rng.standard_normal((rows, inputs)) / np.sqrt(inputs)).astype(np.float32)
    return Linear(build_matrix(DenseTensor(values), pool)), values.astype(np.float64)


def block(rng, pool, *, heads=8):
    options = LatentOptions(heads, 0, 24, 12, 8, 20, scale=0.3)
    q, wq = dense(rng, heads * 20, 40, pool)
    kv_a, wa = dense(rng, 32, 40, pool)
    kv_b, wb = dense(rng, heads * 32, 24, pool)
    o, wo = dense(rng, 40, heads * 20, pool)
    norm = Norm((1 + rng.standard_normal(24) / 5).astype(np.float32), 1e-6)
    return LatentAttention(options, (q,), None, kv_a, norm, kv_b, o), (wq, wa, wb, wo, norm.weight)


def reference(x, weights, inv_freq, heads):
    """The definition, position by position in float64: keys and values of every head are expanded."""
    wq, wa, wb, wo, gain = weights
    n = x.shape[0]
    angle = np.arange(n)[:, None] * inv_freq
    turn = np.cos(angle) + 1j * np.sin(angle)

    def rotated(v):  # [n, ..., 8], pairs of neighbours as complex numbers
        pairs = v[..., 0::2] + 1j * v[..., 1::2]
        pairs = pairs * turn.reshape(n, *(1,) * (v.ndim - 2), -1)
        return np.stack([pairs.real, pairs.imag], -1).reshape(v.shape)

    q = (x @ wq.T).reshape(n, heads, 20)
    fresh = x @ wa.T
    latent = fresh[:, :24] / np.sqrt(np.mean(fresh[:, :24] ** 2, -1, keepdims=True) + 1e-6) * gain
    kv = (latent @ wb.T).reshape(n, heads, 32)
    q = np.concatenate([q[..., :12], rotated(q[..., 12:])], -1)
    key_rope = rotated(fresh[:, 24:])
    out = np.empty((n, heads, 20))
    for i in range(n):
        for h in range(heads):
            keys = np.concatenate([kv[: i + 1, h, :12], key_rope[: i + 1]], -1)
            s = np.exp(0.3 * keys @ q[i, h])
            out[i, h] = s / s.sum() @ kv[: i + 1, h, 12:]
    return out.reshape(n, -1) @ wo.T


@pytest.mark.parametrize("heads", [8, 3])
def test_both_orders_and_the_cache_give_the_definition(heads):
    rng, pool = np.random.default_rng(3), Pool(2)
    mixer, weights = block(rng, pool, heads=heads)
    inv_freq = (100.0 ** (-np.arange(4) / 4)).astype(np.float32)
    x = rng.standard_normal((2, 70, 40)).astype(np.float32)
    expected = np.stack([reference(s.astype(np.float64), weights, inv_freq, heads) for s in x])
    with pool.session():
        whole = mixer(x, mixer.new_state(2, 70), 0, rotary_tables(inv_freq, 0, 70), pool)
        assert np.abs(whole.reshape(expected.shape) - expected).max() < 1e-5
        # blocks of several lengths over a cache that is too small at first
        state, parts, start = mixer.new_state(2, 5), [], 0
        for length in (40, 1, 1, 9, 1, 18):
            stop = start + length
            found = mixer(x[:, start:stop], state, start, rotary_tables(inv_freq, start, stop), pool)
            parts.append(found.reshape(2, length, -1))
            start = stop
        assert np.abs(np.concatenate(parts, 1) - expected).max() < 1e-5
    assert mixer._absorbs(50, 1)
    assert not mixer._absorbs(40, 40)


def test_observed_inputs(tmp_path):
    rng, pool = np.random.default_rng(4), Pool(1)
    mixer, _ = block(rng, pool)
    seen = {}
    x = rng.standard_normal((1, 5, 40)).astype(np.float32)

    def observe(part, values, /, *, expert=None):
        seen[part] = values.copy()

    inv_freq = np.ones(4, np.float32)
    with pool.session():
        out = mixer(x, mixer.new_state(1, 5), 0, rotary_tables(inv_freq, 0, 5), pool, observe)
        assert np.array_equal(mixer.o(seen["o"]), out)
    assert np.array_equal(seen["q"], x[0])
    assert seen["kv_b"].shape == (5, 24)


def test_rotated_pairs_are_complex_products():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 6, 2, 8)).astype(np.float32)
    cos, sin = rotary_tables(np.array([1, 0.5, 0.2, 0.1], np.float32), 3, 9)
    expected = (x[..., 0::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)
    rotate_pairs(x, cos, sin)
    assert np.allclose(x[..., 0::2] + 1j * x[..., 1::2], expected, atol=1e-6)


def routing(**changes):
    base = {"experts": 12, "chosen": 4, "expert_size": 8, "sparse": (True,), "groups": 4, "chosen_groups": 2}
    return Routing(**{**base, **changes})


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("name", ["softmax_groups", "sigmoid_groups"])
def test_routers_by_plain_loops(name, normalise):
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((50, 12)).astype(np.float32)
    bias = rng.standard_normal(12).astype(np.float32) if name == "sigmoid_groups" else None
    options = routing(normalise=normalise, scale=2.5)
    chosen, weights = ROUTERS[name](logits, options, bias)
    for row, found, weight in zip(logits.astype(np.float64), chosen, weights):
        scores = 1 / (1 + np.exp(-row)) if bias is not None else np.exp(row) / np.exp(row).sum()
        ranked = scores + (0 if bias is None else bias)
        top = 2 if bias is not None else 1
        worth = [sum(sorted(ranked[3 * g : 3 * g + 3])[-top:]) for g in range(4)]
        allowed = [e for g in np.argsort(worth)[-2:] for e in range(3 * g, 3 * g + 3)]
        best = sorted(allowed, key=lambda e: -ranked[e])[:4]
        assert found.tolist() == best
        expected = scores[best] / (scores[best].sum() if normalise else 1) * 2.5
        assert np.allclose(weight, expected, rtol=1e-5)


def test_extreme_logits_route_without_warnings():
    logits = np.full((1, 12), -200, np.float32)
    logits[0, 3] = 200
    chosen, weights = ROUTERS["sigmoid_groups"](logits, routing(), None)
    assert chosen[0, 0] == 3
    assert weights[0, 0] == 1
    assert np.isfinite(ROUTERS["sigmoid_groups"](logits - 400, routing(), None)[1]).all()


V3_CONFIG = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 96,
    "n_group": 4,
    "topk_group": 2,
}


def test_softmax_scale_of_the_published_models():
    """V2-Lite 0.1147214 and R1 0.1352338, with the published rope parameters."""
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    old = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    for all_dim, scale in ((0.707, 0.1147214), (1.0, 0.1352338)):
        scaling = {**old, "mscale": all_dim, "mscale_all_dim": all_dim}
        config = parse_config({**V3_CONFIG, **heads, "rope_scaling": scaling})
        assert config.sections["latent"].scale == pytest.approx(scale, rel=1e-6)
        assert config.rope.magnitude == 1.0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, UnsupportedModelError, "topk_method 'greedy'"),
        ({"n_group": 3}, CheckpointError, "n_group is 3"),
        ({"kv_lora_rank": 0}, CheckpointError, "kv_lora_rank is 0"),
        ({"v_head_dim": "wide"}, CheckpointError, "v_head_dim"),
        ({"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok is 9"),
        ({"num_experts_per_tok": 6}, CheckpointError, "topk_group"),
        ({"topk_group": 5}, CheckpointError, "topk_group is 5"),
        ({"n_group": 8}, CheckpointError, "groups of 1"),
    ],
)
def test_configs_that_cannot_be_run(change, error, words):
    with pytest.raises(error, match=words):
        parse_config({**V3_CONFIG, **change})
