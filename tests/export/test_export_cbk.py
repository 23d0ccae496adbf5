"""Artifact -> .cbk, read back by a parser that is written here from the byte table alone."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.errors import FormatError, OutputError, RecipeError, TrapetumError, UnsupportedModelError
from trapetum.export import export_artifact, plan_export
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.progress import Progress

LAYER = ("input_norm", "q", "k", "v", "o", "post_norm", "gate", "up", "down")
HF = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    **{p: f"self_attn.{p}_proj" for p in "qkvo"},
    **{p: f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}


class Parser:
    """An independent reader: struct, NumPy, and nothing of the package."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at, self.tensors = raw, 4, {}
        assert raw[:4] == b"CBK3"
        layers, hidden, heads, kv, dim, inter, vocab = self.take("<7i", 28)
        self.eps, self.base, self.scale = self.take("<3f", 12)
        (bias,) = self.take("<i", 4)
        self.vocab, self.inv_freq = vocab, self.floats(dim // 2, "<f4")
        shapes = {
            "q": (heads * dim, hidden),
            "k": (kv * dim, hidden),
            "v": (kv * dim, hidden),
            "o": (hidden, heads * dim),
            "gate": (inter, hidden),
            "up": (inter, hidden),
            "down": (hidden, inter),
        }
        self.tensors["model.embed_tokens.weight"] = self.floats(vocab * hidden, "<f2").reshape(vocab, hidden)
        for layer in range(layers):
            for part in LAYER:
                name = f"model.layers.{layer}.{HF[part]}"
                if part in shapes:
                    self.tensors[name + ".weight"] = self.matrix(*shapes[part])
                else:
                    self.tensors[name + ".weight"] = self.floats(hidden, "<f4")
                if bias and part in "qkv":
                    self.tensors[name + ".bias"] = self.floats(shapes[part][0], "<f4")
        self.tensors["model.norm.weight"] = self.floats(hidden, "<f4")
        self.tensors["lm_head.weight"] = self.matrix(vocab, hidden)
        assert self.at == len(raw)

    def take(self, form, count):
        self.at += count
        return struct.unpack(form, self.raw[self.at - count : self.at])

    def floats(self, count, dtype):
        values = np.frombuffer(self.raw, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def matrix(self, out, inputs):
        packed = np.frombuffer(self.raw, np.uint8, inputs * out // 2, self.at)
        self.at += packed.nbytes
        table = self.floats(16 * out, "<f4").reshape(16, out)
        value = np.empty((out, inputs), np.float32)
        for o in range(out):
            column = packed[o // 2 :: out // 2]
            value[o] = table[(column >> 4 if o % 2 else column & 15), o]
        return value


def make_checkpoint(folder, *, config=None, biases=(), extra=(), scale=1.0, dtype=ml_dtypes.bfloat16):
    """A random Llama of one layer, 256 wide, vocabulary 300."""
    rng = np.random.default_rng(5)
    full = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 300,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **(config or {}),
    }
    h, i, v, d = (full[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = full["num_attention_heads"] * d, full["num_key_value_heads"] * d
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (v, h),
        "model.norm.weight": (h,),
        layer + "input_layernorm.weight": (h,),
        layer + "post_attention_layernorm.weight": (h,),
        layer + "self_attn.q_proj.weight": (q, h),
        layer + "self_attn.k_proj.weight": (kv, h),
        layer + "self_attn.v_proj.weight": (kv, h),
        layer + "self_attn.o_proj.weight": (h, q),
        layer + "mlp.gate_proj.weight": (i, h),
        layer + "mlp.up_proj.weight": (i, h),
        layer + "mlp.down_proj.weight": (h, i),
    }
    if not full["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    shapes |= {layer + name + ".bias": (size,) for name, size in biases}
    shapes |= dict(extra)
    folder.mkdir(parents=True, exist_ok=True)
    entries = [Entry(n, np.dtype(dtype), s) for n, s in sorted(shapes.items())]
    with SafetensorsWriter(folder / "model.safetensors", entries, {"format": "pt"}) as writer:
        for entry in entries:
            values = rng.standard_normal(entry.shape).astype(np.float32) * 0.05
            values *= scale if entry.name == "model.embed_tokens.weight" else 1.0
            writer.write(entry.name, (values + ("norm" in entry.name)).astype(dtype))
    (folder / "config.json").write_text(json.dumps(full))
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory, demo_model):
    out = tmp_path_factory.mktemp("demo") / "artifact"
    trapetum.quantize_model(demo_model, out, bits=4)
    return out


def test_demo_model_equals_the_artifact(demo, tmp_path):
    out = export_artifact(demo, "cbk", tmp_path / "out")
    raw = (out / "model.cbk").read_bytes()
    parsed = Parser(raw)
    with trapetum.open_artifact(demo) as artifact:
        for name in artifact.names():
            expected = artifact[name].dequantize()
            if name == "model.embed_tokens.weight":
                expected = expected.astype(np.float16).astype(np.float32)
            assert np.array_equal(parsed.tensors[name].astype(np.float32), expected), name
        embed = artifact["model.embed_tokens.weight"].dequantize()
    head = parsed.tensors["lm_head.weight"]
    error = np.sum((head - embed) ** 2) / np.sum(embed**2)
    manifest = json.loads((out / "manifest.json").read_text())
    row = next(r for r in manifest["report"]["tensors"] if r["name"] == "lm_head.weight")
    assert row["action"] == "quantized"
    assert "the embedding" in row["detail"]
    assert row["relative_error"] == pytest.approx(float(error), rel=1e-4)
    assert 0 < error < 0.01
    assert parsed.inv_freq[1] == np.float32(1e4 ** (-2 / 64))


def test_folder_holds_what_serving_needs(demo, tmp_path, demo_model):
    out = export_artifact(demo, "cbk", tmp_path / "out")
    names = {p.name for p in out.iterdir()}
    assert names == {"model.cbk", "manifest.json", "meta.json", "config.json"} | {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (out / "tokenizer.json").read_bytes() == (demo_model / "tokenizer.json").read_bytes()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert set(json.loads((out / "meta.json").read_text())) == {"label", "template"}
    manifest = json.loads((out / "manifest.json").read_text())
    raw = (out / "model.cbk").read_bytes()
    assert manifest["nbytes"] == len(raw)
    ends = [r["offset"] + r["nbytes"] for r in manifest["records"]]
    assert ends == [*[r["offset"] for r in manifest["records"][1:]], len(raw)]
    assert str(tmp_path) not in (out / "manifest.json").read_text()


def test_single_file_and_same_bytes_at_any_thread_count(demo, tmp_path):
    one = export_artifact(demo, "cbk", tmp_path / "x.cbk", threads=1)
    two = export_artifact(demo, "cbk", tmp_path / "y.cbk", threads=3)
    assert one.read_bytes() == two.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"x.cbk", "x.cbk.json", "y.cbk", "y.cbk.json"}


def test_dry_run_predicts_the_size_and_writes_nothing(demo, tmp_path):
    said = []

    class Listener(Progress):
        def note(self, text):
            said.append(text)

    out = export_artifact(demo, "cbk", tmp_path / "x.cbk", dry_run=True, progress=Listener())
    assert not out.exists()
    assert list(tmp_path.iterdir()) == []
    assert any("lm_head" in line for line in said)
    with plan_export(demo, "cbk", out) as plan:
        size = plan.size
        assert plan.write().stat().st_size == size
        assert plan.report()["size"] == size


def test_vocabulary_biases_and_rope(tmp_path):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = make_checkpoint(
        tmp_path / "m",
        config={"rope_scaling": rope},
        biases=[("self_attn.q_proj", 256), ("self_attn.v_proj", 256)],
    )
    trapetum.quantize_model(model, tmp_path / "a", bits=3)
    export_artifact(tmp_path / "a", "cbk", tmp_path / "x.cbk")
    parsed = Parser((tmp_path / "x.cbk").read_bytes())
    assert parsed.vocab == 512
    assert not parsed.tensors["lm_head.weight"][300:].any()
    assert not parsed.tensors["model.embed_tokens.weight"][300:].any()
    assert parsed.tensors["lm_head.weight"][:300].any(axis=1).all()
    with trapetum.open_artifact(tmp_path / "a") as artifact:
        for name in artifact.names():
            got, expected = parsed.tensors[name], artifact[name].dequantize()
            if name not in ("lm_head.weight", "model.embed_tokens.weight"):
                assert np.array_equal(got, expected), name
    assert not parsed.tensors["model.layers.0.self_attn.k_proj.bias"].any()
    # by the definition: wavelengths beyond 64 / 1 are stretched by 8, those below 64 / 4 are kept
    inv = 5e4 ** (-np.arange(0, 64, 2) / 64)
    waves = 2 * np.pi / inv
    assert parsed.inv_freq[waves > 64] == pytest.approx(inv[waves > 64] / 8, rel=1e-6)
    assert parsed.inv_freq[waves < 16] == pytest.approx(inv[waves < 16], rel=1e-6)
    # what the file means, run by our own runtime, is what the artifact means, but for head and embedding
    with trapetum.load(tmp_path / "x.cbk") as model_cbk:
        assert model_cbk.config.vocab_size == 300
        assert model_cbk.logits([1, 2, 3]).shape == (3, 300)


def test_source_gives_the_better_values(tmp_path):
    model = make_checkpoint(tmp_path / "m")
    trapetum.quantize_model(model, tmp_path / "a", bits=5)
    errors = {}
    for key, source in (("without", None), ("with", model)):
        with plan_export(tmp_path / "a", "cbk", tmp_path / f"{key}.cbk", source=source) as plan:
            plan.write()
        parsed = Parser((tmp_path / f"{key}.cbk").read_bytes())
        assert {r.action for r in plan.rows if "proj" in r.name} == {"quantized"}
        with trapetum.formats.source.open_source(model) as checkpoint:
            errors[key] = 0.0
            for name in checkpoint.names():
                if "proj" in name:
                    difference = parsed.tensors[name] - checkpoint.load(name).dequantize()
                    errors[key] += float(np.sum(difference**2))
    assert errors["with"] < 0.98 * errors["without"]
    other = make_checkpoint(tmp_path / "other", config={"vocab_size": 301})
    with pytest.raises(TrapetumError, match=r"no tensor lm_head\.weight of shape"):
        export_artifact(tmp_path / "a", "cbk", tmp_path / "z.cbk", source=other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"intermediate_size": 320}}, ["intermediate_size is 320, not a multiple of 256"]),
        (
            {"config": {"hidden_size": 192, "num_key_value_heads": 2, "head_dim": 48}},
            [
                "hidden_size is 192",
                "head_dim is 48, not a power of two",
                "num_attention_heads * head_dim is 192",
                "num_key_value_heads * head_dim is 96",
            ],
        ),
        ({"biases": [("self_attn.o_proj", 256), ("mlp.up_proj", 512)]}, ["bias of o", "bias of up"]),
        (
            {"config": {"architectures": ["MistralForCausalLM"], "sliding_window": 64}},
            ["sliding window of 64"],
        ),
        (
            {"extra": [("model.layers.0.self_attn.q_norm.weight", (64,))]},
            ["normed queries and keys"],
        ),
        (
            {
                "config": {"architectures": ["Qwen3ForCausalLM"]},
                "extra": [(f"model.layers.0.self_attn.{p}_norm.weight", (64,)) for p in "qk"],
            },
            ["qwen3", "normed"],
        ),
        ({"config": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}}, ["yarn"]),
    ],
)
def test_refusals_name_everything_before_work(tmp_path, change, words):
    model = make_checkpoint(tmp_path / "m", **change)
    with pytest.raises(UnsupportedModelError) as caught:
        export_artifact(model, "cbk", tmp_path / "x.cbk")
    for word in words:
        assert word in caught.value.message
    assert not (tmp_path / "x.cbk").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_windows_beyond_the_context_and_linear_rope_are_fine(tmp_path, config):
    model = make_checkpoint(tmp_path / "m", config=config)
    export_artifact(model, "cbk", tmp_path / "x.cbk")
    parsed = Parser((tmp_path / "x.cbk").read_bytes())
    factor = 2.0 if "rope_scaling" in config else 1.0
    assert parsed.inv_freq[0] == 1 / factor
    assert parsed.scale == factor


