"""Logits against transformers on tiny random models of every family, and on the real demo models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.runtime.evaluate import perplexity
from trapetum.runtime.model import Model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # logits and attention scores of real size
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
PHI3 = {"original_max_position_embeddings": 32, "max_position_embeddings": 512}
GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.05,
    "logits_scaling": 0.25,  # the test wants logits that vary
}
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}

OLMO3 = {
    "num_hidden_layers": 5,
    "sliding_window": 8,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        "full_attention": YARN | {"rope_theta": 5e4},
    },
}


def longrope(pairs: int) -> dict[str, Any]:
    """Factors of Phi-3's kind for so many pairs."""
    stated = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 10 for i in range(pairs)],
        "long_factor": [1.5 + i for i in range(pairs)],
    }
    return {"rope_parameters": stated}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama-yarn-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.2, "truncate": False}}),
    "llama-dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4},
            "max_position_embeddings": 64,
        },
    ),
    "phi3": ("phi3", PHI3),
    "phi3-window": ("phi3", PHI3 | {"sliding_window": 11}),
    "phi3-longrope-long": ("phi3", PHI3 | longrope(8)),
    "phi3-longrope-short": (
        "phi3",
        PHI3 | longrope(8) | {"original_max_position_embeddings": 200, "max_position_embeddings": 800},
    ),
    "phi3-partial": (
        "phi3",
        PHI3
        | {"partial_rotary_factor": 0.75, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "phi3-partial-longrope": ("phi3", PHI3 | longrope(6) | {"partial_rotary_factor": 0.75}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    "olmo3": ("olmo3", OLMO3),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}),
    "gemma2-no-caps": ("gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3-linear": ("gemma3_text", GEMMA | {"rope_parameters": BY_TYPE}),
    "gemma3-untied": ("gemma3_text", GEMMA | {"tie_word_embeddings": False}),
    "granite": ("granite", GRANITE),
    "granite-tied-biases": (
        "granite",
        GRANITE
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
    ),
    "granite-no-multipliers": ("granite", {}),
    "seed-oss": ("seed_oss", {"head_dim": 24}),
    "seed-oss-other-biases": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3-window": (
        "smollm3",
        {
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 6,
            "no_rope_layers": [1, 0, 1, 0, 0],
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-bias-gqa": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
}


def make(folder: Path, family: str, **options: Any) -> Any:
    """A random model in ``folder``; every vector is random too, so that a skipped one shows."""
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim == 1:
                values.copy_(torch.randn_like(values) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return model


def reference(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()  # type: ignore[no-any-return]


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    theirs = make(tmp_path, family, **options)
    ids = np.random.default_rng(1).integers(0, 120, 150).tolist()
    expected = reference(theirs, ids)
    assert expected.std() > 1  # a model whose logits vary, or agreement would mean little
    with trapetum.load(tmp_path) as model:
        assert relative(model.logits(ids), expected) < 1e-4
        assert (model.logits(ids).argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.99


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen3"])
def test_cached_steps_equal_one_pass(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    theirs = make(tmp_path, family, **options)
    ids = np.random.default_rng(2).integers(0, 120, 40).tolist()
    expected = reference(theirs, ids)
    with trapetum.load(tmp_path) as model, model.pool.session():
        cache = model.new_cache(1, 1)
        rows = []
        for block in ([*ids[:17]], [ids[17]], [*ids[18:30]], *([i] for i in ids[30:])):
            rows.append(model.head(model.hidden(np.array([block]), cache)[0]))
        assert relative(np.concatenate(rows), expected) < 1e-4


def test_greedy_generation_equals_transformers(tmp_path: Path) -> None:
    theirs = make(tmp_path, "llama")
    prompt = [5, 17, 99, 3]
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 4, dtype=torch.long),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, 4:].tolist()
    with trapetum.load(tmp_path) as model:
        assert model.generate(prompt, 40, stop_ids=()) == expected


def test_a_stored_head_counts_although_tied(tmp_path: Path) -> None:
    """As in transformers since 5.0: embedding and head differ, config.json says tied."""
    import json

    theirs = make(tmp_path, "llama")
    expected = reference(theirs, [1, 2, 3])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    np.testing.assert_allclose(reference(again, [1, 2, 3]), expected, atol=1e-4)
    with trapetum.load(tmp_path) as model:
        assert relative(model.logits([1, 2, 3]), expected) < 1e-4


def test_blocks_of_the_prompt_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make(tmp_path, "mistral", sliding_window=20)
    ids = np.random.default_rng(3).integers(0, 120, 130).tolist()
    monkeypatch.setattr(Model, "block_positions", 32)
    with trapetum.load(tmp_path) as model:
        assert relative(model.logits(ids), reference(theirs, ids)) < 1e-4


def test_same_bits_at_any_thread_count(tmp_path: Path) -> None:
    make(tmp_path, "qwen2")
    ids = np.random.default_rng(4).integers(0, 120, 300).tolist()
    results = []
    for threads in (1, 2, 8):
        with trapetum.load(tmp_path, threads=threads) as model:
            results.append((model.logits(ids), perplexity(model, ids, ctx=64), model.generate(ids[:9], 12)))
    for logits, score, text in results[1:]:
        np.testing.assert_array_equal(logits, results[0][0])
        assert score == results[0][1]
        assert text == results[0][2]


def check_real_model(folder: Path, text: str) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with trapetum.load(folder) as model:
        ids = model.tokenizer.encode(text)[:512]
        expected = reference(theirs, ids)
        ours = model.logits(ids)
        assert relative(ours, expected) < 1e-4
        np.testing.assert_array_equal(ours.argmax(axis=1), expected.argmax(axis=1))
        with torch.no_grad():
            loss = float(theirs(torch.tensor([ids]), labels=torch.tensor([ids])).loss)
        assert perplexity(model, ids)["nll"] == pytest.approx(loss, rel=1e-5)


def test_demo_model(demo_model: Path, demo_text: Path) -> None:
    check_real_model(demo_model, demo_text.read_text(encoding="utf-8")[:4000])


def test_bigger_real_model(shared: Path) -> None:
    text = (shared / "models" / "text" / "valid.txt").read_text(encoding="utf-8")
    check_real_model(shared / "models" / "books-18m", text[:4000])


def test_dense_weights_kept_narrow_give_the_same_bits(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(5).integers(0, 2048, 100).tolist()
    with trapetum.load(demo_model) as model:
        wide = model.logits(ids)
    monkeypatch.setattr("trapetum.runtime.weights._EXPAND_BYTES", 0)
    with trapetum.load(demo_model) as model:
        assert model.embed.values.dtype.name == "bfloat16"  # type: ignore[attr-defined]
        np.testing.assert_array_equal(model.logits(ids), wide)


def test_a_text_that_grows_past_the_original_length_gets_the_long_frequencies(tmp_path: Path) -> None:
    """LongRoPE: at that point the whole text is read anew, as in transformers."""
    theirs = make(tmp_path, "phi3", **PHI3 | longrope(8))
    prompt = [5, 17, 99, 3, 8, 44, 101, 7] * 3
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 24, dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, 24:].tolist()
    with trapetum.load(tmp_path) as model:
        found = model.generate(prompt, 24, stop_ids=())
        assert found == expected
        ids = [*prompt, *found]
        assert model.logits(ids)[-2].argmax() == found[-1]


@pytest.mark.parametrize("case", ["gemma3", "smollm3-window", "phi3-partial-longrope", "olmo2"])
def test_cached_steps_of_other_families(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    theirs = make(tmp_path, family, **options)
    ids = np.random.default_rng(2).integers(0, 120, 60).tolist()
    expected = reference(theirs, ids)
    with trapetum.load(tmp_path) as model, model.pool.session():
        cache, rows = model.new_cache(1, 1), []
        for block in (ids[:40], *([i] for i in ids[40:])):
            rows.append(model.head(model.hidden(np.array([block]), cache)[0]))
        assert relative(np.concatenate(rows), expected) < 1e-4
