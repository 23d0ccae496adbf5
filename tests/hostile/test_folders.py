"""Model folders whose parts disagree: shards, indexes, two sets of weights, and names that lead out of the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trapetum.errors import TrapetumError
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.strict_json import shown

INDEX = "model.safetensors.index.json"
ONE, TWO, THREE = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
Fault = Callable[[Any], list[str]]
REFUSED: dict[str, Fault] = {}


def refused(fault: Fault) -> Fault:
    """Register a case: it breaks the model and returns what the message must mention."""
    REFUSED[fault.__name__] = fault
    return fault


def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record of every path that is opened from now on through os.open."""
    record: list[str] = []
    real = os.open

    def spy(path: Any, *args: Any, **options: Any) -> int:
        record.append(os.fspath(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", spy)
    return record


@refused
def shard_is_missing(model: Any) -> list[str]:
    where = model.write_shards(model.tensors(), 3)
    (model.folder / TWO).unlink()
    return [INDEX, TWO, f"{list(where.values()).count(TWO)} tensors", "missing"]


@refused
def shard_is_a_link_to_nothing(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    (model.folder / TWO).unlink()
    (model.folder / TWO).symlink_to("../../blobs/0123abcd")
    return [INDEX, TWO, "link to a file that is gone"]


@refused
def shard_is_a_folder(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    (model.folder / TWO).unlink()
    (model.folder / TWO).mkdir()
    return [TWO, "not a regular file"]


@refused
def index_lists_a_tensor_that_no_file_has(model: Any) -> list[str]:
    where = model.write_shards(model.tensors(), 3)
    model.write_index(where | {"model.layers.1.mlp.extra_proj.weight": TWO})
    return [INDEX, "extra_proj", TWO, "no file has it"]


@refused
def index_puts_a_tensor_into_the_wrong_shard(model: Any) -> list[str]:
    where = model.write_shards(model.tensors(), 3)
    model.write_index(where | {"lm_head.weight": ONE})
    return [INDEX, "lm_head.weight", ONE, THREE]


@refused
def index_repeats_a_key(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    path = model.folder / INDEX
    path.write_text(path.read_text()[:-2] + ', "lm_head.weight": "' + ONE + '"}}')
    return [INDEX, "lm_head.weight", "twice"]


@refused
def index_is_cut_off(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    path = model.folder / INDEX
    path.write_text(path.read_text()[:100])
    return [INDEX, "not valid JSON"]


@refused
def index_is_an_lfs_pointer(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    (model.folder / INDEX).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return [INDEX, "Git LFS pointer"]


@refused
def index_without_a_map(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    (model.folder / INDEX).write_text('{"metadata": {}}')
    return [INDEX, "weight_map", "None"]


@refused
def index_with_an_empty_map(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    model.write_index({})
    return [INDEX, "weight_map", "{}"]


@refused
def index_is_a_list(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    (model.folder / INDEX).write_text("[]")
    return [INDEX, "[]", "object"]


@refused
def two_indexes_none_of_them_canonical(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3)
    path = model.folder / INDEX
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        (model.folder / name).write_text(path.read_text())
    path.unlink()
    return ["a.safetensors.index.json", "b.safetensors.index.json"]


@refused
def shards_without_index_one_missing(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3, index=False)
    (model.folder / TWO).unlink()
    return [TWO, "1 of 3", "no index"]


@refused
def the_first_shard_alone(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3, index=False)
    (model.folder / TWO).unlink()
    (model.folder / THREE).unlink()
    return [TWO, THREE, "2 of 3"]


@refused
def two_shardings_without_index(model: Any) -> list[str]:
    model.write_shards(model.tensors(), 3, index=False)
    model.write_shards(model.tensors(), 2, index=False)
    return [ONE, "model-00001-of-00002.safetensors", "no index"]


@refused
def several_files_without_index(model: Any) -> list[str]:
    model.write(model.tensors(), "a.safetensors")
    model.write(model.tensors(), "b.safetensors")
    return ["a.safetensors", "b.safetensors", "no index"]


@refused
def one_tensor_in_two_shards_without_index(model: Any) -> list[str]:
    arrays = model.tensors()
    model.write_shards(arrays, 2, index=False)
    model.write({"lm_head.weight": arrays["lm_head.weight"]}, "model-00001-of-00002.safetensors")
    return ["lm_head.weight", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@refused
def only_pickles(model: Any) -> list[str]:
    (model.folder / "pytorch_model.bin").write_bytes(b"PK\3\4")
    return ["pytorch_model.bin", "no safetensors"]


@refused
def only_an_adapter(model: Any) -> list[str]:
    model.write(model.tensors(), "adapter_model.safetensors")
    return ["adapter_model.safetensors", "adapter"]


@refused
def no_weights_at_all(model: Any) -> list[str]:
    return [str(model.folder), "safetensors"]


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, model: Any) -> None:
    mentions = REFUSED[case](model)
    with pytest.raises(TrapetumError) as caught:
        Checkpoint.open(model.folder)
    assert [m for m in mentions if m not in caught.value.message] == []
    assert "\n" not in caught.value.message


OUTSIDE = [
    "../secret/s.safetensors",
    "{absolute}",
    "..\\secret\\s.safetensors",
    f"{ONE}\0",
    "./" + ONE,
    "C:s.safetensors",
]
OTHER = [
    "sub/s.safetensors",
    "s.bin",
    "",
    ".",
    "..",
    5,
    None,
    ["a"],
    {"a": 1},
    "\ud800.safetensors",
    "a\n.safetensors",
]


@pytest.mark.parametrize("value", OUTSIDE + OTHER, ids=ascii)
def test_weight_map_values_stay_in_the_folder(
    value: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index and the value are named; no weight file is opened, least of all the one outside."""
    arrays = model.tensors()
    where = model.write_shards(arrays, 3)
    secret = model.folder.parent / "secret"
    secret.mkdir()
    model.write({"lm_head.weight": arrays["lm_head.weight"]}, "../secret/s.safetensors")
    if value == "{absolute}":
        value = str(secret / "s.safetensors")
    model.write_index(where | {"lm_head.weight": value})
    record = opened_files(monkeypatch)
    with pytest.raises(TrapetumError) as caught:
        Checkpoint.open(model.folder)
    assert INDEX in caught.value.message
    assert "'lm_head.weight'" in caught.value.message
    assert shown(value) in caught.value.message  # the folder of a test may have a long name
    assert not [path for path in record if path.endswith("safetensors")]


def test_permission_denied_is_not_missing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.write_shards(model.tensors(), 3)
    real = os.open

    def guarded(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(TWO):
            raise PermissionError(13, "Permission denied")  # root could open a file of mode 000
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", guarded)
    with pytest.raises(TrapetumError, match=rf"{TWO}: permission denied"):
        Checkpoint.open(model.folder)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from([ONE, TWO, THREE, "lm_head.weight"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weight_map", "lm_head.weight"]), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    index=JSON_VALUES
    | st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=3), JSON_VALUES)})
)
def test_any_index_is_refused_or_right(
    index: Any, tmp_path_factory: pytest.TempPathFactory, new_model: Callable[[Path], Any]
) -> None:
    made = new_model(tmp_path_factory.mktemp("a") / "model")
    arrays = {"lm_head.weight": np.ones((2, 2), np.float32)}
    made.write(arrays, ONE)
    (made.folder / INDEX).write_text(json.dumps(index))
    message = INDEX
    try:
        with Checkpoint.open(made.folder) as source:
            check(source, arrays)
    except TrapetumError as error:
        message = error.message
    assert INDEX in message


# ---------------------------------------------------------------- accepted, with the right values


def check(source: Checkpoint, arrays: dict[str, Any]) -> None:
    assert sorted(source.names()) == sorted(arrays)
    for name, expected in arrays.items():
        assert source.load(name).values.tobytes() == expected.tobytes(), name


def test_only_indexed_files_count(model: Any) -> None:
    """Shards and their index, the same weights under other names, and a stale single file with other values."""
    arrays = model.tensors()
    model.write_shards(arrays, 2)
    model.write({n.removeprefix("model."): a for n, a in arrays.items()}, "consolidated.safetensors")
    model.write(model.tensors(), "model-00001-of-00001.safetensors")
    model.write(model.tensors(), "model.safetensors")
    with Checkpoint.open(model.folder) as source:
        check(source, arrays)
        (note,) = source.notes
    for name in ("consolidated.safetensors", "model-00001-of-00001.safetensors", " model.safetensors"):
        assert name in note


def test_a_tensor_that_the_index_forgot_is_used_and_named(model: Any) -> None:
    arrays = model.tensors()
    where = model.write_shards(arrays, 2)
    del where["lm_head.weight"]
    model.write_index(where)
    with Checkpoint.open(model.folder) as source:
        check(source, arrays)
        assert ["lm_head.weight" in note and "forgot" in note for note in source.notes] == [True]


def test_a_second_copy_in_another_shard_is_not_used_and_named(model: Any) -> None:
    arrays = model.tensors()
    where = model.write_shards(arrays, 2)
    first = {n: a for n, a in arrays.items() if where[n].startswith("model-00001")}
    model.write(first | {"lm_head.weight": arrays["lm_head.weight"] * 2}, "model-00001-of-00002.safetensors")
    with Checkpoint.open(model.folder) as source:
        check(source, arrays)
        assert ["lm_head.weight (model-00001-of-00002.safetensors)" in note for note in source.notes] == [
            True
        ]


def test_a_wrong_total_size_is_only_noted(model: Any) -> None:
    arrays = model.tensors()
    where = model.write_shards(arrays, 2)
    size = sum(a.nbytes for a in arrays.values())
    for total, notes in ((size, 0), (size + 1, 1), ("many", 0), (True, 0)):
        model.write_index(where, {"total_size": total})
        with Checkpoint.open(model.folder) as source:
            check(source, arrays)
            assert len(source.notes) == notes
            assert all(str(size) in note and str(size + 1) in note for note in source.notes)


def test_a_complete_set_without_an_index_is_accepted(model: Any) -> None:
    arrays = model.tensors()
    model.write_shards(arrays, 3, index=False)
    with Checkpoint.open(model.folder) as source:
        check(source, arrays)
        assert any("no index" in note for note in source.notes)


def test_a_complete_set_beats_the_rest_of_another(model: Any) -> None:
    arrays = model.tensors()
    model.write_shards(model.tensors(), 3, index=False)
    (model.folder / TWO).unlink()
    model.write_shards(arrays, 2, index=False)
    with Checkpoint.open(model.folder) as source:
        check(source, arrays)
        assert any(ONE in note and "not used" in note for note in source.notes)


@pytest.mark.parametrize("index", ["other.safetensors.index.json", INDEX])
def test_any_single_index_is_followed(index: str, model: Any) -> None:
    arrays = model.tensors()
    model.write_shards(arrays, 3)
    (model.folder / INDEX).rename(model.folder / index)
    with Checkpoint.open(model.folder) as source:
        check(source, arrays)
        assert source.notes == []


def test_the_cache_layout_of_the_hub(model: Any) -> None:
    """snapshots/REV/FILE are relative links to blobs/HASH, also for the index and the config."""
    arrays = model.tensors()
    model.write_shards(arrays, 3)
    blobs = model.folder.parent / "blobs"
    snapshot = model.folder.parent / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(model.folder.iterdir())):
        path.rename(blobs / f"{i:040x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{i:040x}"))
    with Checkpoint.open(snapshot) as source:
        check(source, arrays)
        assert source.config["model_type"] == "llama"
        assert [p.name for p in source.side_files()] == ["config.json"]
        assert source.notes == []


def test_the_index_order_does_not_matter(model: Any) -> None:
    arrays = model.tensors()
    where = model.write_shards(arrays, 3)
    with Checkpoint.open(model.folder) as source:
        first = source.names()
    model.write_index(dict(reversed(where.items())))
    with Checkpoint.open(model.folder) as source:
        assert source.names() == first == list(arrays)


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("", "empty"),
        ("{", "not valid JSON"),
        ("[]", "[]"),
        ("null", "None"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('{"a": "' + "x" * 10, "not valid JSON"),
    ],
)
def test_a_broken_config_is_raised_where_it_is_asked_for(text: str, mention: str, model: Any) -> None:
    arrays = model.tensors()
    model.write(arrays)
    model.write_config(text)
    with Checkpoint.open(model.folder) as source:
        check(source, arrays)
        assert source.packed_format() is None
        for _ in range(2):
            with pytest.raises(TrapetumError) as caught:
                _ = source.config
            assert "config.json" in caught.value.message
            assert mention in caught.value.message


def test_a_missing_config_is_raised_where_it_is_asked_for(model: Any) -> None:
    model.write(model.tensors())
    (model.folder / "config.json").unlink()
    with (
        Checkpoint.open(model.folder) as source,
        pytest.raises(TrapetumError, match=r"config\.json: there is no"),
    ):
        _ = source.config


def test_a_byte_order_mark_and_infinity_are_accepted_in_a_config(model: Any) -> None:
    model.write(model.tensors())
    model.write_config("\ufeff" + json.dumps(model.config | {"time_step_limit": [0.0, np.inf]}))
    with Checkpoint.open(model.folder) as source:
        assert source.config == model.config | {"time_step_limit": [0.0, np.inf]}
