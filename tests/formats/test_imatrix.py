"""Importance files: both forms of llama.cpp, our moments, and what is wrong with files found in the wild."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import FormatError
from trapetum.formats.gguf import GgufFile
from trapetum.formats.imatrix import MomentsWriter, open_statistics, write_imatrix
from trapetum.formats.imatrix_names import stored_name, written_names

Q = "model.layers.0.self_attn.q_proj.weight"
BLK_Q = "blk.0.attn_q.weight"


def dat(path: Path, entries: dict[str, tuple[int, list[float]]], trailer: bytes = b"") -> Path:
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, values) in entries.items():
        parts.append(struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values)))
        parts.append(np.array(values, "<f4").tobytes())
    path.write_bytes(b"".join(parts) + trailer)
    return path


def foreign(path: Path, tensors: dict[str, np.ndarray], kind: str = "imatrix") -> Path:
    """A file as gguf-py writes it."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_type(kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_gguf_py_writes(tmp_path: Path) -> None:
    sums = np.array([[8.0, 2.0, 0.0]], np.float32)
    path = foreign(
        tmp_path / "i", {f"{BLK_Q}.in_sum2": sums, f"{BLK_Q}.counts": np.array([[4.0]], np.float32)}
    )
    with open_statistics(path) as file:
        assert file.kind == "gguf"
        assert file.names() == [BLK_Q]
        assert file.diagonal(Q, 3).tolist() == [2.0, 0.5, 0.0]
        assert file.diagonal("layers.0.self_attn.q_proj.weight", 3).tolist() == [2.0, 0.5, 0.0]
        assert file.diagonal("model.layers.1.self_attn.q_proj.weight", 3) is None
        assert file.moment(Q, 3) is None


def test_gguf_py_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    left = write_imatrix(
        path, {Q: (np.array([4.0, 6.0]), 10), "x.y": (np.ones(2), 1)}, datasets=["a.txt"], chunk_size=4
    )
    assert left == ["x.y"]
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    found = {t.name: t for t in reader.tensors}
    assert list(found) == [f"{BLK_Q}.in_sum2", f"{BLK_Q}.counts"]
    assert found[f"{BLK_Q}.in_sum2"].shape.tolist() == [2, 1]  # fastest first
    assert found[f"{BLK_Q}.in_sum2"].data.tolist() == [[4.0, 6.0]]
    assert found[f"{BLK_Q}.counts"].data.tolist() == [[10.0]]
    assert reader.get_field("imatrix.chunk_count").contents() == 3
    assert reader.get_field("imatrix.datasets").contents() == ["a.txt"]
    with open_statistics(path) as file:
        assert np.allclose(file.diagonal(Q, 2), [0.4, 0.6])


def test_reads_the_legacy_form(tmp_path: Path) -> None:
    trailer = struct.pack("<ii", 7, 5) + b"a.txt"
    path = dat(tmp_path / "i.dat", {BLK_Q: (4, [8.0, 4.0]), "blk.1.attn_q.weight": (0, [3.0, 5.0])}, trailer)
    with open_statistics(path) as file:
        assert file.kind == "dat"
        assert file.diagonal(Q, 2).tolist() == [2.0, 1.0]
        assert file.diagonal("model.layers.1.self_attn.q_proj.weight", 2).tolist() == [3.0, 5.0]


def test_an_expert_without_tokens_takes_the_mean_of_the_others(tmp_path: Path) -> None:
    name = "blk.2.ffn_down_exps.weight"
    sums = np.array([[2.0, 4.0], [0.0, 0.0], [30.0, 60.0]], np.float32)
    counts = np.array([[1.0], [0.0], [3.0]], np.float32)
    path = foreign(tmp_path / "i", {f"{name}.in_sum2": sums, f"{name}.counts": counts})
    with open_statistics(path) as file:
        for e, wanted in enumerate(([2.0, 4.0], [8.0, 16.0], [10.0, 20.0])):
            assert file.diagonal(f"model.layers.2.mlp.experts.{e}.down_proj.weight", 2).tolist() == wanted
        assert file.diagonal("model.layers.2.block_sparse_moe.experts.2.w2.weight", 2).tolist() == [
            10.0,
            20.0,
        ]
        for stack in ("experts.down_proj.weight", "experts.down_proj"):  # the mean square over all tokens
            assert file.diagonal(f"model.layers.2.mlp.{stack}", 2).tolist() == [8.0, 16.0]
        with pytest.raises(FormatError, match="3 experts"):
            file.diagonal("model.layers.2.mlp.experts.3.down_proj.weight", 2)


