"""The artifact: golden bytes, reading, checks of a reader, hostile bytes, the examples of the specification."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

import trapetum
from trapetum.errors import FormatError, TrapetumError
from trapetum.formats.artifact import Artifact
from trapetum.formats.assemble import assemble
from trapetum.formats.checksums import log_seal
from trapetum.formats.manifest import artifact_config, build_manifest, manifest_bytes
from trapetum.formats.parts import write_part
from trapetum.packing import pack_bits
from trapetum.tensors import BlockTensor, CodebookTensor, DenseTensor, QuantizedTensor, TernaryTensor

CODES = np.array([[0, 1, 2, 3, 3], [3, 2, 1, 0, 0]], np.uint8)
CODEBOOK = np.array([[-1, -0.5, 0.5, 1], [-2, 0, 1, 2]], np.float16)

SHARD = (
    bytes.fromhex("e000000000000000")
    + b'{"__metadata__":{"format":"pt"},'
    + b'"w.codebook":{"dtype":"F16","shape":[2,4],"data_offsets":[0,16]},'
    + b'"norm":{"dtype":"BF16","shape":[2],"data_offsets":[16,20]},'
    + b'"w.codes":{"dtype":"U8","shape":[2,2],"data_offsets":[20,24]}}      '
    + bytes.fromhex("00bc00b80038003c 00c00000003c0040")  # codebook
    + bytes.fromhex("803f00c0")  # norm
    + bytes.fromhex("e403 1b00")  # codes: 0b11_10_01_00 0b11, 0b00_01_10_11 0b00
)

MANIFEST = """\
{
  "format_version": 1,
  "tool_version": "0.1.0",
  "source": {
    "name": "tiny"
  },
  "architecture": "llama",
  "recipe": {
    "bits": 2
  },
  "totals": {
    "tensors": 2,
    "parameters": 12,
    "bytes": 24,
    "bpw": 16.0,
    "quantized": {
      "tensors": 1,
      "parameters": 10,
      "bytes": 20,
      "bpw": 16.0
    }
  },
  "tensors": {
    "w": {"layout": "codebook", "shape": [2, 5], "params": {"codebook_size": 4}, \
"scheme": {"name": "kmeans", "codebook_size": 4}, "bytes": 20, "bpw": 16.0, "relative_error": 0.25, \
"arrays": {"codebook": {"dtype": "F16", "shape": [2, 4]}, "codes": {"dtype": "U8", "shape": [2, 2]}}, \
"sha256": "%s"},
    "norm": {"layout": "dense", "shape": [2], "params": {}, "scheme": {"name": "keep"}, "bytes": 4, \
"bpw": 16.0, "relative_error": null, "arrays": {"": {"dtype": "BF16", "shape": [2]}}, "sha256": "%s"}
  }
}
"""


def make(folder: Path, tensors: dict[str, QuantizedTensor], max_shard_bytes: int = 1 << 30) -> Path:
    entries = {}
    for index, (name, t) in enumerate(tensors.items()):
        dense = t.layout == "dense"
        draft = {
            "layout": t.layout,
            "shape": t.shape,
            "params": t.params(),
            "scheme": {"name": "keep"} if dense else {"name": "kmeans", "codebook_size": 4},
            "relative_error": None if dense else np.float32(0.25),
        }
        entries[name] = write_part(folder / ".trapetum" / "parts", index, name, t.to_arrays(), draft)
    header = {
        "tool_version": "0.1.0",
        "source": {"name": "tiny"},
        "architecture": "llama",
        "recipe": {"bits": 2},
    }
    manifest = build_manifest(header, entries)
    config = artifact_config({"model_type": "llama", "quantization_config": {"old": 1}}, manifest)
    assemble(folder, manifest, {"config.json": config}, max_shard_bytes=max_shard_bytes)
    shutil.rmtree(folder / ".trapetum")
    return folder


def tiny() -> dict[str, QuantizedTensor]:
    norm = DenseTensor(np.array([1, -2], ml_dtypes.bfloat16))
    return {"w": CodebookTensor(CODES, CODEBOOK), "norm": norm}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny artifact; tests copy it before they break it."""
    return make(tmp_path_factory.mktemp("artifact") / "out", tiny())


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    shutil.copytree(small, tmp_path / "out")
    return tmp_path / "out"


