"""Routed experts against transformers, in every form of storage, and at any number of threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.experts import Routing
from trapetum.runtime.layers import Linear
from trapetum.runtime.matrix import build_matrix
from trapetum.runtime.moe import Expert, RoutedExperts
from trapetum.runtime.routers import ROUTERS
from trapetum.tensors import DenseTensor

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 3}
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN2 = {**EIGHT, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", FOUR),
    "mixtral-window": ("mixtral", {**FOUR, "num_experts_per_tok": 3, "sliding_window": 9}),
    "qwen3-normalised": (
        "qwen3_moe",
        {**EIGHT, "moe_intermediate_size": 32, "head_dim": 24, "norm_topk_prob": True},
    ),
    "qwen3-every-second": ("qwen3_moe", {**EIGHT, "moe_intermediate_size": 32, "decoder_sparse_step": 2}),
    "qwen3-some": (
        "qwen3_moe",
        {
            **EIGHT, "moe_intermediate_size": 32, "mlp_only_layers": [0], "attention_bias": True,
            "use_sliding_window": True, "sliding_window": 7,
        },
    ),
    "olmoe": ("olmoe", EIGHT),
    "olmoe-normalised": ("olmoe", {**EIGHT, "norm_topk_prob": True}),
    "qwen2": ("qwen2_moe", QWEN2),
    "qwen2-window": (
        "qwen2_moe",
        {**QWEN2, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "gpt-oss": ("gpt_oss", {**FOUR, "head_dim": 16, "sliding_window": 9, "rope_parameters": YARN}),
}  # fmt: skip
IDS = np.random.default_rng(1).integers(0, 120, 150).tolist()


def make(folder: Path, case: str) -> Any:
    """A random model in ``folder``; routers spread, vectors are random, too."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    family, options = CASES[case]
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim == 1 or any(word in name for word in ("bias", "experts", "gate.weight", "router")):
                values.copy_(torch.randn_like(values) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return model


def logits(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()  # type: ignore[no-any-return]


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    expected = logits(make(tmp_path, case), IDS)
    assert expected.std() > 1
    with trapetum.load(tmp_path) as model, trapetum.load(tmp_path, threads=1) as alone:
        ours = model.logits(IDS)
        assert relative(ours, expected) < 1e-4
        assert np.array_equal(ours, alone.logits(IDS))


@pytest.mark.parametrize("case", ["mixtral", "qwen2", "gpt-oss"])
def test_cached_steps_equal_one_pass(case: str, tmp_path: Path) -> None:
    expected = logits(make(tmp_path, case), IDS[:40])
    with trapetum.load(tmp_path) as model, model.pool.session():
        cache = model.new_cache(1, 1)
        blocks = (IDS[:17], IDS[17:18], IDS[18:30], *([i] for i in IDS[30:40]))
        rows = [model.head(model.hidden(np.array([block]), cache)[0]) for block in blocks]
        assert relative(np.concatenate(rows), expected) < 1e-4


def rewrite(folder: Path, change: Any) -> None:
    """Replace the tensors of a checkpoint."""
    numpy = pytest.importorskip("safetensors.numpy")
    file = folder / "model.safetensors"
    numpy.save_file({k: np.ascontiguousarray(v) for k, v in change(numpy.load_file(file)).items()}, file)


def experts_of(tensors: dict[str, np.ndarray], layer: int, part: str, count: int) -> np.ndarray:
    prefix = f"model.layers.{layer}.mlp.experts."
    return np.stack([tensors[f"{prefix}{e}.{part}_proj.weight"] for e in range(count)])


@pytest.mark.parametrize("form", ["stacked", "fused"])
def test_every_form_of_storage_gives_the_same_bits(form: str, tmp_path: Path) -> None:
    make(tmp_path, "olmoe")
    with trapetum.load(tmp_path) as model:
        expected = model.logits(IDS[:30])

    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = {k: v for k, v in tensors.items() if ".experts." not in k}
        for layer in range(3):
            gate, up, down = (experts_of(tensors, layer, part, 8) for part in ("gate", "up", "down"))
            prefix = f"model.layers.{layer}.mlp.experts."
            if form == "fused":
                found |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], 1), f"{prefix}down_proj": down}
            else:
                parts = {"gate": gate, "up": up, "down": down}
                found |= {f"{prefix}{part}_proj.weight": values for part, values in parts.items()}
        return found

    rewrite(tmp_path, change)
    with trapetum.load(tmp_path) as model:
        assert np.array_equal(model.logits(IDS[:30]), expected)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    make(tmp_path, "mixtral")
    gone = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(CheckpointError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w3"):
        trapetum.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("num_experts_per_tok", 9, "9 of 8 experts"),
        ("num_experts_per_tok", 0, "num_experts_per_tok is 0"),
        ("norm_topk_prob", "yes", "norm_topk_prob"),
        ("clip_qkv", 8.0, "clip_qkv"),
    ],
)
def test_impossible_options_are_named(key: str, value: Any, text: str, tmp_path: Path) -> None:
    make(tmp_path, "olmoe")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(trapetum.errors.TrapetumError, match=text):
        trapetum.load(tmp_path)


