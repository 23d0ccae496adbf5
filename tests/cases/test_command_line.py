"""Faults of the catalogue that have no input of their own: options, outputs, leftovers."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import trapetum
from trapetum.cli.app import app
from trapetum.errors import OutputError
from trapetum.formats.gguf import GgufFile


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def ternary(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cases") / "ternary"
    trapetum.quantize_model(demo_model, out, scheme="ternary")
    return out


@pytest.mark.parametrize("size", ["-1", "0", "38", "1e2", "sixty-four"])
def test_group_sizes_are_checked(demo_model: Path, tmp_path: Path, size: str) -> None:
    code, said = run(
        "quantize", demo_model, "-o", tmp_path / "out", "--scheme", "ternary", "--group-size", size
    )
    assert code == 2
    assert "--group-size" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["quantize", "export", "merge", "verify", "inspect", "report"])
def test_an_output_is_never_positional(tmp_path: Path, command: str) -> None:
    """A shell's glob must not make the second shard an output."""
    shards = [tmp_path / f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for path in shards:
        path.write_bytes(b"weights")
    code, said = run(command, *shards)
    assert code == 2
    assert "unexpected extra argument" in said or "Missing option" in said
    assert [p.read_bytes() for p in shards] == [b"weights"] * 3


def test_a_second_export_replaces_the_whole_family(ternary: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    trapetum.export_artifact(ternary, "gguf", out, max_shard_size=500_000)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    for options in ([], ["--max-shard-size", "1G"]):
        code, said = run("export", ternary, "--format", "gguf", "-o", out, *options)
        assert code == 1
        assert "exists" in said
    trapetum.export_artifact(ternary, "gguf", out, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "m.gguf.sha256"]
    assert run("verify", out)[0] == 0


def test_a_foreign_list_of_sums_is_not_replaced(ternary: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf.sha256").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        trapetum.export_artifact(ternary, "gguf", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf.sha256").read_text() == "mine"


def test_keys_of_a_split_do_not_travel(ternary: Path, tmp_path: Path) -> None:
    trapetum.export_artifact(ternary, "gguf", tmp_path / "m.gguf", max_shard_size=500_000)
    first = min(tmp_path.glob("m-*.gguf"))
    trapetum.export_artifact(first, "gguf", tmp_path / "whole.gguf")
    with GgufFile.open(tmp_path / "whole.gguf") as whole:
        assert [k for k in whole.metadata if k.startswith("split.")] == []
        assert len(whole.tensors) == sum(len(GgufFile.open(p).tensors) for p in tmp_path.glob("m-*.gguf"))


def test_who_can_load_it_is_said(ternary: Path, tmp_path: Path) -> None:
    code, said = run("export", ternary, "--format", "gguf", "--gguf-type", "PQ2_0", "-o", tmp_path / "m.gguf")
    assert code == 0
    assert "llama.cpp" in said
