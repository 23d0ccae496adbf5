"""Verify finds a changed byte anywhere, tells wrong weights from right ones, and never crashes on a bad model."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from fuzz_inputs import make_model
from safetensors.numpy import load_file, save_file

import trapetum
from trapetum.errors import FormatError, RecipeError, VerifyError
from trapetum.runtime.verify import verify_path


@pytest.fixture(scope="module")
def made(tmp_path_factory, demo_model):
    """An artifact of the demo model and its three exports."""
    folder = tmp_path_factory.mktemp("verify")
    trapetum.quantize_model(demo_model, folder / "artifact", bits=4)
    trapetum.export_artifact(folder / "artifact", "cbk", folder / "cbk")
    trapetum.export_artifact(folder / "artifact", "cbk", folder / "x.cbk")
    trapetum.export_artifact(folder / "artifact", "hf", folder / "hf")
    trapetum.quantize_model(demo_model, folder / "ternary", bits=1.58)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The same of a model of half a million weights, for tests that verify again and again."""
    folder = tmp_path_factory.mktemp("small")
    model = make_model(folder / "model")
    trapetum.quantize_model(model, folder / "artifact", bits=4, effort="fast")
    trapetum.quantize_model(model, folder / "ternary", bits=1.58, effort="fast")
    for format, name in (("cbk", "cbk"), ("cbk", "x.cbk"), ("hf", "hf")):
        trapetum.export_artifact(folder / "artifact", format, folder / name)
    return folder


def results(report):
    return {check.name: check.ok for check in report.checks}


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_good_artifact_with_source_and_text(made, demo_model, demo_text):
    text = demo_text.read_text()[:8000]
    report = verify_path(made / "artifact", source=demo_model, text=text)
    assert report.ok
    assert results(report) == dict.fromkeys(("integrity", "decoder", "reconstruction", "logits"), True)
    logits = report.checks[-1]
    assert 0 < logits.figure < 0.5
    assert "perplexity" in logits.detail
    json.dumps(report.to_dict())
    report.raise_if_wrong()


@pytest.mark.parametrize("name", ["cbk", "x.cbk", "hf"])
def test_good_exports(made, demo_model, name):
    report = verify_path(made / name, source=demo_model)
    assert report.ok
    assert results(report)["reconstruction"]
    assert 0 < report.checks[2].figure < 0.01 or name == "hf"
    assert verify_path(made / name).ok