def linear(rng: np.random.Generator, rows: int, columns: int, pool: Pool) -> Linear:
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    return Linear(build_matrix(DenseTensor(values), pool))


def block(pool: Pool, experts: int = 6, chosen: int = 2) -> RoutedExperts:
    rng = np.random.default_rng(0)

    def one(number: int) -> Expert:
        gate, up, down = (linear(rng, *shape, pool) for shape in ((12, 8), (12, 8), (8, 12)))
        return Expert(gate, up, down, lambda g, u: np.multiply(g, u, out=g), number)

    routing = Routing(experts, chosen, 12, (True,))
    return RoutedExperts(routing, linear(rng, experts, 8, pool), [one(e) for e in range(experts)])


@pytest.mark.parametrize("tokens", [1, 5, 200, 3000])  # the last in two groups of experts
def test_block_equals_its_definition(tokens: int) -> None:
    """One token after the other, in float64."""
    x = np.random.default_rng(3).standard_normal((tokens, 8)).astype(np.float32)
    made = {}
    for threads in (1, 3):
        pool = Pool(threads)
        experts = block(pool)
        made[threads] = experts(x, pool)
    expected = np.zeros((tokens, 8))

    def weights(layer: Linear) -> np.ndarray:
        return layer.matrix.tile(slice(0, layer.matrix.rows)).astype(np.float64)

    for t, row in enumerate(x.astype(np.float64)):
        scores = weights(experts.router) @ row
        best = np.argsort(-scores)[:2]
        share = np.exp(scores[best]) / np.exp(scores[best]).sum()
        for weight, e in zip(share, best):
            expert = experts.experts[e]
            inner = (weights(expert.gate) @ row) * (weights(expert.up) @ row)
            expected[t] += weight * (weights(expert.down) @ inner)
    assert np.array_equal(made[1], made[3])
    np.testing.assert_allclose(made[1], expected, rtol=1e-4, atol=1e-4)


def test_each_expert_shows_calibration_the_tokens_routed_to_it() -> None:
    pool = Pool(1)
    experts = block(pool)
    x = np.random.default_rng(3).standard_normal((40, 8)).astype(np.float32)
    seen: dict[tuple[str, int | None], np.ndarray] = {}
    experts(x, pool, lambda part, rows, *, expert=None: seen.__setitem__((part, expert), rows.copy()))
    chosen, _ = ROUTERS["softmax"](experts.router(x), experts.routing, None)
    for e in range(6):
        tokens = np.flatnonzero((chosen == e).any(axis=1))
        assert np.array_equal(seen["expert_gate", e], x[tokens])
        assert seen["expert_down", e].shape == (tokens.size, 12)


def test_equal_scores_go_to_the_lower_expert() -> None:
    routing = Routing(4, 2, 8, (True,))
    for router in ("softmax", "softmax_chosen"):
        chosen, weights = ROUTERS[router](np.zeros((3, 4), np.float32), routing, None)
        assert chosen.tolist() == [[0, 1]] * 3
        assert weights.tolist() == [[0.5, 0.5]] * 3
