"""Model -> .cbk without an artifact: the same bytes, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import trapetum
import trapetum.export.direct as direct
import trapetum.formats.cbk_resume as resume
from trapetum.cli.app import app
from trapetum.errors import CheckpointError, OutputError, UnsupportedModelError
from trapetum.export import export_artifact
from trapetum.export.direct import DirectCbk
from trapetum.formats.cbk_layouts import CBK_LAYOUTS
from trapetum.formats.cbk_records import CbkHeader
from trapetum.formats.cbk_resume import ResumableCbkWriter
from trapetum.formats.imatrix import MomentsWriter, open_statistics
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import open_source
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.config import parse_config
from trapetum.progress import Progress
from trapetum.quantize.plan import make_plan
from trapetum.quantize.pressed import PressedSource
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.statistics import Statistics
from trapetum.quantize.survey import survey
from trapetum.runtime.calibrate import collect, distinct_inputs

CONFIG = json.loads(Path(__file__).with_name("deepseek_v3.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A bfloat16 checkpoint with a tokenizer file and a licence beside it."""
    folder = tmp_path_factory.mktemp("direct") / "tiny"
    folder.mkdir()
    parsed = parse_config(CONFIG)
    rng = np.random.default_rng(3)
    dtype = np.dtype(ml_dtypes.bfloat16)
    shapes = parsed.architecture.expected_shapes(parsed)
    entries = [Entry(n, dtype, s) for n, s in shapes.items()]
    with SafetensorsWriter(folder / "model.safetensors", entries) as writer:
        for entry in entries:
            values = rng.standard_normal(entry.shape) * (
                0.1 if len(entry.shape) == 1 else entry.shape[-1] ** -0.5
            )
            writer.write(entry.name, (values + ("norm" in entry.name)).astype(dtype))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def two_steps(model, tmp_path_factory):
    """What quantize and export make of it: the folder's files and the report of quantize."""
    folder = tmp_path_factory.mktemp("two")
    report = trapetum.quantize_model(model, folder / "work", bits=4)
    export_artifact(folder / "work", "cbk", folder / "work-cbk")
    return contents(folder / "work-cbk"), report


def test_same_bytes_and_nothing_else(model, two_steps, tmp_path):
    report = trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk())
    expected, before = two_steps
    assert report.out == tmp_path / "work-cbk"
    assert contents(report.out) == expected
    assert [p.name for p in tmp_path.iterdir()] == ["work-cbk"]
    assert report.nbytes == len(expected["model.cbk"])
    assert report.errors == pytest.approx(before.errors, rel=1e-12)
    assert report.resumed == 0