def test_every_file_of_an_artifact_is_covered(small, tmp_path):
    copy = tmp_path / "artifact"
    shutil.copytree(small / "artifact", copy)
    files = [p for p in sorted(copy.rglob("*")) if p.is_file()]
    assert {"run.jsonl", "SHA256SUMS", "trapetum.json"} <= {p.name for p in files}
    assert len(files) > 5
    for file in files:
        size = file.stat().st_size
        for offset in (0, size // 2, size - 1):
            flip(file, offset)
            assert not verify_path(copy).ok, (file.name, offset)
            flip(file, offset)
    assert verify_path(copy).ok


@pytest.mark.parametrize("name", ["cbk", "x.cbk"])
def test_every_byte_of_a_cbk_is_covered(small, tmp_path, name):
    copy = tmp_path / "made"
    copy.mkdir()
    sources = [small / "x.cbk", small / "x.cbk.json"] if name == "x.cbk" else list((small / "cbk").iterdir())
    for file in sources:
        shutil.copyfile(file, copy / file.name)
    target = copy / "x.cbk" if name == "x.cbk" else copy
    for file in sorted(copy.iterdir()):
        size = file.stat().st_size
        for offset in (
            (0, 5, 33, 60, size // 3, size - 1) if file.suffix == ".cbk" else (0, size // 2, size - 1)
        ):
            offset = min(offset, size - 1)
            flip(file, offset)
            report = verify_path(target)
            assert not report.ok, (file.name, offset)
            assert not report.checks[0].ok
            flip(file, offset)
    assert verify_path(target).ok


@pytest.mark.parametrize("all_masks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_byte_of_the_lists_is_covered(small, tmp_path, all_masks):
    """The lists that say what the other files are have no list above them."""
    copy = tmp_path / "artifact"
    shutil.copytree(small / "artifact", copy)
    with trapetum.open_artifact(copy) as art:
        for name in ("SHA256SUMS", "run.jsonl"):
            raw = (copy / name).read_bytes()
            for offset in range(0, len(raw), 1 if name == "SHA256SUMS" else 7):
                masks = (1, 10, 32, 128)
                for mask in masks if all_masks else masks[offset % 4 :][:1]:
                    broken = bytearray(raw)
                    broken[offset] ^= mask
                    (copy / name).write_bytes(broken)
                    assert art.check_sums(), (name, offset, mask)
            (copy / name).write_bytes(raw)
        assert art.check_sums() == []


@pytest.mark.parametrize("name", ["x.gguf", "split", "hf", "planes"])
def test_every_file_of_other_exports_is_covered(small, tmp_path, name):
    copy = tmp_path / "made"
    copy.mkdir()
    if name == "x.gguf":
        trapetum.export_artifact(small / "artifact", "gguf", copy / name, gguf_type="Q8_0")
    elif name == "split":
        options = {"gguf_type": "F16", "max_shard_size": 400_000}
        trapetum.export_artifact(small / "artifact", "gguf", copy / "x.gguf", **options)
        assert len(list(copy.glob("*.gguf"))) > 1
    elif name == "planes":
        trapetum.export_artifact(small / "ternary", "planes", copy, overwrite=True)
    else:
        shutil.copytree(small / name, copy, dirs_exist_ok=True)
    target = copy if name in ("hf", "planes") else sorted(copy.glob("*.gguf"))[0]
    checked = 0
    for file in sorted(p for p in copy.iterdir() if p.is_file()):
        size = file.stat().st_size
        for offset in (0, size // 2, size - 1):
            flip(file, min(offset, size - 1))
            try:
                assert not verify_path(target).ok, (file.name, offset)
            except FormatError:
                assert offset < 16  # its first bytes say what it is
            flip(file, min(offset, size - 1))
            checked += 1
    assert checked >= 6
    assert verify_path(target).ok


def test_wrong_weights_are_found_without_checksums(made, tmp_path, demo_model):
    """A .cbk alone, its matrices of two roles exchanged: only the comparison with the source can tell."""
    file = tmp_path / "x.cbk"
    shutil.copyfile(made / "x.cbk", file)
    records = {r["name"]: r for r in json.loads((made / "x.cbk.json").read_text())["records"]}
    a, b = (records[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qk")
    data = bytearray(file.read_bytes())
    first, second = (slice(r["offset"], r["offset"] + r["nbytes"]) for r in (a, b))
    data[first], data[second] = data[second], data[first]
    file.write_bytes(data)
    assert verify_path(file).ok
    report = verify_path(file, source=demo_model)
    assert results(report)["integrity"]
    assert not results(report)["reconstruction"]
    assert "q_proj" in report.checks[2].detail
    with pytest.raises(VerifyError, match="reconstruction"):
        report.raise_if_wrong()


def test_golden_file_takes_the_vocabulary_of_its_source(tmp_path, repository):
    """500 of 512 rows are real; nothing beside the file says so, but the model it is compared with does."""
    golden = repository / "tests" / "golden" / "CBK3.cbk"
    folder = tmp_path / "source"
    folder.mkdir()
    shutil.copyfile(golden, folder / "model.cbk")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 500, "hidden_size": 256}))
    report = verify_path(golden, source=folder)
    assert report.ok
    assert report.checks[2].figure == 0
    (folder / "config.json").write_text(json.dumps({"vocab_size": 400, "hidden_size": 256}))
    report = verify_path(golden, source=folder)
    assert "pad the vocabulary are not zero" in report.checks[0].detail


def test_a_text_too_short_is_the_callers_fault(made, demo_model):
    with pytest.raises(RecipeError, match="tokens"):
        verify_path(made / "artifact", source=demo_model, text="a")


def test_another_source_is_found(made, tmp_path, demo_model):
    other = tmp_path / "other"
    trapetum.export_artifact(demo_model, "hf", other)
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-4:] = np.float32(3.0).tobytes()
    (other / "model.safetensors").write_bytes(data)
    report = verify_path(made / "artifact", source=other)
    assert not results(report)["reconstruction"]


def test_a_forged_error_is_found(made, tmp_path, demo_model):
    """The recorded error is recomputed, not believed."""
    copy = tmp_path / "artifact"
    shutil.copytree(made / "artifact", copy)
    file = copy / "trapetum.json"
    manifest = json.loads(file.read_text())
    name = next(n for n, e in manifest["tensors"].items() if e.get("relative_error"))
    manifest["tensors"][name]["relative_error"] *= 0.5
    file.write_text(json.dumps(manifest))
    report = verify_path(copy, source=demo_model)
    assert not results(report)["reconstruction"]
    assert f"{name}: relative error" in report.checks[2].detail


def test_broken_models_are_findings(made, tmp_path):
    shutil.copytree(made / "hf", tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    (tmp_path / "junk").write_bytes(b"not a model")
    (tmp_path / "empty").mkdir()
    for name in ("cut", "junk", "empty"):
        report = verify_path(tmp_path / name)
        assert not report.ok
        assert report.checks[0].detail
    with pytest.raises(FormatError, match="no such file"):
        verify_path(tmp_path / "absent")
    with pytest.raises(trapetum.errors.TrapetumError):
        verify_path(made / "artifact", source=tmp_path / "junk")


def test_non_finite_weights_are_found(made, tmp_path):
    shutil.copytree(made / "hf", tmp_path / "bad")
    file = tmp_path / "bad" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    file.write_bytes(data)
    report = verify_path(tmp_path / "bad")
    assert "1 values are not finite" in report.checks[0].detail


def test_a_wrong_kernel_is_found(made, monkeypatch):
    from trapetum.kernels.cpu.prepared import Codebook16

    decode = Codebook16.decode

    def shifted(self, out, begin):
        decode(self, out, begin)
        out[0, 0] = np.nextafter(out[0, 0], np.float32(1))

    monkeypatch.setattr(Codebook16, "decode", shifted)
    report = verify_path(made / "artifact")
    assert results(report)["integrity"]
    assert not results(report)["decoder"]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_wrong_fused_kernel_is_found(made, monkeypatch, tokens):
    from trapetum.kernels.cpu.prepared import Codebook16

    multiply = Codebook16.multiply

    def careless(self, form, out, begin, end):
        multiply(self, form, out, begin, end)
        if len(out) == tokens and begin == 0:
            out[-1, 0] *= np.float32(1.5)  # one output of one row

    monkeypatch.setattr(Codebook16, "multiply", careless)
    report = verify_path(made / "artifact")
    assert results(report)["integrity"]
    assert not results(report)["decoder"]
    assert "fused product of Codebook16" in report.checks[1].detail


def test_a_gguf_as_source_is_turned_as_the_job_turned_it(made, tmp_path):
    gguf = trapetum.export_artifact(made / "artifact", "gguf", tmp_path / "m.gguf", gguf_type="F16")
    trapetum.quantize_model(gguf, tmp_path / "out", bits=4, effort="fast", rotate="residual")
    report = verify_path(tmp_path / "out", source=gguf)
    assert results(report) == {"integrity": True, "decoder": True, "reconstruction": True, "logits": None}


def test_an_untrained_model_may_guess_as_its_source_does(tmp_path, demo_model, demo_text):
    """Random weights, as in models that projects test with: worse than guessing, and right all the same."""
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    weights = load_file(model / "model.safetensors")
    rng = np.random.default_rng(0)
    noise = {k: (rng.standard_normal(v.shape) * 0.1).astype(v.dtype) for k, v in weights.items()}
    (model / "model.safetensors").unlink()
    save_file(noise, model / "model.safetensors")
    trapetum.quantize_model(model, tmp_path / "out", bits=4, effort="fast")
    report = verify_path(tmp_path / "out", source=model, text=demo_text.read_text()[:2000])
    assert set(results(report).values()) == {True}


def test_logits_that_say_nothing_are_found(made, tmp_path, demo_model, demo_text):
    """A head with the opposite sign: finite, of the right length, and worse than guessing."""
    file = tmp_path / "x.cbk"
    data = bytearray((made / "x.cbk").read_bytes())
    head = json.loads((made / "x.cbk.json").read_text())["records"][-1]
    assert head["name"] == "lm_head.weight"
    start = head["offset"] + head["shape"][0] * head["shape"][1] // 2
    data[start:] = (-np.frombuffer(data, "<f4", offset=start)).tobytes()
    file.write_bytes(data)
    report = verify_path(file, source=demo_model, text=demo_text.read_text()[:3000])
    assert results(report) == {"integrity": True, "decoder": True, "reconstruction": False, "logits": False}
