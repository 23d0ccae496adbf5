"""The kernel benchmark: what it times is right, and its report holds together."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import KernelUnavailable, RecipeError
from trapetum.kernels.cpu.pool import Pool
from trapetum.runtime.bench import bench_cpu, interleave
from trapetum.runtime.bench_cases import SCHEMES, Case, blas_case, matrix_cases, random_blocks, read_case
from trapetum.tensors import BlockTensor


def test_rounds_take_turns() -> None:
    calls: list[tuple[str, int]] = []
    cases = [Case(name, 1, 1, lambda n, name=name: calls.append((name, n))) for name in "ab"]
    seconds = interleave(cases, 2)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_a_lead_uses_other_weights_and_is_not_timed() -> None:
    calls: list[int] = []

    def run(number: int) -> None:
        calls.append(number)
        time.sleep(2e-3)

    (times,) = interleave([Case("a", 1, 1, run)], 2, lead=5e-3).values()
    assert calls == list(range(len(calls)))
    assert len(calls) >= 1 + 2 * (1 + 1)  # a slow machine may need one run for the whole lead
    assert len(times) == 2


def test_the_pool_is_larger_than_asked() -> None:
    big, cached = matrix_cases("codebook K=16", 256, 512, 1, Pool(1), pool_bytes=1 << 20)
    assert big.weights == 256 * 512
    assert big.nbytes >= big.weights // 2
    assert cached.name == "codebook K=16 cached"
    for number in range(40):
        big.run(number)
        cached.run(number)
    blas_case(64, 128, 2, 1 << 16).run(0)
    read_case(Pool(2), 8 << 20).run(0)


def test_report_is_json_and_consistent() -> None:
    report = bench_cpu(
        [(256, 256)],
        threads=1,
        rounds=3,
        schemes=["codebook K=16", "ternary"],
        pool_bytes=4 << 20,
        llama=(),
    )
    report = json.loads(json.dumps(report))
    (shape,) = report["shapes"]
    rows = {row["name"]: row for row in shape["kernels"]}
    assert list(rows) == ["read", "fp32 BLAS", "codebook K=16", "ternary"]
    assert rows["fp32 BLAS"]["ratio_to_blas"] == 1.0
    for name in ("codebook K=16", "ternary"):
        row = rows[name]
        assert row["weights_per_second"] * row["seconds"] == pytest.approx(256 * 256)
        assert row["share_of_bandwidth"] * rows["read"]["bytes_per_second"] == pytest.approx(
            row["bytes_per_second"]
        )
        assert row["share_of_arithmetic"] > 0
        assert len(row["rounds"]) == 3


def test_a_prompt_is_timed_without_the_cached_kernels() -> None:
    report = bench_cpu([(64, 256)], tokens=20, threads=1, rounds=1, schemes=["Q4_0"], pool_bytes=1 << 16)
    rows = {row["name"]: row for row in report["shapes"][0]["kernels"]}
    assert list(rows) == ["read", "fp32 BLAS", "Q4_0"]
    assert rows["Q4_0"]["weights_per_second"] * rows["Q4_0"]["seconds"] == pytest.approx(64 * 256 * 20)


def test_a_model_is_timed(demo_model: Path) -> None:
    from trapetum.runtime.bench_model import bench_model

    found = bench_model(demo_model, threads=1, prompt=3, tokens=4, rounds=1)
    json.dumps(found)
    assert (found["prompt"], found["tokens"], found["threads"]) == (3, 4, 1)
    assert 0 < found["first_token_seconds"] <= found["first_start_seconds"]
    assert found["tokens_per_second"] > 0
    with pytest.raises(RecipeError, match="rounds"):
        bench_model(demo_model, rounds=0)


def test_every_scheme_builds() -> None:
    for build in SCHEMES.values():
        matrix = build(16, 256)
        assert (matrix.rows, matrix.in_features) == (16, 256)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"schemes": ["nothing"]}, "nothing"), ({"shapes": [(4, 100)]}, "4x100"), ({"tokens": 1025}, "1025")],
)
def test_wrong_options_are_named(options: dict[str, object], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        bench_cpu(**options)  # type: ignore[arg-type]


def test_llama_products_are_what_they_say() -> None:
    pytest.importorskip("xllamacpp")
    from trapetum.runtime.bench_llama import LLAMA_TYPES, llama_cases, llama_product

    x = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    try:
        for name in LLAMA_TYPES:
            blocks = random_blocks(name, 24, 512)
            exact = BlockTensor(name, blocks).dequantize().astype(np.float64) @ x
            difference = np.linalg.norm(llama_product(name, blocks, x) - exact)
            assert difference <= 2e-2 * np.linalg.norm(exact)
        for case in llama_cases(LLAMA_TYPES, 128, 256, Pool(2), 1 << 18):
            case.run(3)
    except KernelUnavailable as error:
        pytest.skip(error.message)
