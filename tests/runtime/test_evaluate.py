"""Perplexity and comparison against float64 sums over the model's own logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError, RecipeError
from trapetum.kernels.cpu.pool import Pool
from trapetum.progress import Progress
from trapetum.runtime.evaluate import compare, perplexity
from trapetum.runtime.model import Model
from trapetum.tensors import DenseTensor

Sources = Callable[..., Any]
IDS = np.random.default_rng(0).integers(0, 60, 331)


def log_probabilities(model: Model, ids: np.ndarray) -> np.ndarray:
    """float64 log-softmax of every position, the plain way."""
    z = model.logits(ids).astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("ctx", [2, 16, 33, 128])
@pytest.mark.parametrize("score", ["all", "second-half"])
def test_perplexity_by_hand(memory_source: Sources, ctx: int, score: str) -> None:
    model = Model(memory_source())
    losses: list[float] = []
    for start in range(0, IDS.size, ctx):
        window = IDS[start : start + ctx]
        if score == "second-half" and window.size < ctx:
            break  # llama.cpp's convention: whole windows only
        first = 1 if score == "all" else ctx // 2 + 1
        logp = log_probabilities(model, window)
        losses += [-float(logp[t - 1, window[t]]) for t in range(first, window.size)]
    result = perplexity(model, IDS, ctx=ctx, score=score) if losses else {"tokens": 0, "nll": 0.0}
    assert result["tokens"] == len(losses)
    if losses:
        assert result["nll"] == pytest.approx(np.mean(losses), rel=1e-6)
        assert result["ppl"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)
        assert (result["ctx"], result["score"]) == (ctx, score)


def test_small_blocks_give_the_same(memory_source: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(memory_source())
    expected = perplexity(model, IDS, ctx=32)["nll"]
    monkeypatch.setattr("trapetum.runtime.model._LOGITS", 100)
    monkeypatch.setattr("trapetum.runtime.evaluate._PIECE", 60)
    monkeypatch.setattr(Model, "block_positions", 8)  # windows longer than a block
    assert perplexity(model, IDS, ctx=32)["nll"] == pytest.approx(expected, rel=1e-6)


def test_a_text_is_encoded(demo_model: Path, demo_text: Path) -> None:
    text = demo_text.read_text(encoding="utf-8")[:3000]
    with trapetum.load(demo_model) as model:
        assert perplexity(model, text) == perplexity(model, model.tokenizer.encode(text))


def test_the_demo_model_knows_english(demo_model: Path, demo_text: Path) -> None:
    text = demo_text.read_text(encoding="utf-8")[:20000]
    with trapetum.load(demo_model) as model:
        assert 25 < perplexity(model, text)["ppl"] < 45
        backwards = text[::-1]
        assert perplexity(model, backwards)["ppl"] > 300


def test_refusals(memory_source: Sources) -> None:
    model = Model(memory_source())
    with pytest.raises(RecipeError, match="score is 'half'"):
        perplexity(model, IDS, score="half")
    with pytest.raises(RecipeError, match="ctx is 1"):
        perplexity(model, IDS, ctx=1)
    with pytest.raises(RecipeError, match="context of 128"):
        perplexity(model, IDS, ctx=129)
    with pytest.raises(RecipeError, match="1 tokens; at least 2"):
        perplexity(model, [5], ctx=16)
    with pytest.raises(RecipeError, match="id 60"):
        perplexity(model, [5, 60], ctx=16)
    with pytest.raises(RecipeError, match="vocabularies of 60 and 64"):
        compare(model, Model(memory_source(vocab_size=64)), IDS, ctx=16)


def test_a_model_equals_itself_exactly(memory_source: Sources) -> None:
    source = memory_source(("proj", "embed", "head"))
    r = compare(Model(source), Model(source), IDS, ctx=64)
    assert (r["kl_mean"], r["kl_max"], r["tv_mean"], r["tv_max"]) == (0.0, 0.0, 0.0, 0.0)
    assert (r["top1_agreement"], r["argmax_changes"], r["argmax_ties"], r["changes"]) == (1.0, 0, 0, [])
    assert r["ppl_a"] == r["ppl_b"]


def test_compare_by_hand(memory_source: Sources) -> None:
    a, b = Model(memory_source(seed=1)), Model(memory_source(seed=1))
    rng = np.random.default_rng(5)
    b.head.matrix.values += 0.05 * rng.standard_normal(b.head.matrix.values.shape).astype(np.float32)  # type: ignore[attr-defined]
    pa = np.concatenate([log_probabilities(a, IDS[i : i + 64])[:-1] for i in range(0, IDS.size, 64)])
    pb = np.concatenate([log_probabilities(b, IDS[i : i + 64])[:-1] for i in range(0, IDS.size, 64)])
    kl = (np.exp(pa) * (pa - pb)).sum(axis=1)
    tv = 0.5 * np.abs(np.exp(pa) - np.exp(pb)).sum(axis=1)
    changed = pa.argmax(axis=1) != pb.argmax(axis=1)
    top = np.sort(pa, axis=1)
    margin = (top[:, -1] - top[:, -2])[changed]
    r = compare(a, b, IDS, ctx=64)
    assert changed.sum() > 3
    assert r["tokens"] == kl.size
    assert r["kl_mean"] == pytest.approx(kl.mean(), rel=1e-4)
    assert r["kl_max"] == pytest.approx(kl.max(), rel=1e-4)
    assert r["tv_mean"] == pytest.approx(tv.mean(), rel=1e-4)
    assert r["argmax_changes"] == changed.sum()
    assert r["top1_agreement"] == pytest.approx(1 - changed.mean())
    assert r["change_margin_max"] == pytest.approx(margin.max(), abs=1e-4)
    assert r["change_margin_mean"] == pytest.approx(margin.mean(), abs=1e-4)
    assert r["argmax_ties"] == 0
    assert [c["margin"] for c in r["changes"]] == sorted((c["margin"] for c in r["changes"]), reverse=True)
    worst = r["changes"][0]
    assert (worst["a"], worst["b"]) == (pa[worst["position"]].argmax(), pb[worst["position"]].argmax())
    assert r["nll_a"] == pytest.approx(perplexity(a, IDS, ctx=64)["nll"], rel=1e-9)
    assert r["nll_b"] == pytest.approx(perplexity(b, IDS, ctx=64)["nll"], rel=1e-9)


def test_ties_are_told_apart(memory_source: Sources) -> None:
    """Two head rows are equal in ``a``; ``b`` prefers the second of them by a hair."""
    a, b = Model(memory_source()), Model(memory_source())
    for model in (a, b):
        weights = model.head.matrix.values  # type: ignore[attr-defined]
        weights[7] *= 40
        weights[9] = weights[7]
    b.head.matrix.values[9] *= np.float32(1.001)  # type: ignore[attr-defined]
    r = compare(a, b, IDS, ctx=64)
    assert r["argmax_changes"] > 10
    assert r["argmax_ties"] == r["argmax_changes"]
    assert r["change_margin_max"] == 0.0
    assert all(c["tie"] for c in r["changes"])


def test_padding_of_a_cbk_has_no_probability(memory_source: Sources) -> None:
    plain, padded = memory_source(), memory_source(vocab_size=64)
    for name, tensor in plain.tensors.items():
        values = tensor.values
        if values.shape[0] == 60:
            values = np.concatenate([values, np.zeros((4, 32), np.float32)])
        padded.tensors[name] = DenseTensor(values)
    padded.kind = "cbk"
    a, b = Model(plain), Model(padded)
    assert (b.vocab_size, b.real_vocab_size) == (64, 60)
    assert perplexity(b, IDS, ctx=64)["nll"] == pytest.approx(perplexity(a, IDS, ctx=64)["nll"], rel=1e-9)
    assert compare(a, b, IDS, ctx=64)["kl_max"] < 1e-9


def test_progress_counts_every_token(memory_source: Sources) -> None:
    class Counter(Progress):
        total = done = 0

        def begin(self, label: str, total: int, unit: str = "B") -> None:
            self.total = total

        def advance(self, amount: int, line: str | None = None) -> None:
            self.done += amount

    counter = Counter()
    perplexity(Model(memory_source()), IDS, ctx=64, progress=counter)
    assert counter.done == counter.total == IDS.size


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spoilt", [np.nan, 3e38])
def test_logits_that_are_not_finite_are_said(memory_source: Sources, threads: int, spoilt: float) -> None:
    """In one sentence, and with no warning (which the tests take for an error) at any product before."""
    whole, broken = Model(memory_source(), Pool(threads)), memory_source()
    name = "model.layers.1.mlp.up_proj.weight"
    broken.tensors[name] = DenseTensor(np.full(broken.shape(name), spoilt, np.float32))
    model = Model(broken, Pool(threads))
    said = r"after token 0 .* logits are not finite"
    with pytest.raises(CheckpointError, match=said):
        perplexity(model, IDS, ctx=32)
    for one, other in ((whole, model), (model, whole)):
        with pytest.raises(CheckpointError, match=said):
            compare(one, other, IDS, ctx=32)
    model.precision = "exact"
    for temperature in (0.0, 1.0):
        with pytest.raises(CheckpointError, match=r"after token 4 .* logits are not finite"):
            model.generate(IDS[:5].tolist(), 3, temperature, stop_ids=())
