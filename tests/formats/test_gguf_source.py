"""GGUF models as sources: names, order of rows, config; logits against a real llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import FormatError, UnsupportedModelError
from trapetum.formats.gguf_names import gguf_name, hf_name, stored_row_order
from trapetum.formats.gguf_source import GgufSource
from trapetum.formats.gguf_values import ValueType as T
from trapetum.formats.gguf_writer import GgufWriter
from trapetum.formats.source import open_source
from trapetum.runtime.verify import verify_path

HIDDEN, INTER, HEADS, KV, HEAD, VOCAB, LAYERS = 64, 96, 4, 2, 16, 512, 2


def llama3_factors() -> np.ndarray:
    """Divisors as llama.cpp's converter computes them, from the definition."""
    out = []
    for i in range(0, HEAD, 2):
        wave = 2 * np.pi * 10000.0 ** (i / HEAD)
        smooth = (8192 / wave - 1.0) / 3.0
        out.append(1.0 if wave < 8192 / 4 else 8.0 if wave > 8192 else 1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(out, np.float32)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter stores them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def weights(arch: str, *, tied: bool, bias: bool, factors: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """A random model under GGUF names, rows in the checkpoint's order."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    found = {"token_embd.weight": 8 * normal(VOCAB, HIDDEN), "output_norm.weight": norm(HIDDEN)}
    if not tied:
        found["output.weight"] = normal(VOCAB, HIDDEN)
    if factors:
        found["rope_freqs.weight"] = llama3_factors()
    for n in range(LAYERS):
        at = f"blk.{n}."
        found |= {
            at + "attn_norm.weight": norm(HIDDEN),
            at + "attn_q.weight": 2 * normal(HEADS * HEAD, HIDDEN),
            at + "attn_k.weight": 2 * normal(KV * HEAD, HIDDEN),
            at + "attn_v.weight": normal(KV * HEAD, HIDDEN),
            at + "attn_output.weight": normal(HIDDEN, HEADS * HEAD),
            at + "ffn_norm.weight": norm(HIDDEN),
            at + "ffn_gate.weight": normal(INTER, HIDDEN),
            at + "ffn_up.weight": normal(INTER, HIDDEN),
            at + "ffn_down.weight": normal(HIDDEN, INTER),
        }
        if bias:
            for part, size in (("q", HEADS * HEAD), ("k", KV * HEAD), ("v", KV * HEAD)):
                found[at + f"attn_{part}.bias"] = normal(1, size)[0]
        if arch == "qwen3":
            found |= {at + "attn_q_norm.weight": norm(HEAD), at + "attn_k_norm.weight": norm(HEAD)}
    return found


def write_model(
    path: Path,
    arch: str = "llama",
    *,
    tied: bool = False,
    bias: bool = False,
    factors: bool = False,
    change: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Write a model that llama.cpp loads; returns its tensors under the checkpoint's names."""
    found = weights(arch, tied=tied, bias=bias, factors=factors)
    keys: dict[str, Any] = {
        "context_length": 256, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INTER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0, "vocab_size": VOCAB,
    }  # fmt: skip
    keys |= change or {}
    # Whole characters only: the server withholds pieces that are no complete text.
    tokens = ["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(VOCAB - 3))]
    with GgufWriter(path, **options) as writer:
        writer.add("general.architecture", arch)
        for key, value in keys.items():
            if value is not None:
                writer.add(f"{arch}.{key}", value, T.FLOAT32 if isinstance(value, float) else T.UINT32)
        writer.add("tokenizer.ggml.model", "llama")
        writer.add("tokenizer.ggml.pre", "default")
        writer.add("tokenizer.ggml.tokens", tokens, item_type=T.STRING)
        writer.add(
            "tokenizer.ggml.scores", [0.0] * 3 + [-float(i) for i in range(VOCAB - 3)], item_type=T.FLOAT32
        )
        writer.add("tokenizer.ggml.token_type", [2, 3, 3] + [1] * (VOCAB - 3), item_type=T.INT32)
        for key, value in (("bos", 1), ("eos", 2), ("unknown", 0)):
            writer.add(f"tokenizer.ggml.{key}_token_id", value, T.UINT32)
        for name, value in found.items():
            writer.add_tensor(name, "F32", value.shape)
        writer.begin()
        for name, value in found.items():
            heads = HEADS if "attn_q." in name else KV if "attn_k." in name else 0
            writer.write(name, interleave(value, heads) if arch == "llama" and heads else value)
    return {hf_name(name) or name: value for name, value in found.items() if name != "rope_freqs.weight"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_come_back_under_checkpoint_names_and_in_checkpoint_order(
    tmp_path: Path, arch: str, bias: bool
) -> None:
    expected = write_model(tmp_path / "m.gguf", arch, bias=bias)
    with open_source(tmp_path / "m.gguf") as source:
        assert source.kind == "gguf"
        assert set(source.names()) == set(expected)
        for name, value in expected.items():
            assert source.shape(name) == value.shape
            np.testing.assert_array_equal(source.load(name).dequantize(), value, err_msg=name)
            if value.ndim == 2:
                rows = source.load(name, slice(3, 9)).dequantize()
                np.testing.assert_array_equal(rows, value[3:9], err_msg=name)
        assert source.config["attention_bias"] is bias if arch == "llama" else True


def test_blocks_are_reordered_as_blocks(tmp_path: Path) -> None:
    write_model(tmp_path / "f.gguf")
    raw = np.random.default_rng(3).integers(
        0, 256, (HEADS * HEAD, BLOCK_TYPES["Q8_0"].row_bytes(HIDDEN)), dtype=np.uint8
    )
    raw[:, ::34], raw[:, 1::34] = 0, 60
    with GgufSource.open(tmp_path / "f.gguf") as plain, GgufWriter(tmp_path / "q.gguf") as writer:
        first = plain.files[0]
        for key, entry in first.kv.items():
            writer.add(key, entry.value, entry.type, entry.item_type)
        for name, info in first.tensors.items():
            writer.add_tensor(name, "Q8_0" if name == "blk.0.attn_q.weight" else info.type_name, info.shape)
        writer.begin()
        for name in first.tensors:
            writer.write(name, raw if name == "blk.0.attn_q.weight" else first.raw(name))
    name = "model.layers.0.self_attn.q_proj.weight"
    with GgufSource.open(tmp_path / "q.gguf") as source:
        assert (source.layout(name), source.dtype(name)) == ("blocks", np.float32)
        stored = BLOCK_TYPES["Q8_0"].decode(raw)
        loaded = source.load(name).dequantize()
        np.testing.assert_array_equal(interleave(loaded, HEADS), stored)
        np.testing.assert_array_equal(source.load(name, slice(5, 7)).dequantize(), loaded[5:7])


def test_config(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", tied=True)
    with open_source(tmp_path / "m.gguf") as source:
        config = source.config
    expected = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 256, "bos_token_id": 1,
        "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def test_rope_factors(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", factors=True)
    with open_source(tmp_path / "m.gguf") as source:
        rope = source.config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == (
        "llama3",
        8.0,
        8192,
    )


def server_log_probs(path: Path, prompt: list[int]) -> np.ndarray:
    """Log-probabilities of the next token, all of them, by llama.cpp with a float32 cache."""
    x = pytest.importorskip("xllamacpp")
    params = x.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 128, 1, False, 1
    params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    request = {
        "prompt": prompt, "max_tokens": 1, "n_predict": 1, "temperature": 0, "n_probs": VOCAB, "logprobs": VOCAB,
        "cache_prompt": False, "ignore_eos": True,
    }  # fmt: skip
    answer = x.Server(params).handle_completions(request)
    found = np.full(VOCAB, np.nan)
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        found[entry["id"]] = entry["logprob"]
    return found


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("llama", {"tied": True, "factors": True}),
        ("qwen2", {"bias": True, "tied": True}),
        ("qwen3", {}),
    ],
)
def test_logits_are_those_of_llama_cpp(tmp_path: Path, arch: str, options: dict[str, bool]) -> None:
    pytest.importorskip("xllamacpp")
    import trapetum

    write_model(tmp_path / "m.gguf", arch, **options)
    prompt = np.random.default_rng(1).integers(3, VOCAB, 40).tolist()
    logits = trapetum.load(tmp_path / "m.gguf").logits(prompt)[-1].astype(np.float64)
    ours = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    theirs = server_log_probs(tmp_path / "m.gguf", prompt)
    assert ours.std() > 0.5
    assert np.abs(ours - theirs).max() < 5e-5


def test_split_models(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "m.gguf", max_shard_bytes=60_000)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 3
    for named in (parts[0], parts[2]):
        with open_source(named) as source:
            assert source.names() == list(expected)
            np.testing.assert_array_equal(
                source.load("lm_head.weight").dequantize(), expected["lm_head.weight"]
            )
    parts[1].unlink()
    with pytest.raises(FormatError, match=r"00002-of-.*missing"):
        open_source(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(FormatError, match=r"split.no 2 of split.count \d+ does not fit part 2"):
        open_source(parts[0])
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(parts[0].read_bytes())
    with pytest.raises(FormatError, match="does not fit part 1 of 1"):
        open_source(alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_length": None}, "embedding_length is missing"),
        ({"feed_forward_length": 1.5}, "feed_forward_length is 1.5; one int is needed"),
    ],
)
def test_incomplete_metadata(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_model(tmp_path / "m.gguf", change=change)
    with open_source(tmp_path / "m.gguf") as source, pytest.raises(FormatError, match=message):
        _ = source.config


def test_faults_are_what_strict_engines_refuse(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path)
    with GgufSource.open(path) as source:
        assert source.faults() == []
        record = source.records["model.layers.0.self_attn.q_proj.weight"]
        assert (record.kind, record.nbytes) == ("F32", 4 * HEADS * HEAD * HIDDEN)
    with GgufWriter(path) as writer:
        writer.add("general.architecture", "llama")
        writer.add_tensor("token_embd.weight", 42, (64, 256), 64 * 2 * 34)
        writer.add_tensor("output_norm.weight", "F32", (256,))
        writer.begin()
        writer.write("token_embd.weight", bytes(64 * 2 * 34))
        writer.write("output_norm.weight", bytes(1024))
    with GgufSource.open(path) as source:
        assert not source.load("model.embed_tokens.weight").dequantize().any()
        assert "group 128" in source.faults()[0]
    checks = {check.name: check for check in verify_path(path).checks}
    assert not checks["integrity"].ok
    assert "group 128" in checks["integrity"].detail


def test_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for arch, key, tensor, message in [
        ("gptneox", "x.y", "token_embd.weight", "general.architecture is 'gptneox'; llama, qwen2, qwen3"),
        ("llama", "prism.hadamard.version", "token_embd.weight", "rotated"),
        ("llama", "x.y", "blk.0.attn_qkv.weight", "'blk.0.attn_qkv.weight' has no counterpart"),
        ("llama", "x.y", "blk.0.ffn_up.scale", "'blk.0.ffn_up.scale' has no counterpart"),
    ]:
        with GgufWriter(path) as writer:
            writer.add("general.architecture", arch)
            writer.add(key, 1, T.UINT32)
            writer.add_tensor(tensor, "F32", (4,))
            writer.begin()
            writer.write(tensor, np.zeros(4, np.float32))
        with open_source(path) as source:
            assert len(source.names()) == 1  # it can be looked at
            with pytest.raises(UnsupportedModelError, match=message):
                _ = source.config


def test_names_are_inverse_to_each_other() -> None:
    for name in weights("qwen3", tied=False, bias=True, factors=False):
        translated = hf_name(name)
        assert translated is not None
        assert gguf_name(translated) == name
    assert hf_name("blk.x.attn_q.weight") is None
    assert gguf_name("model.layers.0.self_attn.rotary_emb.inv_freq") is None


def test_row_order_undoes_the_converter() -> None:
    weight = np.arange(48).reshape(24, 2)
    np.testing.assert_array_equal(interleave(weight, 3)[stored_row_order(24, 3)], weight)
