"""The outside catalogue asks for more than verdicts: what a refusal names, what a note says, what an export holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import trapetum
from trapetum.cli.app import app
from trapetum.formats.gguf import GgufFile
from trapetum.formats.safetensors import SafetensorsFile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UNUSED = 5  # llama.cpp's type of a token that stands for nothing
MOST_NOTES = 4  # one for each kind of thing, never one for each row or tensor

# Case -> words of stderr; {names} are those of its expected.json, {value!r} as Python writes it.
SAID = {
    "open_01_lfs_pointer": ("the file itself has 288528 bytes", "git lfs pull"),
    "open_02_header_length__huge": ("declares a header of 4611686018427387904 bytes", "bytes in all"),
    "open_02_header_length__past": ("declares a header of", "bytes in all"),
    "open_03_truncated_shard": (
        "{expected_size} bytes expected, {actual_size} found",
        "the first tensor hit is 'lm_head.weight'",
    ),
    "open_03_truncated_shard__cut-header": ("the file has {actual_size} bytes in all",),
    "open_04_trailing_or_gap": ("4096 bytes at the end belong to no tensor",),
    "open_04_trailing_or_gap__gap": ("64 bytes after 'model.layers.0.self_attn.k_proj.weight'",),
    "open_05_overlapping_offsets": (
        "'model.layers.0.self_attn.k_proj.weight' and 'model.layers.0.self_attn.v_proj.weight' overlap",
    ),
    "open_06_shape_bytes_mismatch": ("[192, 128] of BF16 needs 49152 bytes", "hold 24576"),
    "open_06_shape_bytes_mismatch__overflow": ("needs 36893488147419103232 bytes",),
    "open_08_nul_padded_header": ("padded with 2 NUL bytes",),
    "open_09_missing_shard": ("1 of 3 files that are missing", "({tensors_in_it} tensors)"),
    "open_10_index_disagrees__absent": (
        "'model.layers.1.mlp.extra_proj.weight' is in model-00002-of-00002.safetensors, but no file has it",
    ),
    "open_10_index_disagrees__wrongshard": (
        "is in model-00001-of-00002.safetensors, but it is in model-00002-of-00002.safetensors",
    ),
    "open_10_index_disagrees__unlisted": ("forgot it: lm_head.weight",),
    "open_11_two_sets_of_weights": ("not used", "consolidated.safetensors, model-00001-of-00001.safetensors"),
    "open_12_path_traversal__absolute": ("'lm_head.weight' to {value!r}, an absolute path",),
    "open_12_path_traversal__backslash": ("'lm_head.weight' to {value!r}, which leaves the folder",),
    "open_12_path_traversal__dotdot": ("'lm_head.weight' to {value!r}, which leaves the folder",),
    "open_12_path_traversal__nul": ("'lm_head.weight' to {value!r}",),
    "open_13_nan_inf__nan": ("{count} NaN and 0 infinite", "the first is at [7, 9]"),
    "open_13_nan_inf__inf": ("0 NaN and {count} infinite", "the first is at [7, 9]"),
    "open_13_nan_inf__rows": ("{count} NaN and 0 infinite", "the first is at [3, 0]"),
    "open_19_already_quantized__gptq": ("already quantized (gptq)", "original bfloat16"),
    "open_19_already_quantized__bnb": ("already quantized (bitsandbytes)", "original bfloat16"),
    "open_19_already_quantized__mlx": ("4 bits in groups of 64", "the checkpoint that it was made from"),
    "open_19_already_quantized__aqlm": ("nbits_per_codebook 16", "the one it was made from"),
    "open_20_tied_no_head__noflag": ("the embedding is the head",),
    "open_20_tied_no_head__untied": ("lm_head.weight is missing", '"tie_word_embeddings": true'),
    "open_22_config_variants__nested": ("kept as they are", "vision_tower.patch_embedding.weight"),
    "open_22_config_variants__noarch": ("'architectures' and 'model_type' are both missing",),
    "open_22_config_variants__noconfig": ("config.json: there is no such file",),
    "open_23_extra_tensors__buffers": ("6 buffers that code recomputes", "rotary_emb.inv_freq"),
    "open_23_extra_tensors__mtp": ("10 tensors that the architecture does not know", "model.layers.2."),
    "open_24_tokenizer_faults__long": ("token ids up to 99", "the embedding has 96 rows"),
    "open_26_names": ("3 tensors that the architecture does not know", "wght_one", "wght_two", "你 好"),
    "open_28_high_rank": ("patch_embed.proj.weight", "model.visual.pos_embed", "model.visual.conv.weight"),
}


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def pressed(make_case: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """The artifact of a case."""

    def press(name: str, **options: Any) -> Path:
        out = tmp_path / "pressed"
        trapetum.quantize_model(make_case(name) / "model", out, overwrite=True, **options)
        return out

    return press


@pytest.mark.parametrize("name", SAID)
def test_words(name: str, make_case: Callable[[str], Path], tmp_path: Path) -> None:
    case = make_case(name)
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
    said = _run("quantize", case / "model", "-o", tmp_path / "out").stderr
    assert [word for word in SAID[name] if word.format(**expected) not in said] == [], said
    assert max(map(len, said.splitlines())) < 1200
    assert said.count("note: ") <= MOST_NOTES


@pytest.mark.parametrize("name", ["open_14_zero_rows", "open_15_few_distinct_values"])
def test_degenerate_rows_are_no_flood(name: str, make_case: Callable[[str], Path], tmp_path: Path) -> None:
    result = _run("quantize", make_case(name) / "model", "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stderr.count("note: ") <= MOST_NOTES
    assert "arning" not in result.stderr


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 2, "effort": "fast"}], ids=str)
def test_more_entries_than_values(
    options: dict[str, Any], make_case: Callable[[str], Path], pressed: Callable[..., Path]
) -> None:
    """256 entries for rows of 128, and more additive entries than groups: exact, or finite and near."""
    case = "open_15_few_distinct_values"
    with (
        trapetum.open_artifact(pressed(case, **options)) as art,
        np.load(make_case(case) / "oracle.npz") as exact,
    ):
        for key in exact.files:
            got, want = art[key.replace("|", "/")].dequantize(), exact[key]
            assert np.isfinite(got).all()
            if options["bits"] == 8:
                assert np.array_equal(got, want), key
            else:
                assert np.square(got - want).sum() <= 0.05 * np.square(want).sum(), key


def test_ternary_weights_of_a_plain_model_are_warned_of(
    make_case: Callable[[str], Path], tmp_path: Path
) -> None:
    model = make_case("open_16_sign_symmetry") / "model"
    said = _run("quantize", model, "-o", tmp_path / "out", "--scheme", "ternary").stderr
    assert "a model that was not trained for ternary weights gets much worse" in said


def test_all_that_does_not_fit_is_named_at_once(make_case: Callable[[str], Path], tmp_path: Path) -> None:
    model = make_case("open_17_odd_sizes_vocab") / "model"
    strict = _run("quantize", model, "-o", tmp_path / "out", "--scheme", "gguf:Q4_K", "--no-fallback")
    assert strict.exit_code == 1
    assert "15 tensors do not fit their scheme" in strict.stderr
    assert "rows of 130 are not whole blocks of 256" in strict.stderr
    assert "rows of 251" in strict.stderr
    assert not (tmp_path / "out").exists()
    report = trapetum.quantize_model(model, tmp_path / "out", scheme="gguf:Q4_K", dry_run=True)
    said = "\n".join(report.notes)
    assert "12 tensors take kmeans K=16 instead of gguf:Q4_K" in said
    assert "2 tensors take kmeans K=16 instead of gguf:Q4_K" in said
    assert "lm_head.weight" in said
    kinds = {(r.role.layer, r.role.kind): r.scheme.label for r in report.rows}
    for layer in (0, 1):  # an engine that fuses them wants one type
        assert len({kinds[layer, part] for part in "qkv"}) == 1
        assert kinds[layer, "gate"] == kinds[layer, "up"]


def test_a_tied_model_stays_tied(pressed: Callable[..., Path]) -> None:
    out = pressed("open_20_tied_no_head")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    with trapetum.open_artifact(out) as art:
        assert "lm_head.weight" not in art
        assert art["model.embed_tokens.weight"].layout == "dense"


def test_the_card_and_the_licence_travel(pressed: Callable[..., Path], tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    out = pressed("open_25_model_card")
    head = yaml.safe_load((out / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert head["license"] == ["apache-2.0", "mit"]
    assert head["base_model"] == "acme/big"
    assert head["language"] == ["en", "no", "1"]  # texts: YAML would make a bare no false
    assert head["license_link"].startswith("https://")
    assert (out / "LICENSE").is_file()
    file = trapetum.export_artifact(out, "gguf", tmp_path / "m.gguf")
    with GgufFile.open(file) as made:
        assert made.metadata["tokenizer.ggml.eos_token_id"] == 2  # the first of a list
        assert [k for k, v in made.metadata.items() if isinstance(v, list | tuple) and not len(v)] == []


def test_norms_keep_their_bits(make_case: Callable[[str], Path], tmp_path: Path) -> None:
    """Subnormals, a negative zero and the largest bfloat16: exact in F32 and BF16, refused in float16."""
    case = make_case("open_29_bf16_subnormals")
    model = case / "model"
    bits = json.loads((case / "expected.json").read_text())["bits"]
    for options in ({}, {"gguf_type": "F16"}):
        file = trapetum.export_artifact(model, "gguf", tmp_path / "m.gguf", overwrite=True, **options)
        with GgufFile.open(file) as made:
            got = made.load("output_norm.weight").dequantize().view(np.uint32) >> 16
            assert got[: len(bits)].tolist() == [b & 0xFFFF for b in bits]
    trapetum.export_artifact(model, "hf", tmp_path / "hf", dtype="bf16")
    with (
        SafetensorsFile.open(tmp_path / "hf" / "model.safetensors") as made,
        SafetensorsFile.open(model / "model.safetensors") as stored,
    ):
        for name in stored.tensors:
            assert made.read(name).tobytes() == stored.read(name).tobytes(), name
    refused = _run("export", model, "--format", "hf", "--dtype", "f16", "-o", tmp_path / "half")
    assert refused.exit_code == 1
    assert "beyond the range of float16" in refused.stderr
    assert not (tmp_path / "half").exists()


def test_no_name_is_cut_and_no_dimension_lost(pressed: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("open_26_names", "open_28_high_rank", "open_23_extra_tensors__buffers"):
        out = pressed(name)
        result = _run("export", out, "--format", "gguf", "-o", tmp_path / f"{name}.gguf")
        assert result.exit_code == 0
        assert "tensors are not part of the GGUF, the first is model." in result.stderr
        with GgufFile.open(tmp_path / f"{name}.gguf") as made, trapetum.open_artifact(out) as art:
            assert max(len(n.encode()) for n in made.tensors) <= 63
            assert not [n for n in made.tensors if "inv_freq" in n or "wght" in n or "visual" in n]
            trapetum.export_artifact(out, "hf", tmp_path / f"{name}-hf")
            with SafetensorsFile.open(tmp_path / f"{name}-hf" / "model.safetensors") as dense:
                assert {n: dense.tensors[n].shape for n in dense.tensors} == {n: art.shape(n) for n in art}


def test_a_vocabulary_arrives_whole(make_case: Callable[[str], Path], tmp_path: Path) -> None:
    """In every locale; ids without a token are padding; without a vocabulary there is no GGUF."""
    model = make_case("open_24_tokenizer_faults__pairs") / "model"
    stored = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    files = []
    for number, locale in enumerate(({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"})):
        file = tmp_path / f"{number}.gguf"
        command = [sys.executable, "-m", "trapetum", "export", model, "--format", "gguf", "-o", file]
        environment = {**os.environ, "PYTHONCOERCECLOCALE": "0", **locale}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
        files.append(file.read_bytes())
    assert files[0] == files[1]
    with GgufFile.open(tmp_path / "0.gguf") as made:
        tokens = list(made.metadata["tokenizer.ggml.tokens"])
        assert {t: tokens.index(t) for t in stored["vocab"]} == stored["vocab"]
        assert list(made.metadata["tokenizer.ggml.merges"]) == [" ".join(pair) for pair in stored["merges"]]

    for kind, unused in (("short", range(90, 96)), ("hole", (97, 98))):
        model = make_case(f"open_24_tokenizer_faults__{kind}") / "model"
        with GgufFile.open(trapetum.export_artifact(model, "gguf", tmp_path / f"{kind}.gguf")) as made:
            types = list(made.metadata["tokenizer.ggml.token_type"])
            assert [i for i, t in enumerate(types) if t == UNUSED] == list(unused)

    model = make_case("open_24_tokenizer_faults__none") / "model"
    refused = _run("quantize", model, "-o", tmp_path / "none", "--export", "gguf")
    assert refused.exit_code == 1
    assert "no tokenizer.json" in refused.stderr
    assert "quantize:" not in refused.stderr
    assert not (tmp_path / "none").exists()


def test_a_ternary_layout_under_another_name_is_told(make_case: Callable[[str], Path]) -> None:
    files = make_case("open_31_bad_gguf") / "gguf"
    assert "fits the legacy group 128 (34 bytes" in _run("verify", files / "q2_as_128.gguf").stdout
    for name in ("good", "align64"):
        with GgufFile.open(files / f"{name}.gguf") as made:
            values = [made.load(n).dequantize().reshape(-1).tolist() for n in made.tensors]
            assert values == [list(range(256)), list(range(1000, 1256))]
