"""Additive codebooks: the search against brute force, the fit against float64, and what the scheme promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.errors import RecipeError
from trapetum.formats.artifact import Artifact
from trapetum.quantize.additive import Additive
from trapetum.quantize.additive_fit import Encoder, fit_codebooks
from trapetum.quantize.additive_lattice import _SPREAD, lattice_codebooks
from trapetum.quantize.hessian import Hessian
from trapetum.quantize.schemes import KMeans, scheme_from_spec
from trapetum.tensors import AdditiveTensor

RNG = np.random.default_rng(7)


def costs(codebooks: np.ndarray, target: np.ndarray, metric: np.ndarray) -> np.ndarray:
    """Cost of every combination of entries in float64, [256, 256, ...]."""
    books = codebooks.astype(np.float64)
    total = books[0]
    for book in books[1:]:
        total = total[..., None, :] + book
    lost = total - target
    return np.einsum("...d,de,...e->...", lost, metric, lost)


@pytest.mark.parametrize("metric", [False, True])
def test_a_beam_of_all_entries_finds_the_best_pair(metric: bool) -> None:
    books = RNG.standard_normal((2, 256, 8)).astype(np.float16)
    root = RNG.standard_normal((8, 8))
    square = (root @ root.T + np.eye(8)) if metric else np.eye(8)
    targets = (1.5 * RNG.standard_normal((12, 8))).astype(np.float32)
    found = Encoder(books, square.astype(np.float32) if metric else None).encode(targets, 256)
    for codes, target in zip(found, targets, strict=True):
        all_costs = costs(books, target, square)
        assert all_costs[tuple(codes)] <= all_costs.min() * (1 + 1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("beam", [1, 3, 8])
def test_the_beam_is_the_textbook_one(count: int, beam: int) -> None:
    # whole numbers: float32 and float64 agree on every cost, and ties go to the first in both
    books = RNG.integers(-9, 10, (count, 256, 8)).astype(np.float32)
    targets = RNG.integers(-20, 21, (9, 8)).astype(np.float32)
    found = Encoder(books).encode(targets, beam)
    for codes, target in zip(found, targets, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for _ in range(count):
            tried = [(*p, k) for p, k in itertools.product(paths, range(256))]
            sums = np.array([sum(books[i, k] for i, k in enumerate(p)) for p in tried])
            lost = np.square(sums - target).sum(axis=1)
            paths = [tried[i] for i in np.argsort(lost, kind="stable")[:beam]]
        best = sum(books[i, k] for i, k in enumerate(paths[0]))
        mine = sum(books[i, k] for i, k in enumerate(codes))
        assert np.square(mine - target).sum() == np.square(best - target).sum()


def test_gaussian_weights_at_two_bits() -> None:
    weight = RNG.standard_normal((128, 512)).astype(np.float32)
    lost, squares = Additive(2, "fast").errors(weight, Additive(2, "fast").quantize(weight, seed=1))
    assert lost.sum() / squares.sum() < 0.0925  # rows of the sample; scalar codebooks at two bits: 0.1175


@pytest.mark.slow
def test_two_million_gaussian_weights() -> None:
    weight = RNG.standard_normal((4096, 512)).astype(np.float32)
    lost, squares = Additive(2).errors(weight, Additive(2).quantize(weight))
    assert lost.sum() / squares.sum() < 0.0900


def test_the_lattice_start_has_a_vector_of_each_class() -> None:
    coarse, *finer = lattice_codebooks(3, _SPREAD, np.random.default_rng(3)).astype(np.float64)
    classes = finer[0]
    roots = coarse[1:241] / 2
    assert np.array_equal(2 * finer[1], classes)
    assert np.array_equal(np.square(roots).sum(axis=1), np.full(240, 2.0))
    for vectors in (classes, roots):  # in E8: whole products with the roots, and whole or half coordinates
        assert np.array_equal(vectors @ roots.T, np.rint(vectors @ roots.T))
    halves = (classes[:, None] - classes)[~np.eye(256, dtype=bool)] / 2
    products = halves @ roots.T
    assert not (products == np.rint(products)).all(axis=1).any()  # no two differ by a vector of 2 E8
    assert (np.square(classes).sum(axis=1) <= 4).all()


def test_codebooks_of_a_sample_serve_the_rest() -> None:
    rng = np.random.default_rng(4)
    sample, others = (rng.standard_normal((1 << 15, 8)).astype(np.float32) for _ in range(2))
    lost = []
    for whole in (True, False):
        books = fit_codebooks(
            sample, np.ones(len(sample)), 2, beam=8, rounds=4, rng=np.random.default_rng(0), whole=whole
        )
        encoder = Encoder(books)
        lost.append(float(np.square(encoder.decode(encoder.encode(others, 8)) - others).mean()))
    assert lost[1] < 0.985 * lost[0]


SPREADS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "half zeros": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.5),
    "signs": lambda rng, shape: rng.choice([-1.0, 1.0], shape) * (rng.random(shape) < 1 / 3),  # kurtosis 3
    "gauss": lambda rng, shape: rng.standard_normal(shape),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_the_start_suits_the_values(spread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    sample, others = (SPREADS[spread](rng, (1 << 13, 8)).astype(np.float32) for _ in range(2))

    def lost() -> float:
        books = fit_codebooks(
            sample, np.ones(len(sample)), 2, beam=4, rounds=2, rng=np.random.default_rng(0), whole=False
        )
        encoder = Encoder(books)
        return float(np.square(encoder.decode(encoder.encode(others, 4)) - others).mean())

    found = lost()
    scale = float(np.sqrt(np.square(sample).mean()))
    for forced in (None, scale):
        monkeypatch.setattr("trapetum.quantize.additive_fit._gaussian_scale", lambda *a, s=forced: s)
        assert found <= lost() * 1.001


def test_more_codebooks_and_more_effort_lose_less() -> None:
    weight = RNG.standard_normal((64, 128)).astype(np.float32)
    schemes = [*(Additive(m, "fast") for m in (1, 2, 3, 4)), Additive(2)]
    errors = [float(s.errors(weight, s.quantize(weight))[0].sum()) for s in schemes]
    assert all(b < 0.6 * a for a, b in itertools.pairwise(errors[:4]))
    assert errors[4] < errors[1]


def test_what_is_known_of_the_inputs_is_used() -> None:
    weight = RNG.standard_normal((96, 64)).astype(np.float32)
    inputs = RNG.standard_normal((4096, 24)) @ RNG.standard_normal((24, 64)) + 0.2 * RNG.standard_normal(
        (4096, 64)
    )
    moment = inputs.T @ inputs / 4096
    others = RNG.standard_normal((1024, 64)).astype(np.float32)  # 96 rows alone would be learnt by heart
    fitted = Additive(2, "fast").fit(1024, lambda rows: others[rows], 0)
    losses = []
    for known in (None, moment.diagonal().astype(np.float32), Hessian(moment, 4096)):
        lost = fitted.quantize(weight, known).dequantize().astype(np.float64) - weight
        losses.append(float(np.einsum("oi,ij,oj->", lost, moment, lost)))
    assert losses[2] < 0.7 * losses[0]
    skewed = np.where(np.arange(64) % 8 < 4, 100.0, 0.01).astype(np.float32)
    parts = [np.square(fitted.quantize(weight, h).dequantize() - weight) @ skewed for h in (None, skewed)]
    assert parts[1].sum() < 0.5 * parts[0].sum()


def test_blocks_of_rows_give_the_bytes_of_the_whole() -> None:
    weight = RNG.standard_normal((40, 64)).astype(ml_dtypes.bfloat16)
    fitted = Additive(2, "fast").fit(40, lambda rows: weight[rows], 3)
    whole = fitted.quantize(weight).to_arrays()
    parts = [fitted.quantize(weight[r : r + 7]).to_arrays() for r in range(0, 40, 7)]
    for key in ("codes", "scales"):
        assert np.concatenate([p[key] for p in parts]).tobytes() == whole[key].tobytes()
    again = Additive(2, "fast").fit(40, lambda rows: weight[rows], 3)
    assert again.codebooks.tobytes() == fitted.codebooks.tobytes()
    assert (
        Additive(2, "fast").fit(40, lambda r: weight[r], 4).codebooks.tobytes() != again.codebooks.tobytes()
    )


def test_few_vectors_are_stored_as_they_are() -> None:
    vectors = RNG.choice([-1.0, 1.0], (200, 8)).astype(np.float32)
    weight = vectors[RNG.integers(0, 200, (16, 12))].reshape(16, 96)
    for factor in (1.0, 2.0**-20, 2.0**40):  # the last two need float32 scales
        rows = weight * np.float32(factor)
        scheme = Additive()
        assert scheme.wide(rows) == (factor != 1.0)
        assert np.array_equal(scheme.quantize(rows, wide=scheme.wide(rows)).dequantize(), rows)


def test_rows_of_zeros_stay_zero() -> None:
    weight = RNG.standard_normal((12, 64)).astype(np.float32)
    weight[3] = 0
    assert not Additive(2, "fast").quantize(weight).dequantize()[3].any()
    assert not Additive(3, "fast").quantize(np.zeros((4, 16), np.float32)).dequantize().any()


def test_scheme() -> None:
    assert scheme_from_spec(Additive(3, "high").spec()) == Additive(3, "high")
    assert Additive(2).misfit((4, 20)) == "rows of 20 are not whole groups of 8"
    assert Additive(3).fallbacks() == (KMeans(8),)
    with pytest.raises(RecipeError, match="num_codebooks is 5; 1 to 4"):
        Additive(5)
    with pytest.raises(RecipeError, match="effort"):
        Additive(2, "most")


@pytest.mark.slow
def test_an_artifact_is_the_same_at_any_thread_count_and_block_size(tmp_path: Path) -> None:
    model = Path(__file__).parents[2] / "models/books-2m"
    found = []
    for threads, memory in ((1, None), (3, 360 << 20)):
        out = tmp_path / str(threads)
        trapetum.quantize_model(model, out, bits=2, effort="fast", threads=threads, max_memory=memory)
        found.append((out / "SHA256SUMS").read_text())
    assert found[0] == found[1]
    with Artifact.open(tmp_path / "1") as art:
        name = next(n for n in art if art.layout(n) == "additive")
        tensor = art[name]
        assert isinstance(tensor, AdditiveTensor)
        assert tensor.num_codebooks == 2
        assert np.array_equal(art.load(name, slice(3, 9)).dequantize(), tensor.dequantize(slice(3, 9)))
        assert art.check_sums() == []
