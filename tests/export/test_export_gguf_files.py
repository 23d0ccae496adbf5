"""A GGUF as a file: its name and metadata, parts, threads, protection of outputs, and itself as a source."""

from __future__ import annotations

import re

import numpy as np
import pytest

from trapetum.errors import OutputError
from trapetum.export import export_artifact, plan_export
from trapetum.formats.gguf import GgufFile
from trapetum.formats.source import open_source
from trapetum.models.config import parse_config

CONVENTION = re.compile(  # the expression of the GGUF specification, section "Validating Above Naming Convention"
    r"^(?P<BaseName>[A-Za-z0-9\s]*(?:(?:-(?:(?:[A-Za-z\s][A-Za-z0-9\s]*)|(?:[0-9\s]*)))*))"
    r"-(?:(?P<SizeLabel>(?:\d+x)?(?:\d+\.)?\d+[A-Za-z](?:-[A-Za-z]+(\d+\.)?\d+[A-Za-z]+)?)"
    r"(?:-(?P<FineTune>[A-Za-z0-9\s-]+))?)?-(?:(?P<Version>v\d+(?:\.\d+)*))"
    r"(?:-(?P<Encoding>(?!LoRA|vocab)[\w_]+))?(?:-(?P<Type>LoRA|vocab))?(?:-(?P<Shard>\d{5}-of-\d{5}))?\.gguf$"
)


def test_demo_model(demo_model, tmp_path):
    with plan_export(demo_model, "gguf", tmp_path / "out") as plan:
        predicted = dict(plan.files)
        folder = plan.write()
    (path,) = folder.glob("*.gguf")
    assert {path.name: path.stat().st_size} == predicted
    assert sum(predicted.values()) == plan.size
    found = CONVENTION.match(path.name)
    assert found is not None
    assert found["SizeLabel"] == "2.5M"
    assert found["Encoding"] == "BF16"
    with GgufFile.open(path) as file, open_source(demo_model) as source:
        assert not file.notes
        meta = file.metadata
        assert meta["general.architecture"] == "llama"
        assert meta["general.file_type"] == 32
        assert meta["llama.attention.head_count"] == 4
        assert meta["llama.rope.dimension_count"] == 64
        assert abs(meta["llama.attention.layer_norm_rms_epsilon"] - 1e-5) < 1e-12
        assert meta["tokenizer.ggml.pre"] == "gpt-2"
        assert meta["tokenizer.ggml.add_bos_token"] is False
        assert "output.weight" not in file.tensors  # tied
        assert file.load("blk.0.attn_norm.weight").values.dtype == np.float32
        v = source.load("model.layers.0.self_attn.v_proj.weight").values
        assert file.load("blk.0.attn_v.weight").values.tobytes() == v.tobytes()
        q = source.load("model.layers.0.self_attn.q_proj.weight").values
        swapped = q.reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(256, 256)
        assert file.load("blk.0.attn_q.weight").values.tobytes() == swapped.tobytes()
    with open_source(path) as back, open_source(demo_model) as source:
        assert set(back.names()) == set(source.names())
        for name in source.names():
            assert np.array_equal(back.load(name).dequantize(), source.load(name).dequantize())
        ours, theirs = (parse_config(s.config) for s in (back, source))
        assert ours.rope == theirs.rope
        assert ours.rms_norm_eps == theirs.rms_norm_eps


def test_pypi_gguf_reads_it(artifact, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = export_artifact(artifact, "gguf", tmp_path / "m.gguf", gguf_type="Q6_K")
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.name").contents() == "books-2m"
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 2048
    with GgufFile.open(path) as ours:
        assert [t.name for t in reader.tensors] == list(ours.tensors)
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(values, ours.load(tensor.name).dequantize())


def test_split_by_size(artifact, tmp_path):
    with plan_export(artifact, "gguf", tmp_path / "m.gguf", max_shard_size=1 << 20) as plan:
        first = plan.write()
    written = {p.name: p.stat().st_size for p in tmp_path.glob("m*.gguf")}
    assert written == plan.files
    assert len(written) > 2
    assert first.name == f"m-00001-of-{len(written):05d}.gguf"
    with pytest.raises(OutputError, match="exists"):
        export_artifact(artifact, "gguf", tmp_path / "m.gguf")
    export_artifact(artifact, "gguf", tmp_path / "m.gguf", overwrite=True)
    assert [p.name for p in tmp_path.glob("m*.gguf")] == ["m.gguf"]


def test_threads_do_not_change_the_file(artifact, tmp_path):
    files = [export_artifact(artifact, "gguf", tmp_path / f"{n}.gguf", threads=n) for n in (1, 3)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_outputs_are_protected(artifact, tmp_path):
    out = tmp_path / "out"
    export_artifact(artifact, "gguf", out, dry_run=True)
    assert not out.exists()
    out.mkdir()
    (out / "photo.png").write_bytes(b"x")
    with pytest.raises(OutputError, match="photo"):
        export_artifact(artifact, "gguf", out, overwrite=True)
    for name in ("a\nb.gguf", "a\udcff.gguf"):
        with pytest.raises(OutputError, match="no list of checksums holds"):
            export_artifact(artifact, "gguf", tmp_path / name)


def test_a_gguf_is_a_model_too(artifact, tmp_path):
    first = export_artifact(artifact, "gguf", tmp_path / "a.gguf", gguf_type="Q6_K")
    again = export_artifact(first, "gguf", tmp_path / "b.gguf")
    with GgufFile.open(first) as a, GgufFile.open(again) as b:
        assert list(a.tensors) == list(b.tensors)
        assert all(a.raw(n).tobytes() == b.raw(n).tobytes() for n in a.tensors)
        assert a.metadata["general.name"] == b.metadata["general.name"]
        assert list(a.metadata["tokenizer.ggml.merges"]) == list(b.metadata["tokenizer.ggml.merges"])
    dense = export_artifact(first, "hf", tmp_path / "hf")
    with open_source(dense) as ours, open_source(first) as stored:
        assert set(ours.names()) == set(stored.names())
        for name in ours.names():
            assert np.array_equal(ours.load(name).values, stored.load(name).dequantize())
