"""Error feedback against a plain float64 transcription of its definition, and what refinement promises."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.quantize.hessian import Hessian
from trapetum.quantize.kmeans import fit_codebooks
from trapetum.quantize.ldlq import Rounds, codebook_codes, ternary_codes
from trapetum.quantize.ternary_search import fit_groups


def problem(rows: int = 6, width: int = 192, seed: int = 0) -> tuple[np.ndarray, Hessian]:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, width)).astype(np.float32)
    x = rng.standard_normal((4000, width)) @ (np.eye(width) + 0.3 * rng.standard_normal((width, width)))
    x *= np.exp(0.7 * rng.standard_normal(width))
    return weight, Hessian(x.T @ x / 4000, 4000)


def loss(weight: np.ndarray, stored: np.ndarray, h: Hessian) -> float:
    e = (weight - stored).astype(np.float64)
    return float(((e @ h.damped()) * e).sum())


def decode(codes: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    return np.take_along_axis(codebook.astype(np.float32), codes.astype(np.intp), axis=1)


def ternary(codes: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    return (codes.astype(np.float32) - 1) * np.repeat(scales.astype(np.float32), group, axis=1)


def test_feedback_follows_its_definition() -> None:
    weight, h = problem()
    _, codebook = fit_codebooks(weight, 8)
    factor = h.factor()
    codes, _ = codebook_codes(weight, codebook.astype(np.float32), factor, None, Rounds(), True)
    upper, table = factor.upper.astype(np.float64), codebook.astype(np.float64)
    errors = np.zeros(weight.shape)
    same = 0
    for j in range(weight.shape[1]):
        target = weight[:, j] + errors[:, :j] @ upper[:j, j]
        wanted = np.abs(target[:, None] - table).argmin(axis=1)
        same += int((wanted == codes[:, j]).sum())
        errors[:, j] = weight[:, j] - table[np.arange(len(table)), codes[:, j]]
    assert same >= codes.size - 2  # float32 may decide a near tie otherwise


def test_feedback_and_refinement_lower_the_loss() -> None:
    weight, h = problem()
    damped = h.damped().astype(np.float32)
    plain = decode(*fit_codebooks(weight, 4, h.diagonal))
    codebook = fit_codebooks(weight, 4, h.factor().weights)[1].astype(np.float32)
    fed = decode(*codebook_codes(weight, codebook, h.factor(), None, Rounds(), True))
    best, stored = codebook_codes(weight, codebook, h.factor(), damped, Rounds(), True)
    assert loss(weight, fed, h) < 0.9 * loss(weight, plain, h)
    assert loss(weight, decode(best, stored), h) < 0.97 * loss(weight, fed, h)
    assert (np.diff(stored, axis=1) >= 0).all()
    assert np.array_equal(stored, stored.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("levels", [3, 4])
def test_ternary_feedback_and_refinement_lower_the_loss(levels: int) -> None:
    weight, h = problem()
    damped = h.damped().astype(np.float32)
    plain = ternary(*fit_groups(weight, 64, levels, h.diagonal), 64)
    fed = ternary(*ternary_codes(weight, 64, levels, h.factor(), None, Rounds()), 64)
    codes, scales = ternary_codes(weight, 64, levels, h.factor(), damped, Rounds())
    assert codes.max() < levels
    assert loss(weight, fed, h) < 0.95 * loss(weight, plain, h)
    assert loss(weight, ternary(codes, scales, 64), h) < 0.97 * loss(weight, fed, h)


def test_least_squares_with_descent_reaches_a_point_that_neither_improves() -> None:
    weight, h = problem(rows=3, width=64)
    damped = h.damped()
    codebook = fit_codebooks(weight, 4)[1].astype(np.float32)
    rounds = Rounds(rounds=8, sweeps=30, steps=40)
    codes, stored = codebook_codes(weight, codebook, h.factor(), damped.astype(np.float32), rounds, False)
    for r in range(3):  # the normal equations in float64
        one_hot = np.eye(4)[codes[r]]
        solved = np.linalg.lstsq(one_hot.T @ damped @ one_hot, one_hot.T @ damped @ weight[r], rcond=None)[0]
        e, f = weight[r] - one_hot @ stored[r], weight[r] - one_hot @ solved
        assert e @ damped @ e <= 1.01 * (f @ damped @ f)
        for j in range(64):  # no single change helps
            for k in range(4):
                other = e.copy()
                other[j] = weight[r, j] - stored[r, k]
                assert other @ damped @ other >= (1 - 1e-5) * (e @ damped @ e)


def test_zero_rows_stay_zero() -> None:
    weight, h = problem(rows=2, width=128)
    weight[0] = 0.0
    codes, scales = ternary_codes(weight, 64, 4, h.factor(), h.damped().astype(np.float32), Rounds())
    assert (codes[0] == 1).all()
    assert not scales[0].any()


def test_a_diagonal_moment_gives_the_plain_nearest_values() -> None:
    weight, _ = problem(rows=3, width=64)
    h = Hessian(np.diag(np.arange(1.0, 65.0)), 10**6)
    wanted, codebook = fit_codebooks(weight, 8, h.diagonal)
    codes, _ = codebook_codes(weight, codebook.astype(np.float32), h.factor(), None, Rounds(), True)
    assert np.array_equal(codes, wanted)
