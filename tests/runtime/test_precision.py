"""The precisions of a model: exact is the decoded model, the others stay within their stated errors."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.errors import RecipeError
from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.prepared import Activations
from trapetum.runtime.matrix import PRECISIONS, Matrix, PreparedMatrix, build_matrix
from trapetum.runtime.model import Model
from trapetum.tensors import BlockTensor, CodebookTensor, TernaryTensor

EVERY = ("embed", "proj", "lm_head")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_exact_is_the_decoded_model(memory_source) -> None:  # type: ignore[no-untyped-def]
    exact = Model(memory_source(EVERY)).logits(IDS)
    dense = Model(memory_source()).logits(IDS)
    np.testing.assert_allclose(exact, dense, rtol=0, atol=1e-5 * np.abs(dense).max())


@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_rounded_activations_stay_close(memory_source, precision: str) -> None:  # type: ignore[no-untyped-def]
    dense = Model(memory_source()).logits(IDS)
    rounded = Model(memory_source(EVERY), precision=precision).logits(IDS)
    error = np.linalg.norm(rounded - dense) / np.linalg.norm(dense)
    assert 0 < error <= 2e-3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_equals_itself_at_any_thread_count(memory_source, precision: str) -> None:  # type: ignore[no-untyped-def]
    results = [Model(memory_source(EVERY), Pool(threads), precision).logits(IDS) for threads in (1, 2, 8)]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_generation_repeats_itself(memory_source, precision: str) -> None:  # type: ignore[no-untyped-def]
    written = [
        Model(memory_source(EVERY), precision=precision).generate(IDS, 12, stop_ids=()) for _ in range(2)
    ]
    assert written[0] == written[1]
    assert len(written[0]) == 12


def test_unknown_precision(memory_source) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RecipeError, match="sloppy"):
        Model(memory_source(EVERY), precision="sloppy")


def _tensor(kind: str) -> CodebookTensor | TernaryTensor | BlockTensor:
    rng = np.random.default_rng(0)
    if kind == "blocks":
        blocks = rng.integers(0, 256, (300, 8, 34), dtype=np.uint8)
        blocks[:, :, 1] = 0x20  # a scale near 0.01
        return BlockTensor("Q8_0", blocks.reshape(300, -1))
    if kind == "ternary":
        scales = rng.standard_normal((300, 2)).astype(np.float16)
        return TernaryTensor(rng.integers(0, 3, (300, 256), dtype=np.uint8), scales)
    codes = rng.integers(0, 16, (300, 256), dtype=np.uint8)
    return CodebookTensor(codes, rng.standard_normal((300, 16)).astype(np.float16))


@pytest.mark.parametrize("kind", ["codebook", "ternary", "blocks"])
@pytest.mark.parametrize("tokens", [1, 16, 17, 130])
def test_matrices(kind: str, tokens: int) -> None:
    tensor = _tensor(kind)
    weights = tensor.dequantize().astype(np.float64)
    x = np.random.default_rng(1).standard_normal((tokens, 256)).astype(np.float32)
    exact = x.astype(np.float64) @ weights.T
    many = tokens > 16  # tiles and BLAS at any precision
    limits = {"exact": 1e-6, "precise": 1e-6 if many else 3e-4, "fast": 1e-6 if many else 1e-2}
    for precision, limit in limits.items():
        matrix = build_matrix(tensor, Pool(2), precision=precision)
        assert isinstance(matrix, PreparedMatrix)
        found = matrix(x)
        assert np.linalg.norm(found - exact) <= limit * np.linalg.norm(exact)
        np.testing.assert_array_equal(matrix(Activations(x)), found)
        np.testing.assert_array_equal(matrix.look_up(np.array([299, 0])), tensor.dequantize()[[299, 0]])


def test_large_codebooks_are_expanded_where_asked() -> None:
    rng = np.random.default_rng(0)
    tensor = CodebookTensor(
        rng.integers(0, 256, (20, 256), dtype=np.uint8), rng.standard_normal((20, 256)).astype(np.float16)
    )
    x = rng.standard_normal((1, 256)).astype(np.float32)
    exact = x.astype(np.float64) @ tensor.dequantize().astype(np.float64).T
    errors = []
    for expand in (False, True):
        matrix = build_matrix(tensor, Pool(1), precision="fast", expand_codes=expand)
        errors.append(np.linalg.norm(matrix(x) - exact) / np.linalg.norm(exact))
    assert errors[0] <= 1e-6 < errors[1] <= 3e-4


def test_a_type_without_a_kernel_is_decoded() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 120, (5, 34), dtype=np.uint8)
    tensor = BlockTensor("MXFP4", blocks)
    matrix = build_matrix(tensor, Pool(1), precision="fast")
    assert type(matrix) is Matrix
    np.testing.assert_array_equal(matrix.tile(slice(1, 4)), tensor.dequantize()[1:4])
