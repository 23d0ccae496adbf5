"""``trapetum bench``: its JSON, its table, and its usage errors."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from trapetum.cli.app import app

FEW = [
    "bench",
    "--shape",
    "128x256",
    "--scheme",
    "codebook K=16",
    "--rounds",
    "2",
    "--pool",
    "1",
    "--threads",
    "1",
]


def test_json() -> None:
    result = CliRunner().invoke(app, [*FEW, "--json", "--tokens", "2"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["tokens"], report["threads"], report["rounds"]) == (2, 1, 2)
    names = [kernel["name"] for kernel in report["shapes"][0]["kernels"]]
    assert names == ["read", "fp32 BLAS", "codebook K=16"]


def test_table() -> None:
    result = CliRunner().invoke(app, [*FEW, "--cpu-time", "--tokens", "2"])
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "128 x 256, tokens 2, threads 1, median of 2"
    assert lines[1].split()[0] == "kernel"
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--shape", "4096"], 2, "not a shape"),
        (["--shape", "16x100"], 1, "multiple of 256"),
        (["--scheme", "nothing"], 1, "codebook K=16"),
        (["--tokens", "1025"], 1, "1 to 1024"),
        (["--device", "abacus"], 2, "cpu"),
    ],
)
def test_errors(arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == code
    assert words in result.stderr.replace("\n", " ")