def test_experts_of_the_legacy_form_are_cut_by_the_width(tmp_path: Path) -> None:
    path = dat(tmp_path / "i.dat", {"blk.0.ffn_up_exps.weight": (2, [2.0, 4.0, 6.0, 8.0])})
    with open_statistics(path) as file:
        assert file.diagonal("model.layers.0.mlp.experts.1.up_proj.weight", 2).tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("bad", "words"), [(-1.0, "1 negative"), (np.nan, "1 NaN"), (np.inf, "1 NaN or inf")]
)
def test_refuses_values_that_are_no_mean_square(tmp_path: Path, bad: float, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        open_statistics(dat(tmp_path / "i.dat", {BLK_Q: (1, [1.0, bad])}))
    values = {
        f"{BLK_Q}.in_sum2": np.array([[1.0, bad]], np.float32),
        f"{BLK_Q}.counts": np.ones((1, 1), np.float32),
    }
    with pytest.raises(FormatError, match=words):
        open_statistics(foreign(tmp_path / "i", values))


def test_refuses_another_width(tmp_path: Path) -> None:
    with open_statistics(dat(tmp_path / "i.dat", {BLK_Q: (1, [1.0, 2.0, 3.0])})) as file:
        with pytest.raises(FormatError, match="3 values"):
            file.diagonal(Q, 2)
        with pytest.raises(FormatError, match="3 values"):
            file.diagonal(Q, 1)


def test_refuses_every_truncation_of_the_legacy_form(tmp_path: Path) -> None:
    whole = dat(tmp_path / "i.dat", {BLK_Q: (1, [1.0, 2.0])}).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(FormatError):
            open_statistics(tmp_path / "cut")


def test_refuses_a_model_and_other_safetensors(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is 'model', not"):
        open_statistics(foreign(tmp_path / "i", {}, kind="model"))
    from safetensors.numpy import save_file

    save_file({"a": np.ones(2, np.float32)}, tmp_path / "a")
    with pytest.raises(FormatError, match="not one of second moments"):
        open_statistics(tmp_path / "a")
    with pytest.raises(FormatError, match="cannot be read"):
        open_statistics(tmp_path / "missing")


def test_moments_are_shared_by_the_weights_that_read_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 3))
    weights = [Q, Q.replace("q_proj", "k_proj")]
    with MomentsWriter(tmp_path / "m", [(weights, 3), (["o"], 2)], ["a.txt"]) as writer:
        writer.write(weights, x.T @ x / 50, 50)
        writer.write(["o"], np.eye(2), 7)
    with open_statistics(tmp_path / "m") as file:
        first, second = file.moment(weights[0], 3), file.moment(weights[1], 3)
        assert first[0] == second[0]
        assert first[2] == 50
        assert np.allclose(first[1], x.T @ x / 50)
        assert np.array_equal(file.diagonal(Q, 3), first[1].diagonal())
        assert file.moment("v", 3) is None
        with pytest.raises(FormatError, match=r"float32 \[4, 4\]"):
            file.moment(Q, 4)


