"""The job: exact where exactness is possible, the same bytes on any number of threads, nothing bad gets in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.errors import CheckpointError
from trapetum.formats.artifact import Artifact
from trapetum.formats.checkpoint import Checkpoint
from trapetum.quantize.card import read_front_matter
from trapetum.quantize.identity import changed_files, hash_files, tensor_seed
from trapetum.quantize.job import quantize_model

Make = Callable[..., Path]
ODD = {
    "hidden_size": 50, "intermediate_size": 51, "num_attention_heads": 5, "num_key_value_heads": 1,
    "head_dim": 26, "vocab_size": 97,
}  # fmt: skip


@pytest.mark.parametrize("config", [{}, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_palettes_are_reproduced_exactly(
    make_model: Make, palette_rows: Any, tmp_path: Path, config: dict[str, int], dtype: type
) -> None:
    folder = make_model(fill=palette_rows, dtype=dtype, **config)
    report = quantize_model(folder, tmp_path / "out", bits=4)
    assert report.max_relative_error == 0.0
    with Checkpoint.open(folder) as source, Artifact.open(tmp_path / "out") as artifact:
        assert sorted(artifact.names()) == sorted(source.names())
        for name in source.names():
            wanted = source.load(name).values
            assert artifact[name].shape == wanted.shape
            assert np.array_equal(artifact[name].dequantize(), wanted.astype(np.float32))


def test_bytes_do_not_depend_on_threads_or_memory(
    make_model: Make,
    tmp_path: Path,
    identity: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_model(shards=2)
    first = None
    for threads, block in ((1, 4 << 20), (2, 1000), (3, 64), (2, 333)):
        monkeypatch.setattr("trapetum.quantize.blocks.BLOCK_WEIGHTS", block)
        out = tmp_path / f"out{threads}-{block}"
        quantize_model(folder, out, bits=3, threads=threads)
        first = first or identity(out)
        assert identity(out) == first
    quantize_model(folder, tmp_path / "small", bits=3, max_memory=330 << 20)
    assert identity(tmp_path / "small") == first


def test_relative_error_is_that_of_the_stored_values(make_model: Make, tmp_path: Path) -> None:
    folder = make_model()
    report = quantize_model(folder, tmp_path / "out", bits=4)
    with Checkpoint.open(folder) as source, Artifact.open(tmp_path / "out") as artifact:
        for name, error in report.errors.items():
            wanted = source.load(name).values.astype(np.float64)
            lost = wanted - artifact[name].dequantize()
            assert error == pytest.approx((lost**2).sum() / (wanted**2).sum(), rel=1e-12)
    assert 0 < report.mean_relative_error <= report.max_relative_error < 0.05
    assert report.worst(1)[0][1] == report.max_relative_error


def test_kept_tensors_are_bit_exact(make_model: Make, tmp_path: Path) -> None:
    bits = np.array([1, 0x0040, 0x8000, 0x7F7F, 0x3F81], np.uint16)  # subnormals, -0.0, the largest
    norm = np.full(64, 1.0, ml_dtypes.bfloat16)
    norm[:5] = bits.view(ml_dtypes.bfloat16)
    extra = {
        "model.norm.weight": norm,
        "model.counter": np.array(5, np.int64),
        "model.mask": np.array([[0.0, -np.inf]], np.float32),
        "model.empty": np.zeros((0, 4), np.float32),
    }
    report = quantize_model(make_model(change=extra), tmp_path / "out", bits=4)
    with Artifact.open(tmp_path / "out") as artifact:
        for name, value in extra.items():
            stored = artifact[name].to_arrays()[""]
            assert (stored.dtype, stored.shape) == (value.dtype, value.shape)
            assert stored.tobytes() == value.tobytes()
    assert any("model.mask holds 0 NaN and 1 infinite values" in n for n in report.notes)


NOT_FINITE = [
    ("model.layers.1.mlp.gate_proj.weight", {(7, 9): np.nan}, "1 NaN and 0 infinite values of 6,144", [7, 9]),
    (
        "model.layers.0.self_attn.k_proj.weight",
        {(3, 0): np.inf, (31, 63): -np.inf, (9, 9): np.nan},
        "1 NaN and 2 infinite values of 2,048",
        [3, 0],
    ),
    ("model.norm.weight", {(5,): np.nan}, "1 NaN and 0 infinite values of 64", [5]),
    ("model.embed_tokens.weight", {(79, 63): np.inf}, "0 NaN and 1 infinite values of 5,120", [79, 63]),
]


@pytest.mark.parametrize(("name", "values", "counts", "first"), NOT_FINITE)
@pytest.mark.parametrize("dry_run", [False, True])
def test_values_that_are_not_finite_are_refused(
    make_model: Make, tmp_path: Path, name: str, values: dict[Any, float], counts: str, first: list[int],
    dry_run: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("trapetum.quantize.blocks.BLOCK_WEIGHTS", 512)  # several blocks a tensor
    good = make_model(name="good")
    with Checkpoint.open(good) as source:
        tensor = source.load(name).values.copy()
    for index, value in values.items():
        tensor[index] = value
    folder = make_model(change={name: tensor})
    with pytest.raises(CheckpointError) as caught:
        quantize_model(folder, tmp_path / "out", bits=4, dry_run=dry_run)
    assert (
        f"model.safetensors: tensor {name} holds {counts}; the first is at {first};" in caught.value.message
    )
    assert not (tmp_path / "out").exists()


def test_float64_beyond_float32_is_refused(make_model: Make, tmp_path: Path) -> None:
    weight = np.zeros((64, 64))
    weight[1, 2] = 1e300
    folder = make_model(change={"model.layers.0.self_attn.q_proj.weight": weight})
    with pytest.raises(CheckpointError, match=r"1 infinite values beyond float32 .* at \[1, 2\]"):
        quantize_model(folder, tmp_path / "out")


def test_the_artifact_says_where_it_came_from(make_model: Make, tmp_path: Path) -> None:
    folder = make_model(eos_token_id=[2, 5])
    (folder / "README.md").write_text(
        "---\nlicense:\n- apache-2.0\n- mit\nlicense_link: 'https://example.invalid/L'\nlanguage: [en, no]\n"
        "tags: []\nbase_model: acme/big\nmodel_name: 'Tiny: model'\n---\n# Tiny\n",
        encoding="utf-8",
    )
    (folder / "LICENSE").write_text("terms\n")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    out = tmp_path / "out"
    report = quantize_model(folder, out, bits=4)
    manifest = json.loads((out / "trapetum.json").read_text())
    sources = manifest["source"]["files"]
    assert set(sources) == {"model.safetensors", "config.json", "generation_config.json", "LICENSE"}
    for name, digest in sources.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert manifest["recipe"] == report.plan.recipe.resolved()
    assert str(tmp_path) not in (out / "trapetum.json").read_text() + (out / "README.md").read_text()
    for name in ("LICENSE", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == [2, 5]
    assert config["quantization_config"]["quant_method"] == "trapetum"
    card = (out / "README.md").read_text(encoding="utf-8")
    for line in (
        'license: ["apache-2.0", "mit"]', 'license_link: "https://example.invalid/L"', 'language: ["en", "no"]',
        'base_model: "acme/big"',
    ):  # fmt: skip
        assert line in card.splitlines()
    start = json.loads((out / "run.jsonl").read_text().splitlines()[0])
    assert start["event"] == "start"
    assert start["cpu_features"]


def test_front_matter_never_stops_a_job(tmp_path: Path) -> None:
    assert read_front_matter(tmp_path) == {}
    for text in (
        b"",
        b"---",
        b"\xff---\n",
        b"# no front matter\n---\nlicense: mit\n---\n",
        b"---\nlicense:\n---\n",
    ):
        (tmp_path / "README.md").write_bytes(text)
        assert read_front_matter(tmp_path) == {}
    (tmp_path / "README.md").write_bytes(b"\xef\xbb\xbf---\r\nlicense: 'mit'\r\nextra: {a: 1}\r\n---\r\n")
    assert read_front_matter(tmp_path) == {"license": "mit"}


def test_hub_snapshots_are_named_by_repository_and_commit(make_model: Make, tmp_path: Path) -> None:
    snapshots = tmp_path / "models--acme--big" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = make_model().rename(snapshots / "0123abcd")
    out = tmp_path / "out"
    quantize_model(folder, out)
    source = json.loads((out / "trapetum.json").read_text())["source"]
    assert (source["name"], source["repo"], source["commit"]) == ("big", "acme/big", "0123abcd")
    assert 'base_model: "acme/big"' in (out / "README.md").read_text()


def test_hashes_are_remembered_by_stamp(tmp_path: Path) -> None:
    a, b, cache = tmp_path / "a", tmp_path / "b", tmp_path / "cache.json"
    a.write_bytes(b"1" * 3_000_000)
    b.write_bytes(b"2")
    first = hash_files([b, a], cache, 2)
    assert first == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (a, b)}
    record = json.loads(cache.read_bytes())
    record["a"]["sha256"] = "0" * 64
    cache.write_text(json.dumps(record))
    assert hash_files([a, b], cache, 1)["a"] == "0" * 64  # taken from the cache
    a.write_bytes(b"1" * 3_000_000)  # a new time stamp
    assert hash_files([a, b], cache, 1) == first
    for garbage in (b"", b"[]", b'{"a": 3}', b"lfs65d0{"):
        cache.write_bytes(garbage)
        assert hash_files([a, b], cache, 1) == first
    assert changed_files(first, {**first, "b": "x", "c": "y"}) == ["b", "c"]
    with pytest.raises(CheckpointError, match="cannot be read"):
        hash_files([tmp_path / "absent"], None, 1)


def test_seeds_depend_on_seed_and_name_only() -> None:
    seeds = {tensor_seed(s, n) for s in (0, 1) for n in ("a", "b", "1:a")}
    assert len(seeds) == 6
    assert all(0 <= s < 1 << 64 for s in seeds)


def test_the_demo_model(demo_model: Path, tmp_path: Path) -> None:
    report = quantize_model(demo_model, tmp_path / "out", bits=4)
    assert report.max_relative_error < 0.01
    assert 4.5 <= report.quantized_bpw <= 5.0
    assert sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")) == report.nbytes
