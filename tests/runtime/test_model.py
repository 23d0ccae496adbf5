"""Loading, logits of quantized layouts and of the golden .cbk, generation, and every refusal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError, KernelUnavailable, RecipeError, UnsupportedModelError
from trapetum.kernels.cpu.pool import Pool
from trapetum.runtime.model import Model
from trapetum.tensors import DenseTensor

Sources = Callable[..., Any]
EVERYTHING = ("proj", "embed", "head")


@pytest.mark.parametrize("ids", [[3], list(range(8)), list(range(40))])
def test_codebooks_equal_their_dense_values(memory_source: Sources, ids: list[int]) -> None:
    dense, coded = Model(memory_source()), Model(memory_source(EVERYTHING))
    expected, ours = dense.logits(ids), coded.logits(ids)
    assert expected.std() > 0.5
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()


def test_tied_head_is_the_embedding(memory_source: Sources) -> None:
    tied = memory_source(("embed",), tie_word_embeddings=True)
    untied = memory_source(("embed",))
    untied.tensors["lm_head.weight"] = DenseTensor(untied.tensors["model.embed_tokens.weight"].dequantize())
    # the same draws in the same order: all other tensors agree
    np.testing.assert_allclose(Model(tied).logits([1, 2]), Model(untied).logits([1, 2]), atol=1e-4)
    assert Model(tied).head.matrix is not None
    assert "lm_head.weight" not in tied.names()


@pytest.mark.parametrize("prefix", ["", "language_model.model."])
def test_names_without_the_usual_prefix(memory_source: Sources, prefix: str) -> None:
    source = memory_source()
    expected = Model(source).logits([1, 2, 3])
    source.tensors = {
        n.replace("model.", prefix, 1) if n.startswith("model.") else n: t for n, t in source.tensors.items()
    }
    np.testing.assert_array_equal(Model(source).logits([1, 2, 3]), expected)


def test_buffers_and_foreign_tensors_are_ignored(memory_source: Sources) -> None:
    source = memory_source()
    expected = Model(source).logits([1, 2, 3])
    extra = DenseTensor(np.ones((3, 3), np.float32))
    for name in (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "vision_tower.a.weight",
        "model.layers.2.eh_proj.weight",
    ):
        source.tensors[name] = extra
    np.testing.assert_array_equal(Model(source).logits([1, 2, 3]), expected)


def test_explicit_frequencies_rule_over_theta(memory_source: Sources) -> None:
    plain = memory_source()
    inv = (10000.0 ** (-np.arange(0, 8, 2) / 8)).tolist()
    listed = memory_source(trapetum_inv_freq=inv, rope_theta=7.0)
    np.testing.assert_allclose(Model(listed).logits([1, 2, 3]), Model(plain).logits([1, 2, 3]), atol=1e-5)


def test_golden_cbk(repository: Path) -> None:
    """Logits that the reference runtime gave for this file."""
    folder = repository / "tests" / "golden"
    expected = np.fromfile(folder / "CBK3.logits.f32", "<f4").reshape(5, -1)
    with trapetum.load(folder / "CBK3.cbk") as model:
        ours = model.logits([1, 7, 3, 9, 2])
        width = ours.shape[1]
        assert width in (500, expected.shape[1])
        assert model.real_vocab_size == 500
        assert np.abs(ours - expected[:, :width]).max() <= 2e-2 * np.abs(expected).max()
        np.testing.assert_array_equal(ours.argmax(axis=1), expected.argmax(axis=1))
        assert max(model.generate([1, 7], 30, stop_ids=())) < 500


def test_padding_of_a_cbk_is_never_chosen(memory_source: Sources) -> None:
    """All real logits are made negative: an unmasked argmax would take a padded row, whose logit is 0."""
    source = memory_source(eos_token_id=None)
    source.kind = "cbk"
    embed = source.tensors["model.embed_tokens.weight"].values
    embed[:50] = np.abs(embed[:50])
    embed[50:] = 0
    head = source.tensors["lm_head.weight"].values
    source.tensors["model.norm.weight"] = DenseTensor(np.ones(32, np.float32))
    model = Model(source)
    with model.pool.session():
        h = model.hidden(np.array([[1, 2, 3]]), last=True)[0, 0]
    head[:50] = -h * np.linspace(1, 2, 50)[:, None]
    head[50:] = 0
    model = Model(source)
    assert model.real_vocab_size == 50
    assert model.logits([1, 2, 3])[-1].argmax() >= 50
    assert model.generate([1, 2, 3], 1) == [0]


def test_refused_ids(memory_source: Sources) -> None:
    model = Model(memory_source())
    with pytest.raises(RecipeError, match="no token ids"):
        model.logits([])
    with pytest.raises(RecipeError, match=r"shape \[1, 2\]; one sequence"):
        model.logits([[1, 2]])
    with pytest.raises(RecipeError, match="id 60 at position 1 is outside the vocabulary of 60"):
        model.logits([0, 60])
    with pytest.raises(RecipeError, match="id -1"):
        model.logits([-1])
    with pytest.raises(RecipeError, match="integers"):
        model.logits(np.array([0.5]))
    with pytest.raises(RecipeError, match="129 tokens do not fit in the model's context of 128"):
        model.logits([0] * 129)
    with pytest.raises(RecipeError, match="129 tokens"):
        model.generate([0] * 100, 29)
    assert model.logits([0] * 128).shape == (128, 60)
    with pytest.raises(RecipeError, match="n is -1"):
        model.generate([0], -1)


def test_generation_stops_and_reports(memory_source: Sources) -> None:
    model = Model(memory_source())
    free = model.generate([1, 2], 20, stop_ids=())
    assert len(free) == 20
    seen: list[tuple[int, str]] = []
    stop = free[7]
    cut = model.generate([1, 2], 20, stop_ids=[stop], on_token=lambda i, text: seen.append((i, text)))
    assert cut == free[: free.index(stop)]
    assert seen == [(i, "") for i in cut]  # no tokenizer: no text
    assert model.generate([1, 2], 0) == []


def test_the_model_stops_at_its_own_end_token(memory_source: Sources, tmp_path: Path) -> None:
    source = memory_source(eos_token_id=None)
    free = Model(source).generate([1, 2], 12)
    assert len(free) == 12
    source.config["eos_token_id"] = [free[5], 59]
    assert Model(source).generate([1, 2], 12) == free[: free.index(free[5])]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {free[3]}}}')
    assert Model(source).generate([1, 2], 12) == free[: free.index(free[3])]


def test_sampling_depends_on_the_seed_alone(memory_source: Sources) -> None:
    model = Model(memory_source(), Pool(2))
    options = {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "stop_ids": ()}
    first = model.generate([1], 30, seed=3, **options)
    assert first == model.generate([1], 30, seed=3, **options)
    assert first != model.generate([1], 30, seed=4, **options)


def test_stop_strings_need_a_tokenizer(memory_source: Sources) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Model(memory_source()).generate([1], 2, stop=["x"])


def test_missing_and_misshapen_tensors(memory_source: Sources) -> None:
    source = memory_source()
    del source.tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        Model(source)
    source = memory_source()
    source.tensors["model.norm.weight"] = DenseTensor(np.ones(31, np.float32))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[31\], not \[32\]"):
        Model(source)


def test_packed_weights_are_refused(memory_source: Sources) -> None:
    source = memory_source()
    source.packed_format = lambda: "gptq"
    with pytest.raises(UnsupportedModelError, match="gptq"):
        Model(source)


def test_other_devices_are_refused(demo_model: Path) -> None:
    with pytest.raises(KernelUnavailable, match="'tpu'; cpu, cuda are known"):
        trapetum.load(demo_model, device="tpu")


def test_cuda_without_cupy_says_what_is_missing(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelUnavailable, match="CuPy, which is not installed") as caught:
        trapetum.load(demo_model, device="cuda")
    assert "trapetum[cuda13]" in (caught.value.hint or "")


def test_a_refused_model_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_source: Sources
) -> None:
    source = memory_source()
    del source.tensors["model.norm.weight"]
    monkeypatch.setattr("trapetum.formats.source.open_source", lambda path: source)
    with pytest.raises(CheckpointError):
        trapetum.load(tmp_path)
    assert source.closed


def test_wide_vocabularies_are_walked_in_blocks(
    memory_source: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(memory_source())
    expected = model.logits(range(40))
    monkeypatch.setattr("trapetum.runtime.model._LOGITS", 7 * 60)
    seen: list[np.ndarray] = []
    with model.pool.session():
        hidden = model.hidden(np.arange(40)[None])[0]
        model.each_logits(hidden, lambda rows, logits: seen.append(logits))
    assert [len(s) for s in seen] == [7, 7, 7, 7, 7, 5]
    np.testing.assert_allclose(np.concatenate(seen), expected, atol=1e-5)