class Killer(Progress):
    """Ends the process's work after some records, as SIGKILL would but for what Python cleans up."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, count, line=None):
        if line is not None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


@pytest.mark.parametrize("after", [1, 17, 40])
def test_an_interrupted_run_goes_on(model, two_steps, tmp_path, after):
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(
            model, tmp_path / "work", bits=4, route=DirectCbk(), progress=Killer(after), threads=1
        )
    assert not (tmp_path / "work-cbk").exists()
    journal = tmp_path / "work/.trapetum/model.cbk.journal"
    done = len(journal.read_text().splitlines())
    assert done == after - 1
    # a line that was being written, and bytes after the last whole record
    with open(journal, "a") as file:
        file.write('{"name": "x"')
    with open(journal.with_suffix(""), "ab") as file:
        file.write(b"torn")
    report = trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk())
    assert report.resumed == done
    assert contents(report.out) == two_steps[0]
    assert report.errors == pytest.approx(two_steps[1].errors, rel=1e-12)
    assert [p.name for p in tmp_path.iterdir()] == ["work-cbk"]


def test_a_damaged_record_is_made_again(model, two_steps, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk(), progress=Killer(30))
    file = tmp_path / "work/.trapetum/model.cbk"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    report = trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk())
    assert 0 < report.resumed < 29
    assert contents(report.out) == two_steps[0]


def test_a_full_disk_is_one_error_and_the_work_stays(model, two_steps, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(resume, "_SYNC_BYTES", 1)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="the disk is full"):
        trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk())
    monkeypatch.undo()
    report = trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk())
    assert report.resumed > 5
    assert contents(report.out) == two_steps[0]


def test_another_job_in_the_folder_is_refused(model, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk(), progress=Killer(3))
    with pytest.raises(OutputError, match=r"recipe\.name"):
        trapetum.quantize_model(model, tmp_path / "work", bits=3, route=DirectCbk())
    with pytest.raises(OutputError, match="export"):
        trapetum.quantize_model(model, tmp_path / "work", bits=4)
    trapetum.quantize_model(model, tmp_path / "work", bits=3, route=DirectCbk(), resume=False)
    assert (tmp_path / "work-cbk/model.cbk").is_file()


def test_a_kill_after_the_publication_is_cleaned_up(model, two_steps, tmp_path, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(direct, "discard_job", killed)
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk())
    monkeypatch.undo()
    assert contents(tmp_path / "work-cbk") == two_steps[0]
    trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk())
    assert contents(tmp_path / "work-cbk") == two_steps[0]
    assert [p.name for p in tmp_path.iterdir()] == ["work-cbk"]


def test_refusals_leave_nothing(model, tmp_path):
    (tmp_path / "work-cbk").mkdir()
    (tmp_path / "work-cbk/model.cbk").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk())
    assert [p.name for p in tmp_path.iterdir()] == ["work-cbk"]
    with pytest.raises(OutputError, match="no list of checksums"):
        trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk(overwrite=True))
    assert [p.name for p in tmp_path.iterdir()] == ["work-cbk"]
    (tmp_path / "work-cbk/manifest.json").write_text("of an export")
    trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk(overwrite=True))
    assert len(contents(tmp_path / "work-cbk")) > 3


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(model, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    os.link(model / "model.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_interleave": False}))
    with pytest.raises(UnsupportedModelError, match="neighbours"):
        trapetum.quantize_model(folder, tmp_path / "work", bits=4, route=DirectCbk())
    assert not (tmp_path / "work").exists()


def test_dry_run_says_the_exact_size(model, two_steps, tmp_path):
    report = trapetum.quantize_model(model, tmp_path / "work", bits=4, route=DirectCbk(), dry_run=True)
    assert report.nbytes == len(two_steps[0]["model.cbk"])
    assert report.out == tmp_path / "work-cbk"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_additive_experts_go_straight_too(model, tmp_path):
    rules = [{"glob": "*.mlp.experts.*", "scheme": "additive", "bits": 2, "effort": "fast"}]
    recipe = {"bits": 4, "rules": rules}
    trapetum.quantize_model(model, tmp_path / "a", recipe=recipe)
    export_artifact(tmp_path / "a", "cbk", tmp_path / "a-cbk")
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(
            model, tmp_path / "b/a", recipe=recipe, route=DirectCbk(), progress=Killer(30), threads=2
        )
    trapetum.quantize_model(model, tmp_path / "b/a", recipe=recipe, route=DirectCbk(), threads=3)
    assert contents(tmp_path / "b/a-cbk") == contents(tmp_path / "a-cbk")
    assert (tmp_path / "a-cbk/model.cbk").read_bytes()[:4] == b"CBKV"


R1 = {
    **CONFIG,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.slow
def test_a_config_alone_says_the_size_of_deepseek_r1(tmp_path):
    """The published file has 350,873,098,456 bytes."""
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1/config.json").write_text(json.dumps(R1))
    for options in (["--drop-artifact"], []):
        words = ["quantize", str(tmp_path / "r1"), "-o", str(tmp_path / "a"), "--dry-run", "--export", "cbk"]
        result = CliRunner().invoke(app, [*words, *options, "--json"])
        assert result.exit_code == 0, result.stderr
        said = json.loads(result.stdout)
        assert said["export"]["size"] == 350_873_098_456
        assert said["export"]["path"] == str(tmp_path / "a-cbk")
        assert (said["bytes"] == 350_873_098_456) == bool(options)
    report = trapetum.quantize_model(
        tmp_path / "r1", tmp_path / "a", recipe="cbk-deepseek-2bit", route=DirectCbk(), dry_run=True
    )
    assert report.nbytes == 177_392_511_196
    with pytest.raises(CheckpointError, match="no model"):
        trapetum.quantize_model(tmp_path / "r1", tmp_path / "a", bits=4)
    assert [p.name for p in tmp_path.iterdir()] == ["r1"]


def test_calibrated_codes_are_the_same(model, tmp_path):
    """Tensors with a second moment are cut by rule, not where the exporter cuts."""
    ids = np.random.default_rng(3).integers(0, 500, (30, 32)).astype(np.intp)
    with open_source(model) as source, MomentsWriter(tmp_path / "moments", distinct_inputs(source)) as writer:
        pool = Pool(2)
        for inputs in collect(source, ids, pool, moments=True):
            writer.write(inputs.weights, inputs.moment / inputs.tokens, inputs.tokens)
        pool.close()
    trapetum.quantize_model(model, tmp_path / "a", bits=4, imatrix=tmp_path / "moments")
    export_artifact(tmp_path / "a", "cbk", tmp_path / "a-cbk")
    two = contents(tmp_path / "a-cbk")
    trapetum.quantize_model(model, tmp_path / "b/a", bits=4, imatrix=tmp_path / "moments", route=DirectCbk())
    assert contents(tmp_path / "b/a-cbk")["model.cbk"] == two["model.cbk"]

    with (
        open_checkpoint(model) as source,
        open_statistics(tmp_path / "moments") as file,
        trapetum.open_artifact(tmp_path / "a") as artifact,
    ):
        plan = make_plan(source, resolve_recipe(None, bits=4))
        plan = replace(survey(plan, plan.budget(1)), statistics=Statistics(file))
        pressed = PressedSource(plan, tmp_path, [])
        for name in ("lm_head.weight", "model.layers.0.mlp.down_proj.weight"):
            rows = slice(101, 307) if "head" in name else slice(3, 250)
            found, expected = pressed.load(name, rows), artifact.load(name, rows)
            assert np.array_equal(found.codes, expected.codes)
            assert np.array_equal(found.codebook, expected.codebook)


def test_writer_misuse_is_an_error(tmp_path):
    names = ("n_layers", "hidden", "n_heads", "n_kv", "head_dim", "inter", "vocab")
    values = dict(zip(names, (1, 256, 4, 4, 64, 256, 256))) | {
        "eps": 1e-5,
        "rope_base": 1e4,
        "rope_scale": 1.0,
        "has_bias": 0,
    }
    header = CbkHeader(CBK_LAYOUTS["CBK3"], values, np.ones(32, np.float32))
    with ResumableCbkWriter(tmp_path / "x", header) as writer:
        with pytest.raises(ValueError, match="out of order"):
            writer.write("lm_head.weight", [])
        with pytest.raises(ValueError, match="131072 are due"):
            writer.write("model.embed_tokens.weight", [np.zeros(5, np.float16)])
    assert not writer.complete