def test_an_embedding_beyond_float16_is_refused(tmp_path):
    model = make_checkpoint(tmp_path / "m", scale=1e6)
    with pytest.raises(FormatError, match=r"embed_tokens.*65504"):
        export_artifact(model, "cbk", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_outputs_are_protected(demo, tmp_path):
    out = tmp_path / "out"
    export_artifact(demo, "cbk", out)
    before = (out / "model.cbk").read_bytes()
    with pytest.raises(OutputError, match="exists"):
        export_artifact(demo, "cbk", out)
    export_artifact(demo, "cbk", out, overwrite=True)
    assert (out / "model.cbk").read_bytes() == before
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"notes\.txt"):
        export_artifact(demo, "cbk", out, overwrite=True)
    for target in (demo, demo / "x.cbk", demo / ".." / demo.name):
        with pytest.raises(OutputError, match="input"):
            export_artifact(demo, "cbk", target, overwrite=True)
    with pytest.raises(RecipeError, match="known are"):
        export_artifact(demo, "docx", tmp_path / "y")
    with pytest.raises(RecipeError, match="dtype"):
        export_artifact(demo, "cbk", tmp_path / "y", dtype="f16")
    with pytest.raises(OutputError, match="kind cbk"):
        export_artifact(out, "hf", tmp_path / "y")


def test_golden_logits(repository):
    golden = repository / "tests" / "golden"
    expected = np.fromfile(golden / "CBK3.logits.f32", "<f4").reshape(5, 512)
    with trapetum.load(golden / "CBK3.cbk") as model:
        logits = model.logits([1, 7, 3, 9, 2])
    assert np.array_equal(logits.argmax(1), expected.argmax(1))
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 2e-2
