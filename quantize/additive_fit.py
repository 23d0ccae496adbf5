"""Codebooks of an additive scheme, fitted to a sample of a tensor's vectors.

1. Start: vector k-means of the sample gives the first codebook, k-means of what is left the next, and so on. Where the
   sample is large or stands for more than itself, and its values are spread like Gaussian ones, the start is a lattice
   (``additive_lattice``).
2. Repeat: choose entries by beam search (``kernels.cpu.additive_search``); then all codebooks at once by least squares,
   and as far again, but in the last round: the next choices would go on in that direction.

Least squares: with the entries fixed, the error is quadratic in the M * 256 vectors, and each of the eight dimensions
has the same M * 256 normal equations. They are singular (a constant can move from one codebook to another) and say
nothing of entries that nobody chose; solved for the change of the codebooks, with a little added to the diagonal, such
directions stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.quantize.additive_lattice import lattice_codebooks
from trapetum.tensors.additive import ENTRIES, GROUP

__all__ = ["Encoder", "fit_codebooks"]

Floats = NDArray[np.float32]

_KMEANS_VECTORS = 1 << 16  # 256 for each entry
_KMEANS_STEPS = 16
_RIDGE = 1e-4  # of an entry's mean weight
_EARLY_VECTORS = 1 << 18  # enough for the first half of the rounds
_STEP = 2.0  # of what least squares would change: choices follow slowly, and 8 rounds do more than 12 of 1.0
# k-means fits fewer vectors better, if only these: 0.0885 of 131,072 Gaussian ones either way
_LATTICE_VECTORS = 1 << 17
# Values of which the lattice is the better start: of kurtosis about 3, and not because many of them are zero (a third
# of signs is 3 as well). Logistic values (4.2 and 0.764) lose alike from either; rows of trained models, over their
# scales, are at 2.9 to 3.4 and 0.78 to 0.80.
_KURTOSIS = (2.4, 3.6)
_LEAST_MEAN = 0.76  # of magnitudes, over the root mean square


class Encoder:
    """The tables of one metric; see ``kernels.cpu.additive_search``.

    Parameters
    ----------
    codebooks : ndarray of float16 or float32, shape (M, 256, 8)
    metric : ndarray of float32, shape (8, 8), optional
        Symmetric; the identity when omitted.
    """

    def __init__(self, codebooks: NDArray[Any], metric: Floats | None = None) -> None:
        books = codebooks.astype(np.float32)
        self.metric, self._books = metric, books
        self._count = books.shape[0]
        measured = books if metric is None else books @ metric
        self._norms = (measured * books).sum(axis=2, dtype=np.float32).reshape(-1)
        self._turned = np.ascontiguousarray(np.float32(-2) * books.reshape(-1, GROUP).T)
        pairs = [(i, j) for j in range(self._count) for i in range(j)]
        self._cross = np.empty((len(pairs), ENTRIES, ENTRIES), np.float32)
        for table, (i, j) in zip(self._cross, pairs, strict=True):
            np.matmul(np.float32(2) * measured[i], books[j].T, out=table)

    def encode(self, targets: Floats, beam: int, sweeps: int = 0) -> NDArray[np.uint8]:
        """Entries for each target.

        Parameters
        ----------
        targets : ndarray of float32, shape (n, 8)
        beam : int
        sweeps : int
            Without a moment between vectors there is nothing to sweep.

        Returns
        -------
        ndarray of uint8, shape (n, M)
        """
        from trapetum.kernels.cpu.additive_search import encode_vectors

        codes = np.empty((targets.shape[0], self._count), np.uint8)
        linear = targets if self.metric is None else targets @ self.metric
        encode_vectors(np.ascontiguousarray(linear), self._turned, self._norms, self._cross, beam, codes)
        return codes

    def decode(self, codes: NDArray[np.uint8]) -> Floats:
        """Sums of the entries, float32 [n, 8], in the order of the codebooks."""
        total = np.zeros((codes.shape[0], GROUP), np.float32)
        for book, chosen in zip(self._books, codes.T, strict=True):
            total += book[chosen]
        return total

    def under(self, sums: Floats) -> Floats:
        """Rows times the second moment of the inputs, which is the identity here."""
        return sums


def fit_codebooks(
    vectors: Floats,
    weights: NDArray[np.float64],
    count: int,
    *,
    beam: int,
    rounds: int,
    rng: np.random.Generator,
    whole: bool = True,
) -> Floats:
    """Codebooks for a weighted sample of vectors; see the module.

    Parameters
    ----------
    vectors : ndarray of float32, shape (n, 8)
        Rows of a matrix over their scales.
    weights : ndarray of float64, shape (n,)
        What the squared error of each vector counts, not negative: the square of its row's scale.
    count : int
        Codebooks.
    beam : int
        Choices that the search keeps.
    rounds : int
        Times that entries are chosen and codebooks refitted.
    rng : Generator
    whole : bool
        Whether the vectors are all that will be coded; codebooks must not follow a sample of them too closely.

    Returns
    -------
    ndarray of float32, shape (count, 256, 8)
    """
    total = float(weights.sum())
    weights = weights / (total / len(weights)) if total else np.ones_like(weights)
    large = count > 1 and (len(vectors) >= _LATTICE_VECTORS or not whole)
    scale = _gaussian_scale(vectors, weights) if large else None
    if scale is None:
        books = _residual_kmeans(vectors, weights, count, rng)
    else:
        books = lattice_codebooks(count, scale, rng)
    few, few_weights = vectors, weights
    if len(vectors) > _EARLY_VECTORS:
        chosen = np.sort(rng.choice(len(vectors), _EARLY_VECTORS, replace=False))
        few, few_weights = vectors[chosen], weights[chosen]
    far = (
        _STEP if len(vectors) > 2 * count * ENTRIES else 1.0
    )  # fewer are met nearly exactly: nothing to hurry
    for number in range(rounds):
        if number == rounds // 2:
            few, few_weights = vectors, weights
        codes = Encoder(books).encode(few, beam)
        best = _least_squares(books, codes, few, few_weights)
        step = np.float32(1.0 if number in (0, rounds - 1) else far)
        books = books + step * (best - books)
    return books


def _gaussian_scale(vectors: Floats, weights: NDArray[np.float64]) -> float | None:
    """Root mean square of values that are spread about as Gaussian ones; None of others."""
    sums = np.zeros(3)
    for start in range(0, len(vectors), _KMEANS_VECTORS):
        part = slice(start, start + _KMEANS_VECTORS)
        sizes = np.abs(vectors[part], dtype=np.float64)
        squares = np.square(sizes)
        sums += [weights[part] @ power.sum(axis=1) for power in (sizes, squares, np.square(squares))]
    mean, square, fourth = sums / vectors.size
    low, high = _KURTOSIS
    if not low * square**2 < fourth <= high * square**2 or mean < _LEAST_MEAN * math.sqrt(square):
        return None
    return math.sqrt(square)


def _residual_kmeans(
    vectors: Floats, weights: NDArray[np.float64], count: int, rng: np.random.Generator
) -> Floats:
    """The start: each codebook clusters what the ones before leave, on at most 2**16 of the vectors.

    Lloyd's steps from vectors of the sample: the search for one codebook is an exact nearest neighbour, and its least
    squares are the weighted means. scikit-learn's k-means on half as many vectors ended at 0.0927 of Gaussian weights
    (4096 x 4096, no lattice) where this ended at 0.0925, took 0.7 s more, warned of empty clusters where vectors are
    few, and its sums depend on its threads.
    """
    chosen = np.sort(rng.choice(len(vectors), min(len(vectors), _KMEANS_VECTORS), replace=False))
    rest, weights = vectors[chosen], weights[chosen]
    books = np.zeros((count, ENTRIES, GROUP), np.float32)
    for m in range(count):
        distinct = np.unique(rest, axis=0)
        if len(distinct) <= ENTRIES:  # every vector is an entry: nothing is left for the next codebook
            books[m, : len(distinct)] = distinct
            break
        book = distinct[rng.choice(len(distinct), ENTRIES, replace=False)][None]
        for _ in range(_KMEANS_STEPS):
            book = _least_squares(book, Encoder(book).encode(rest, 1), rest, weights)
        rest = rest - Encoder(book).decode(Encoder(book).encode(rest, 1))
        books[m] = book[0]
    return books


def _least_squares(
    books: Floats, codes: NDArray[np.uint8], vectors: Floats, weights: NDArray[np.float64]
) -> Floats:
    """All codebooks at once, for the entries chosen."""
    from scipy.linalg import solve

    from trapetum.kernels.cpu.additive_search import accumulate

    size = books.shape[0] * ENTRIES
    pairs, sums = np.zeros((size, size)), np.zeros((size, GROUP))
    accumulate(codes, vectors, weights, pairs, sums)
    pairs = np.triu(pairs) + np.triu(pairs, 1).T
    old = books.reshape(size, GROUP).astype(np.float64)
    wanted = sums - pairs @ old
    pairs[np.diag_indices(size)] += _RIDGE * len(vectors) / ENTRIES
    change = solve(pairs, wanted, assume_a="pos", check_finite=False)
    fitted: Floats = (old + change).reshape(books.shape).astype(np.float32)
    return fitted