def test_golden_bytes(small: Path) -> None:
    assert (small / "model-00001-of-00001.safetensors").read_bytes() == SHARD
    digests = [hashlib.sha256(part).hexdigest() for part in (SHARD[-24:-8] + SHARD[-4:], SHARD[-8:-4])]
    assert (small / "trapetum.json").read_text() == MANIFEST % tuple(digests)
    ours = {"quant_method": "trapetum", "version": 1, "bits": 16.0}
    config = {"model_type": "llama", "quantization_config": ours}
    assert (small / "config.json").read_text() == json.dumps(config, indent=2) + "\n"
    assert json.loads((small / "model.safetensors.index.json").read_bytes()) == {
        "metadata": {"total_size": 24},
        "weight_map": dict.fromkeys(["norm", "w.codebook", "w.codes"], "model-00001-of-00001.safetensors"),
    }
    names = [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "trapetum.json",
    ]
    sums = [f"{hashlib.sha256((small / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    assert (small / "SHA256SUMS").read_text() == "".join(sums)
    assert sorted(p.name for p in small.iterdir()) == ["SHA256SUMS", *names]


def test_outside_programs_read_it(small: Path) -> None:
    check = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=small, capture_output=True)
    assert check.returncode == 0, check.stderr
    found = dict(safetensors.deserialize((small / "model-00001-of-00001.safetensors").read_bytes()))
    packed = np.frombuffer(found["w.codes"]["data"], np.uint8).reshape(2, 2)
    book = np.frombuffer(found["w.codebook"]["data"], "<f2").reshape(2, 4)
    for row in range(2):
        stream = int.from_bytes(packed[row].tobytes(), "little")
        codes = [stream >> 2 * i & 3 for i in range(5)]
        assert codes == CODES[row].tolist()
        assert [book[row, c] for c in codes] == [CODEBOOK[row, c] for c in CODES[row]]


