"""A step gives the logits of the general forward pass, for every layout and shape of model, at any thread count."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.kernels.cpu import layer
from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.jit import jit
from trapetum.rotation import HadamardRotation
from trapetum.runtime.attention import Cache
from trapetum.runtime.model import Model
from trapetum.runtime.step import Step, build_step
from trapetum.tensors import (
    AdditiveTensor,
    BlockTensor,
    CodebookTensor,
    DenseTensor,
    QuantizedTensor,
    TernaryTensor,
)

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def _codebook(rng: np.random.Generator, shape: tuple[int, int], entries: int) -> CodebookTensor:
    table = (0.3 * rng.standard_normal((shape[0], entries))).astype(np.float16)
    return CodebookTensor(rng.integers(0, entries, shape, dtype=np.uint8), table)


def _ternary(
    rng: np.random.Generator, shape: tuple[int, int], group: int, dtype: Any = np.float16
) -> TernaryTensor:
    scales = (0.3 * rng.standard_normal((shape[0], shape[1] // group))).astype(dtype)
    return TernaryTensor(rng.integers(0, 3, shape, dtype=np.uint8), scales)


def _q8(rng: np.random.Generator, shape: tuple[int, int]) -> BlockTensor:
    raw = rng.integers(0, 256, (shape[0], shape[1] // 32, 34), dtype=np.uint8)
    raw[:, :, 1] = 0x18  # about 0.002
    return BlockTensor("Q8_0", raw.reshape(shape[0], -1))


def _q4_1(rng: np.random.Generator, shape: tuple[int, int]) -> BlockTensor:
    raw = rng.integers(0, 256, (shape[0], shape[1] // 32, 20), dtype=np.uint8)
    raw[:, :, 1], raw[:, :, 3] = 0x28, 0xAC  # d about 0.03, m about -0.06
    return BlockTensor("Q4_1", raw.reshape(shape[0], -1))


def _additive(rng: np.random.Generator, shape: tuple[int, int]) -> AdditiveTensor:
    return AdditiveTensor(
        rng.integers(0, 256, (2, shape[1] // 8, shape[0]), dtype=np.uint8),
        (0.2 * rng.standard_normal((2, 256, 8))).astype(np.float16),
        rng.uniform(0.5, 1.5, shape[0]).astype(np.float16),
    )


LAYOUTS: dict[str, Any] = {
    "codebook 16": lambda rng, shape: _codebook(rng, shape, 16),
    "codebook 256": lambda rng, shape: _codebook(rng, shape, 256),
    "ternary 128": lambda rng, shape: _ternary(rng, shape, 128),
    "ternary 64": lambda rng, shape: _ternary(rng, shape, 64),
    "ternary 32, float32 scales": lambda rng, shape: _ternary(rng, shape, 32, np.float32),
    "additive": _additive,
    "Q8_0": _q8,
    "Q4_1": _q4_1,
    "bfloat16": lambda rng, shape: DenseTensor((0.3 * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16)),
    "float16": lambda rng, shape: DenseTensor((0.3 * rng.standard_normal(shape)).astype(np.float16)),
    "float32": lambda rng, shape: DenseTensor((0.3 * rng.standard_normal(shape)).astype(np.float32)),
}


def _source(memory_source: Any, layout: str, **changes: Any) -> Any:
    source = memory_source(**{**WIDE, **changes})
    rng = np.random.default_rng(5)
    made: dict[str, QuantizedTensor] = {}
    for name, tensor in source.tensors.items():
        made[name] = LAYOUTS[layout](rng, tensor.shape) if len(tensor.shape) == 2 else tensor
        if "Qwen2ForCausalLM" in source.config["architectures"] and name.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        ):
            bias = rng.standard_normal(tensor.shape[0]).astype(np.float32)
            made[name.replace("weight", "bias")] = DenseTensor(bias)
    source.tensors = made
    return source


def _both(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Logits after every token of IDS but the first five: token by token the general way, and by a step."""
    general, stepped = [], []
    with model.pool.session():
        for results, compiled in ((general, False), (stepped, True)):
            cache = model.new_cache(1, len(IDS))
            model.hidden(np.array([IDS[:5]]), cache)
            step = build_step(model, cache)
            assert isinstance(step, Step)
            for token in IDS[5:]:
                if compiled:
                    results.append(step(token).copy())
                else:
                    results.append(model.head(model.hidden(np.array([[token]]), cache)[0])[0])
            assert cache.length == len(IDS)
    return np.array(general), np.array(stepped)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_every_layout(memory_source: Any, layout: str) -> None:
    general, stepped = _both(Model(_source(memory_source, layout), Pool(1), "fast"))
    # int8 activations round differently where float32 differs in the last bit
    limit = 5e-3 if "ternary" in layout else 2e-4
    assert np.linalg.norm(stepped - general) <= limit * np.linalg.norm(general)


