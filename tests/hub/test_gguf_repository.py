"""Repositories that hold GGUF files only: the one is taken, of several one is named, parts of a split come together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trapetum
from trapetum.errors import CheckpointError
from trapetum.hub import resolve_model

REPO = "acme/books-gguf"


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    trapetum.quantize_model(demo_model, folder / "artifact", scheme="gguf:Q8_0")
    trapetum.export_artifact(folder / "artifact", "gguf", folder / "q8.gguf")
    trapetum.export_artifact(demo_model, "gguf", folder / "s.gguf", gguf_type="F16", max_shard_size=2_000_000)
    return folder


def split(made: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(made.glob("s-*.gguf"))}


def test_the_only_gguf_is_taken(
    hub: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.commit(
        REPO,
        {
            "README.md": b"---\nlicense: mit\n---\n",
            "x.gguf": (made / "q8.gguf").read_bytes(),
            "mmproj-x.gguf": b"GGUF",
        },
    )
    trapetum.quantize_model(REPO, tmp_path / "out", effort="fast")
    source = json.loads((tmp_path / "out" / "trapetum.json").read_bytes())["source"]
    assert (source["repo"], source["commit"]) == (REPO, commit)
    trapetum.quantize_model(made / "q8.gguf", tmp_path / "local", effort="fast")
    for file in (tmp_path / "local").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert resolve_model(REPO).name == "x.gguf"
    assert resolve_model(f"{REPO}/x.gguf").name == "x.gguf"
    assert len(hub.requests) == before


def test_one_of_several_is_named(hub: Any, made: Path) -> None:
    files = {"low.gguf": b"GGUF" + bytes(100), "Q8/q8.gguf": (made / "q8.gguf").read_bytes()}
    hub.commit(REPO, files)
    with pytest.raises(
        CheckpointError, match=r"holds 2 GGUF models and no safetensors: Q8/q8\.gguf \("
    ) as caught:
        resolve_model(REPO)
    assert f"such as {REPO}/Q8/q8.gguf" in (caught.value.hint or "")
    assert resolve_model(f"{REPO}/Q8/q8.gguf").read_bytes() == files["Q8/q8.gguf"]
    with pytest.raises(CheckpointError, match="no such model or file"):
        resolve_model(f"{REPO}/none.gguf")


def test_all_parts_of_a_split_come(hub: Any, made: Path) -> None:
    parts = split(made)
    assert len(parts) > 1
    hub.commit(REPO, parts)
    path = resolve_model(REPO)
    assert path.name == next(iter(parts))
    assert {p.name: p.read_bytes() for p in path.parent.glob("*.gguf")} == parts
    last = list(parts)[-1]
    assert resolve_model(f"{REPO}/{last}").name == next(iter(parts))


def test_safetensors_come_first(hub: Any, made: Path, demo_model: Path) -> None:
    hub.commit(REPO, {**{p.name: p.read_bytes() for p in demo_model.iterdir()}, **split(made)})
    path = resolve_model(REPO)
    assert path.is_dir()
    assert hub.asked(r"resolve/.*\.gguf") == 0


@pytest.mark.parametrize(
    "name", ["a/../b.gguf", "a/b/../c.gguf", "a/b/.c.gguf", "/a/b/c.gguf", "a/b/c.ggufx"]
)
def test_no_paths_outside(hub: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        resolve_model(name)
    assert hub.requests == []