def test_refuses_a_moment_with_nan(tmp_path: Path) -> None:
    with MomentsWriter(tmp_path / "m", [([Q], 2)]) as writer:
        writer.write([Q], np.array([[1.0, np.nan], [np.nan, 1.0]]), 5)
    with open_statistics(tmp_path / "m") as file, pytest.raises(FormatError, match="2 NaN"):
        file.moment(Q, 2)


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("PHI3", "self_attn.qkv_proj"),
        ("PHI3", "mlp.gate_up_proj"),
        ("DEEPSEEK2", "self_attn.q_a_proj"),
        ("DEEPSEEK2", "self_attn.q_b_proj"),
        ("DEEPSEEK2", "self_attn.kv_a_proj_with_mqa"),
        ("QWEN35", "linear_attn.in_proj_qkv"),
        ("QWEN35", "linear_attn.in_proj_z"),
    ],
)
def test_weights_that_only_some_families_have(arch: str, name: str, tmp_path: Path) -> None:
    """Named as gguf-py names them, so that llama.cpp's file for such a model is used whole, and ours by llama.cpp."""
    gguf = pytest.importorskip("gguf")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 4)
    weight = f"model.layers.3.{name}.weight"
    theirs = table.get_name(weight, try_suffixes=(".weight",))
    squares = np.arange(4, dtype=np.float64)
    assert write_imatrix(tmp_path / "ours.gguf", {weight: (squares, 2)}) == []
    reader = gguf.GGUFReader(tmp_path / "ours.gguf")
    assert sorted(t.name for t in reader.tensors) == [f"{theirs}.counts", f"{theirs}.in_sum2"]
    with open_statistics(tmp_path / "ours.gguf") as file:
        found = file.diagonal(weight, 4)
        assert found is not None
        np.testing.assert_array_equal(found, squares / 2)


@pytest.mark.parametrize(
    ("weight", "theirs"),
    [
        ("linear_attn.in_proj_qkvz.weight", ("attn_gate", "attn_qkv")),
        ("mlp.experts.gate_up_proj", ("ffn_gate_exps", "ffn_up_exps")),
        ("mlp.experts.down_proj", ("ffn_down_exps",)),
    ],
)
def test_what_engines_have_apart_or_stacked_is_written_as_they_have_it(
    weight: str, theirs: tuple[str, ...], tmp_path: Path
) -> None:
    """A row for each expert, under the names of every tensor that reads the input; read back, the importance is it."""
    name, squares = f"model.layers.3.{weight}", np.arange(4, dtype=np.float64)
    sums = np.broadcast_to(squares, (5, 4)) if "experts" in weight else squares
    assert write_imatrix(tmp_path / "x.gguf", {name: (sums, 2)}) == []
    with GgufFile.open(tmp_path / "x.gguf") as file:
        rows = 5 if "experts" in weight else 1
        shapes = {n: info.shape for n, info in file.tensors.items()}
        promised = {
            f"blk.3.{t}.weight.{end}": width for t in theirs for end, width in (("in_sum2", 4), ("counts", 1))
        }
        assert shapes == {n: (rows, width) for n, width in promised.items()}
    with open_statistics(tmp_path / "x.gguf") as known:
        found = known.diagonal(name, 4)
        assert found is not None
        np.testing.assert_array_equal(found, squares / 2)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", ""])
def test_a_text_model_inside_another(prefix: str, tmp_path: Path) -> None:
    """Its weights have the names of the text model alone; entries of some family only are not called unknown."""
    weights = [f"{prefix}layers.3.{n}.weight" for n in ("self_attn.q_proj", "linear_attn.in_proj_z")]
    assert write_imatrix(tmp_path / "x.gguf", {w: (np.ones(4), 2) for w in weights}) == []
    with open_statistics(tmp_path / "x.gguf") as file:
        assert file.names() == ["blk.3.attn_gate.weight", "blk.3.attn_q.weight"]
        assert file.notes == []
        assert all(file.diagonal(w, 4) is not None for w in weights)


@pytest.mark.parametrize("name", ["linear_attn.out_proj", "self_attn.k_b_proj", "self_attn.kv_b_proj"])
def test_weights_whose_inputs_differ_in_an_engine_are_left_out(name: str, tmp_path: Path) -> None:
    weight = f"model.layers.3.{name}.weight"
    assert write_imatrix(tmp_path / "x.gguf", {weight: (np.ones(4), 2), Q: (np.ones(4), 2)}) == [weight]


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "vision_tower.encoder.", "model.visual."])
@pytest.mark.parametrize(
    "part",
    ["self_attn.q_proj", "mlp.experts.1.up_proj", "mlp.experts.down_proj", "mlp.shared_expert.up_proj"],
)
def test_layers_of_something_else_are_not_the_language_models(part: str, prefix: str) -> None:
    name = f"layers.0.{part}.weight"
    assert stored_name(f"model.{name}")[0].startswith("blk.0.")
    assert stored_name(prefix + name) == (prefix + name, 0)
    assert written_names(prefix + name) == []