def test_pytorch_reads_arrays_that_follow_odd_ones(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    tensors: dict[str, QuantizedTensor] = {
        f"t{i}": CodebookTensor(
            rng.integers(0, 4, (3, 2 + i)).astype(np.uint8), rng.normal(size=(3, 4)).astype(np.float16)
        )
        for i in range(4)
    }
    folder = make(tmp_path / "out", tensors)
    with safetensors.safe_open(folder / "model-00001-of-00001.safetensors", framework="pt") as file:
        for name, t in tensors.items():
            assert torch.equal(
                file.get_tensor(f"{name}.codebook"), torch.from_numpy(t.to_arrays()["codebook"])
            )


def all_layouts() -> dict[str, QuantizedTensor]:
    rng = np.random.default_rng(1)
    return {
        "books.3": CodebookTensor(
            rng.integers(0, 6, (6, 7)).astype(np.uint8), rng.normal(size=(6, 6)).astype(np.float32), (2, 3, 7)
        ),
        "books.8": CodebookTensor(
            rng.integers(0, 256, (5, 9)).astype(np.uint8), rng.normal(size=(5, 256)).astype(np.float16)
        ),
        "ternary": TernaryTensor(
            rng.integers(0, 3, (4, 8)).astype(np.uint8), rng.normal(size=(4, 2)).astype(np.float16)
        ),
        "blocks": BlockTensor("Q8_0", rng.integers(0, 60, (3, 68), np.uint8)),
        "bf16": DenseTensor(rng.normal(size=(1, 4, 3)).astype(ml_dtypes.bfloat16)),
        "fp8": DenseTensor(rng.normal(size=(4, 3)).astype(ml_dtypes.float8_e4m3fn)),
        "vector": DenseTensor(np.arange(3, dtype=np.int64)),
        "scalar": DenseTensor(np.array(1.5, np.float32)),
        "empty": DenseTensor(np.zeros((0, 3), np.float16)),
    }


@pytest.mark.parametrize("mmap", [True, False])
def test_every_layout_comes_back_whole_and_by_rows(tmp_path: Path, mmap: bool) -> None:
    tensors = all_layouts()
    folder = make(tmp_path / "out", tensors, max_shard_bytes=200)
    with Artifact.open(folder, mmap=mmap) as art:
        assert art.names() == list(tensors) == list(art)
        assert art.kind == "artifact"
        assert len({art.file(n) for n in tensors}) > 2
        for name, t in tensors.items():
            assert art.shape(name) == t.shape
            assert art.layout(name) == t.layout
            back = art[name]
            assert type(back) is type(t)
            assert art.dtype(name) == (t.values.dtype if isinstance(t, DenseTensor) else np.float32)
            for suffix, array in t.to_arrays().items():
                assert back.to_arrays()[suffix].tobytes() == array.tobytes()
            assert back.dequantize().tobytes() == t.dequantize().tobytes()
            assert back.dequantize().shape == t.shape
            part = art.load(name, slice(1, 3))
            assert part.dequantize().tobytes() == t.dequantize(slice(1, 3)).tobytes()
            assert part.shape == (max(0, min(3, t.rows) - min(1, t.rows)), t.in_features)
            art.release(name)
        assert art.check_sums() == []
        assert "books.3" in art
        with pytest.raises(FormatError, match="no tensor named 'absent'"):
            art.load("absent")


def test_the_public_name_opens_it(small: Path) -> None:
    with trapetum.open_artifact(small) as art:
        assert art["w"].dequantize()[0].tolist() == [-1, -0.5, 0.5, 1, 1]
        assert art.manifest["recipe"] == {"bits": 2}
        assert art.config["model_type"] == "llama"
        assert art.tokenizer_file() is None
        assert [p.name for p in art.side_files()] == ["config.json"]


def edit(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    data = json.loads((folder / name).read_bytes())
    change(data)
    (folder / name).write_text(json.dumps(data))


def set_at(*path: Any) -> Callable[[Any], None]:
    """Set data[path[0]]...[path[-2]] = path[-1]."""

    def change(data: Any) -> None:
        for key in path[:-2]:
            data = data[key]
        data[path[-2]] = path[-1]

    return change


W = ("tensors", "w")
FAULTS = [
    (("format_version", 2), "format_version is 2.*up to 1"),
    (("format_version", True), "format_version is True"),
    (("format_version", "1"), "format_version is '1'"),
    (("tensors", []), "tensors is"),
    (("recipe", None), "recipe is None"),
    (("totals", "bytes", 25), "totals.bytes is 25; its tensors make 24"),
    (("totals", "tensors", 3), "totals.tensors is 3"),
    ((*W, "layout", "vq"), "tensor 'w': layout 'vq'"),
    ((*W, "layout", ["dense"]), "tensor 'w': layout"),
    ((*W, "shape", [2, -5]), "shape"),
    ((*W, "shape", [2, True]), "shape"),
    ((*W, "shape", [2, 6.0]), "shape"),
    ((*W, "shape", [2, 9]), r"array 'codes' has shape \[2, 2\]; \[2, 3\] is needed"),
    ((*W, "shape", [1 << 62, 1 << 62]), "has shape"),
    ((*W, "params", {"codebook_size": 257}), "codebook_size is 257"),
    ((*W, "params", {}), "codebook_size is None"),
    ((*W, "params", {"codebook_size": 8}), "has shape"),
    ((*W, "arrays", "codes", "dtype", "I8"), "dtype 'I8'; allowed: U8"),
    ((*W, "arrays", "codebook", "dtype", "F32"), "bytes is 20; its arrays hold 36"),
    ((*W, "arrays", "scales", {}), "arrays are"),
    ((*W, "sha256", "0" * 63), "sha256"),
    ((*W, "relative_error", -1), "relative_error is -1"),
    ((*W, "relative_error", "0"), "relative_error is '0'"),
    (("tensors", "w.codes", {"layout": "dense"}), "lacks shape"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_a_manifest_that_breaks_a_rule(copy: Path, change: tuple[Any, ...], message: str) -> None:
    edit(copy, "trapetum.json", set_at(*change))
    with pytest.raises(FormatError, match=message) as caught:
        Artifact.open(copy)
    assert str(copy / "trapetum.json") in caught.value.message


def test_two_tensors_under_one_stored_name(copy: Path) -> None:
    def change(manifest: Any) -> None:
        codes = dict(manifest["tensors"]["norm"], shape=[2, 2], arrays={"": {"dtype": "U8", "shape": [2, 2]}})
        manifest["tensors"]["w.codes"] = codes
        manifest["totals"] |= {"tensors": 3, "bytes": 28}

    edit(copy, "trapetum.json", change)
    with pytest.raises(FormatError, match=r"tensors 'w' and 'w.codes' both store 'w.codes'"):
        Artifact.open(copy)


INDEX = "model.safetensors.index.json"
SHARD_NAME = "model-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("weight_map", None), "weight_map is None"),
        (("weight_map", "norm", "../x.safetensors"), "'../x.safetensors', not a file of this folder"),
        (("weight_map", "norm", ["x"]), "not a file of this folder"),
        (("weight_map", "norm", "other.safetensors"), "other.safetensors.*no such file"),
        (("weight_map", "more", SHARD_NAME), "lists 'more'"),
        (("weight_map", {}), "lacks 'norm'"),
    ],
)
def test_an_index_that_disagrees(copy: Path, change: tuple[Any, ...], message: str) -> None:
    edit(copy, INDEX, set_at(*change))
    with pytest.raises(FormatError, match=message):
        Artifact.open(copy)


def test_weight_files_that_disagree(copy: Path, tmp_path: Path) -> None:
    shard = copy / SHARD_NAME
    shard.write_bytes(SHARD.replace(b'"norm"', b'"more"'))
    with pytest.raises(FormatError, match="'norm' is missing"):
        Artifact.open(copy)
    shard.write_bytes(SHARD.replace(b"BF16", b"F16 ").replace(b'"F16 "', b'"F16" '))
    with pytest.raises(FormatError, match=r"'norm' is float16 \[2\].*bfloat16"):
        Artifact.open(copy)
    other = make(tmp_path / "other", {**tiny(), "x": DenseTensor(np.zeros(1, np.uint8))})
    shutil.copy(other / SHARD_NAME, shard)
    with pytest.raises(FormatError, match="holds 'x', which"):
        Artifact.open(copy)
    shard.unlink()
    with pytest.raises(FormatError, match="there is no such file"):
        Artifact.open(copy)


def test_a_code_without_an_entry_is_refused(tmp_path: Path) -> None:
    book = np.zeros((2, 3), np.float16)
    folder = make(tmp_path / "out", {"w": CodebookTensor(CODES % 3, book)})
    shard = folder / SHARD_NAME
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x03")
    with Artifact.open(folder) as art, pytest.raises(FormatError, match=r"'w': code 3 has no entry"):
        art.load("w")


def test_folders_that_are_no_artifact(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(FormatError, match=r"no trapetum.json"):
        Artifact.open(tmp_path)
    with pytest.raises(FormatError, match=r"no trapetum.json"):
        Artifact.open(tmp_path / "absent")
    with pytest.raises(FormatError, match=r"no trapetum.json"):
        Artifact.open(copy / "config.json")
    (tmp_path / "job" / ".trapetum").mkdir(parents=True)
    with pytest.raises(FormatError, match="not finished") as caught:
        Artifact.open(tmp_path / "job")
    assert "again" in (caught.value.hint or "")
    (copy / "config.json").unlink()
    with pytest.raises(FormatError, match=r"config.json: cannot be read"):
        Artifact.open(copy)


def test_sums_find_every_change(copy: Path) -> None:
    with Artifact.open(copy) as art:
        assert art.check_sums() == []
        log = copy / "run.jsonl"
        log.write_text("{}\n")
        assert art.check_sums() == [f"{log}: does not end with the checksum of its lines"]
        log.write_bytes(log.read_bytes() + log_seal(log))
        (copy / ".gitattributes").write_text("")
        assert art.check_sums() == []
        (copy / "note.txt").write_text("")
        assert art.check_sums() == [f"{copy / 'note.txt'}: is not listed in SHA256SUMS"]
        (copy / "note.txt").unlink()
    shard = copy / SHARD_NAME
    for position in range(len(SHARD) - 24, len(SHARD)):
        broken = bytearray(SHARD)
        broken[position] ^= 1
        shard.write_bytes(broken)
        with Artifact.open(copy) as art:
            problems = art.check_sums()
        assert len(problems) == 2
        assert problems[0].startswith(f"{shard}: SHA-256 is")
        tensor = "norm" if position in range(len(SHARD) - 8, len(SHARD) - 4) else "w"
        assert problems[1].startswith(f"{shard}: tensor '{tensor}': SHA-256 is")
    shard.write_bytes(SHARD)
    sums = copy / "SHA256SUMS"
    text = sums.read_text()
    for bad, message in (
        ("no sums\n", "line 1 is 'no sums'"),
        (text + text.splitlines()[0] + "\n", "line 5"),
        (text + "0" * 64 + "  absent\n", "absent: is listed"),
        (text + "0" * 64 + "  ../secret\n", "'../secret' is not the name of a file"),
        ("\udcff", "not UTF-8"),
    ):
        sums.write_text(bad, errors="surrogateescape")
        with Artifact.open(copy) as art:
            assert any(message in p for p in art.check_sums())
    sums.unlink()
    with Artifact.open(copy) as art:
        assert "cannot be read" in art.check_sums()[0]


def use(folder: Path) -> None:
    """Whatever a reader does; only errors of this package may come out."""
    try:
        with Artifact.open(folder) as art:
            for name in art:
                art[name].dequantize()
            art.check_sums()
    except TrapetumError as error:
        if "\n" in error.message:
            raise AssertionError(f"not one line: {error.message!r}") from error


@given(st.sampled_from(["trapetum.json", INDEX, SHARD_NAME, "config.json", "SHA256SUMS"]), st.data())
@settings(max_examples=300, deadline=None)
def test_altered_bytes_give_our_errors_only(small: Path, name: str, data: st.DataObject) -> None:
    """Sets one byte, or cuts the file, and puts it back."""
    path = small / name
    before = path.read_bytes()
    position = data.draw(st.integers(0, len(before) - 1))
    if data.draw(st.booleans()):
        after = before[:position]
    else:
        value = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789-."[]{},:e \xff'))
        after = before[:position] + bytes([value]) + before[position + 1 :]
    try:
        path.write_bytes(after)
        use(small)
    finally:
        path.write_bytes(before)


def test_the_manifest_does_not_depend_on_the_locale_and_refuses_nan() -> None:
    manifest = build_manifest({"source": {"name": "模型 é"}, "recipe": {}}, {})
    assert "模型 é" in manifest_bytes(manifest).decode()
    assert json.loads(manifest_bytes(manifest)) == manifest
    with pytest.raises(ValueError, match="JSON"):
        manifest_bytes({**manifest, "recipe": {"x": float("nan")}})


def test_the_examples_of_the_specification_are_true(repository: Path) -> None:
    text = (repository / "docs" / "formats" / "artifact.md").read_text(encoding="utf-8")
    digests = [hashlib.sha256(part).hexdigest() for part in (SHARD[-24:-8] + SHARD[-4:], SHARD[-8:-4])]
    assert textwrap.indent(MANIFEST % tuple(digests), "    ") in text
    assert "Its shard is 256 bytes" in text
    assert len(SHARD) == 256
    rows = re.findall(r"^\| (\d+) +\| (\d) +\| ([\d ]+?) +\| `([0-9a-f ]+)` +\|", text, re.MULTILINE)
    assert [bits for _, bits, _, _ in rows] == ["2", "3", "4", "5", "6", "8"]
    for size, bits, codes, packed in rows:
        assert (int(size) - 1).bit_length() == int(bits)
        array = np.array([[int(c) for c in codes.split()]], np.uint8)
        assert array.max() < int(size)
        assert pack_bits(array, int(bits)).tobytes() == bytes.fromhex(packed)