@pytest.mark.parametrize("layout", ["ternary 128", "ternary 64", "ternary 32, float32 scales"])
def test_logits_with_precise_activations(memory_source: Any, layout: str) -> None:
    general, stepped = _both(Model(_source(memory_source, layout), Pool(2), "precise"))
    assert np.linalg.norm(stepped - general) <= 3e-4 * np.linalg.norm(general)


def test_logits_of_wide_additive_matrices(memory_source: Any) -> None:
    # 1024 outputs: by table; inputs that are no whole tiles of 128
    changes = {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 32}
    source = _source(memory_source, "additive", intermediate_size=1024, vocab_size=800, **changes)
    general, stepped = _both(Model(source, Pool(2), "fast"))
    assert np.linalg.norm(stepped - general) <= 1e-5 * np.linalg.norm(general)


@pytest.mark.parametrize("layout", ["codebook 16", "float32"])
def test_logits_of_a_rotated_model(memory_source: Any, layout: str) -> None:
    # any orthogonal folding will do: the two ways must agree on what the stored weights mean
    model = Model(_source(memory_source, layout), Pool(2), "fast")
    rotation = HadamardRotation.for_widths([128, 256], seed=3)
    layers = []
    for one in model.layers:
        mixer = replace(
            one.mixer, **{part: replace(getattr(one.mixer, part), rotation=rotation) for part in "qko"}
        )
        ffn = replace(one.ffn, down=replace(one.ffn.down, rotation=rotation))
        layers.append(replace(one, mixer=mixer, ffn=ffn))  # v is not rotated: two forms of one input
    plain = _both(model)[0]
    model.layers = layers
    general, stepped = _both(model)
    assert np.linalg.norm(stepped - general) <= (2e-4 if layout == "codebook 16" else 1e-5) * np.linalg.norm(
        general
    )
    assert np.linalg.norm(plain - general) > 0.1 * np.linalg.norm(general)


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.3},
        {"softcap": 0.7},
        {"sinks": np.array([0.5, -2.0, 3.0, 0.0], np.float32)},
        {"softcap": 2.0, "sinks": np.zeros(4, np.float32), "window": 3, "scale": 1.0},
        {"cache_type": "f16"},
        {"cache_type": "f16", "window": 5},
    ],
    ids=str,
)
def test_logits_of_every_kind_of_attention(memory_source: Any, changes: dict[str, Any]) -> None:
    model = Model(_source(memory_source, "float32"), Pool(2), "fast")
    plain = _both(model)[0]
    model.layers = [replace(one, mixer=replace(one.mixer, **changes)) for one in model.layers]
    general, stepped = _both(model)
    # where float32 differs in the last bit, float16 can be rounded the other way
    limit = 1e-3 if "cache_type" in changes else 1e-5
    assert np.linalg.norm(stepped - general) <= limit * np.linalg.norm(general)
    assert not np.array_equal(plain, general)


