"""Parts on the command line: what Slurm and Kubernetes say in the environment, and the merge behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_inputs import make_model
from typer.testing import CliRunner, Result

from trapetum.cli.app import app


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("parts") / "model")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("parts") / "whole"
    assert _run("quantize", model, "-o", out, "--effort", "fast").exit_code == 0
    return (out / "SHA256SUMS").read_bytes()


SYSTEMS = {
    "kubernetes": [
        ({"JOB_COMPLETION_INDEX": str(i), "TRAPETUM_PART_COUNT": "2"}, "from JOB_COMPLETION_INDEX")
        for i in (1, 0)
    ],
    "slurm": [
        (
            {"SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "7"},
            "from the Slurm array",
        )
        for i in (8, 7)
    ],
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_batch_systems_parts_make_the_whole(
    system: str, model: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for part, (variables, words) in zip((2, 1), SYSTEMS[system]):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            result = _run("quantize", model, "-o", out, "--effort", "fast")
        assert result.exit_code == 0, result.stderr
        assert f"note: part {part}/2, {words}" in result.stderr
        assert not (out / "trapetum.json").exists()
        if part == 2:
            early = _run("merge", out)
            assert early.exit_code == 1
            assert "part 1/2" in early.stderr
    merged = _run("merge", out)
    assert merged.exit_code == 0, merged.stderr
    assert (out / "SHA256SUMS").read_bytes() == whole


def test_one_part_is_the_whole_where_it_is_said(
    model: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array whose tasks have a model each."""
    for name, value in SYSTEMS["slurm"][0][0].items():
        monkeypatch.setenv(name, value)
    result = _run("quantize", model, "-o", tmp_path / "out", "--effort", "fast", "--part", "1/1")
    assert result.exit_code == 0
    assert "Slurm" not in result.stderr
    assert (tmp_path / "out" / "SHA256SUMS").read_bytes() == whole


def test_contradictions_are_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    monkeypatch.setenv("TRAPETUM_PART_COUNT", "2")
    result = _run("quantize", model, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "part 3/2" in result.stderr
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    result = _run("quantize", model, "-o", tmp_path / "out", "--export", "cbk")
    assert result.exit_code == 2
    assert "export after `trapetum merge`" in result.stderr
