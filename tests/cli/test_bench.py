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


def test_a_card_that_is_not_there() -> None:
    from trapetum.errors import KernelUnavailable
    from trapetum.kernels.cuda.module import card

    missing = ""
    try:
        card()
    except KernelUnavailable as reason:
        missing = reason.message
    if not missing:
        pytest.skip("there is a card")
    result = CliRunner().invoke(app, ["bench", "--device", "cuda", "--shape", "128x256"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert missing in result.stderr


def test_the_card_s_table() -> None:
    from trapetum.cli.bench import card_text

    kernel = {
        "name": "ternary", "tokens": 1, "seconds": 5.6e-6, "bytes": 4_456_448, "bytes_per_second": 796e9,
        "share_of_bandwidth": 0.18, "ratio_to_cublas": 2.41,
    }  # fmt: skip
    report = {
        "machine": {"device": "A card", "driver": 13000, "cupy": "14"},
        "bandwidth": 4.4e12,
        "rounds": 20,
        "shapes": [{"rows": 4096, "in_features": 4096, "cublas": {"1": 13.5e-6}, "kernels": [kernel]}],
    }
    lines = card_text(report).splitlines()
    assert lines[:2] == [
        "A card, driver 13000, CuPy 14; memory reads 4400 GB/s; median of 20",
        "4096 x 4096, tokens 1, cuBLAS 13.5 us",
    ]
    assert lines[-1].split() == ["ternary", "5.6", "796", "0.18", "2.41"]