def test_logits_with_norms_after_and_caps_and_another_gate(memory_source: Any) -> None:
    model = Model(_source(memory_source, "float32", vocab_size=61), Pool(2), "fast")
    rng = np.random.default_rng(8)
    norm = replace(model.final_norm, weight=rng.standard_normal(128).astype(np.float32))
    wide = replace(norm, weight=rng.standard_normal(128).astype(np.float32))
    first, second = model.layers
    first = replace(
        first, attn_post_norm=norm, ffn_post_norm=wide, ffn=replace(first.ffn, act="gelu_pytorch_tanh")
    )
    second = replace(second, attn_norm=None, ffn_norm=None, attn_post_norm=wide, rope=None)
    second = replace(second, mixer=replace(second.mixer, q_norm=norm))  # over all heads together
    model.layers, model.head = [first, second], replace(model.head, softcap=5.0)
    general, stepped = _both(model)
    assert np.abs(general).max() <= 5.0
    assert np.linalg.norm(stepped - general) <= 1e-5 * np.linalg.norm(general)


def test_logits_with_part_of_each_head_rotated(memory_source: Any) -> None:
    plain, model = (Model(_source(memory_source, "float32"), Pool(1), "fast") for _ in range(2))
    model.config = replace(model.config, rotary_dim=16)
    general, stepped = _both(model)
    assert np.linalg.norm(stepped - general) <= 1e-5 * np.linalg.norm(general)
    assert not np.array_equal(_both(plain)[0], general)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "num_hidden_layers": 1},
    ],
)
def test_logits_of_every_kind_of_model(memory_source: Any, changes: dict[str, Any]) -> None:
    model = Model(_source(memory_source, "float32", **changes), Pool(2), "fast")
    general, stepped = _both(model)
    assert np.linalg.norm(stepped - general) <= 1e-5 * np.linalg.norm(general)


def test_same_bits_at_any_thread_count(memory_source: Any) -> None:
    # wide enough that products and attention are spread
    wide = {"intermediate_size": 4096, "vocab_size": 4096}
    results = []
    for threads in (1, 2, 8):
        source = _source(memory_source, "codebook 16", **wide)
        model = Model(source, Pool(threads), "fast")
        results.append(model.generate(IDS, 20, stop_ids=()))
        results.append(_both(model)[1].tolist())
    assert results[0] == results[2] == results[4]
    assert results[1] == results[3] == results[5]


def test_a_step_is_not_built_where_it_would_be_wrong(memory_source: Any) -> None:
    exact = Model(_source(memory_source, "codebook 16"), Pool(1))
    assert build_step(exact, exact.new_cache(1, 4)) is None
    odd = Model(_source(memory_source, "float32", head_dim=20), Pool(1), "fast")
    assert build_step(odd, odd.new_cache(1, 4)) is None
    model = Model(_source(memory_source, "float32"), Pool(1), "fast")
    last = model.layers[-1]
    for changed in (
        replace(last, ffn=replace(last.ffn, act="gelu")),
        replace(last, mixer=replace(last.mixer, gated=True)),
        replace(last, mixer=object()),
        replace(last, ffn=object()),
    ):
        model.layers[-1] = changed
        assert build_step(model, model.new_cache(1, 4) if changed.mixer is last.mixer else Cache([])) is None


def test_a_token_allocates_nothing_that_grows(memory_source: Any) -> None:
    peaks = []
    for wide in ({}, {"intermediate_size": 2048, "vocab_size": 4096}):
        model = Model(_source(memory_source, "codebook 16", **wide), Pool(1), "fast")
        with model.pool.session():
            cache = model.new_cache(1, 100)
            model.hidden(np.array([IDS]), cache)
            step = build_step(model, cache)
            assert isinstance(step, Step)
            step(1)
            tracemalloc.start()
            for token in range(40):
                step(token)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert max(peaks) < 16384  # a row of the embedding, tables of one position, Python's own objects
    assert abs(peaks[1] - peaks[0]) < 2048


def test_exponentials() -> None:
    exponentials = jit(cache=False)(layer.exponentials)
    x = np.concatenate([np.linspace(-87, 0, 8000), np.linspace(-1e-3, 1e-3, 96), np.linspace(0, 88, 800)])
    y = x.astype(np.float32)
    exponentials(y, 0, y.size)
    np.testing.assert_allclose(y, np.exp(x.astype(np.float32).astype(np.float64)), rtol=3e-7)
    low = np.full(8, -1e30, np.float32)
    exponentials(low, 0, low.size)
    assert (low < 1e-37).all()
