"""Additive codebooks: eight weights a code of each of M codebooks of 256 vectors, and one scale a row.

M bits a weight, 16 bits a row for the scale, and M * 4096 bytes a tensor for the codebooks, which all rows share. So a
tensor is quantized in two steps: :meth:`Additive.fit` fits the codebooks to a sample of its rows (``additive_fit``);
what it returns encodes any block of rows with them, the same bytes wherever the cuts are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.quantize.blocks import row_blocks
from trapetum.quantize.hessian import Hessian
from trapetum.quantize.scheme import Arrays, Scheme
from trapetum.tensors import AdditiveTensor, QuantizedTensor, matrix_shape
from trapetum.tensors.additive import ENTRIES, GROUP

__all__ = ["Additive", "FittedAdditive", "additive_arrays", "scale_dtype"]

Floats = NDArray[np.float32]
Importance = Hessian | Floats | None


class _Effort(NamedTuple):
    """How long to search.

    Parameters
    ----------
    vectors : int
        Of the sample.
    rounds : int
        Of the fit.
    beam : int
        Choices that the search keeps.
    passes : int
        Over the rows, each with better scales.
    rate : float
        Weights a second.
    refits : int
        Of the codebooks under the second moment of the inputs.
    sweeps : int
        Of coordinate descent under it.
    """

    vectors: int
    rounds: int
    beam: int
    passes: int
    rate: float
    refits: int
    sweeps: int


# The rate is that of a tensor of 16 M weights and two codebooks, the fit included; see ``scheme.Scheme.rate``.
_EFFORTS = {
    "fast": _Effort(1 << 16, 4, 8, 1, 3.5e6, refits=1, sweeps=1),
    "default": _Effort(1 << 18, 10, 16, 1, 1.6e6, refits=2, sweeps=2),
    "high": _Effort(1 << 21, 16, 32, 2, 0.25e6, refits=4, sweeps=4),
}
_REFIT_ROWS, _REFIT_STEPS = 1024, 16
_CHUNK_WEIGHTS = 1 << 20
# A row's scale is its root mean square, refitted: within these bounds it is a normal float16.
_LEAST, _MOST = 2.0**-13, 2.0**14


@dataclass(frozen=True)
class Additive(Scheme):
    """A sum of ``num_codebooks`` vectors for each eight weights.

    Parameters
    ----------
    num_codebooks : int
        1 to 4; as many bits a weight.
    effort : {"fast", "default", "high"}

    Examples
    --------
    >>> Additive().arrays((4, 16), np.dtype("float32"), False)["codes"]
    (dtype('uint8'), (4, 4))
    >>> Additive().misfit((4, 12))
    'rows of 12 are not whole groups of 8'
    """

    num_codebooks: int = 2
    effort: str = "default"
    name: ClassVar[str] = "additive"
    layout: ClassVar[str] = AdditiveTensor.layout
    row_independent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_codebooks <= 4:
            raise RecipeError(f"num_codebooks is {self.num_codebooks}; 1 to 4 are allowed")
        if self.effort not in _EFFORTS:
            raise RecipeError(f"effort is {self.effort!r}; allowed: {', '.join(_EFFORTS)}")

    @property
    def label(self) -> str:
        """``additive 2x8``."""
        return f"additive {self.num_codebooks}x8"

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """``codes``, float16 ``codebooks`` and ``scales``, float32 when wide."""
        return additive_arrays(shape, self.num_codebooks, np.dtype(np.float16), scale_dtype(wide))

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Rows must be whole groups of eight."""
        length = matrix_shape(shape)[1]
        return f"rows of {length} are not whole groups of {GROUP}" if length % GROUP else None

    def fallbacks(self) -> tuple[Scheme, ...]:
        """Scalar codebooks of as many bits, which fit any row."""
        from trapetum.quantize.schemes import KMeans

        return (KMeans(1 << self.num_codebooks),)

    def wide(self, block: NDArray[Any]) -> bool:
        """True where a row's scale would leave the normal range of float16."""
        found = _root_mean_squares(block)
        return bool(((found > _MOST) | ((found < _LEAST) & (found > 0))).any())

    def fit(
        self, rows: int, read: Callable[[slice], NDArray[Any]], seed: int, importance: Importance = None
    ) -> FittedAdditive:
        """Fit the codebooks to rows that the seed chooses; see :meth:`Scheme.fit`.

        With ``importance`` they are fitted once more, to the codes of some rows under it.
        """
        from trapetum.quantize.additive_feedback import Weighted, refit
        from trapetum.quantize.additive_fit import fit_codebooks

        effort = _EFFORTS[self.effort]
        rng = np.random.default_rng(seed)
        width = read(slice(0, 1)).shape[1]
        groups = width // GROUP
        chosen = np.sort(rng.choice(rows, min(rows, -(-effort.vectors // groups)), replace=False))
        runs = np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1)
        blocks = [read(slice(int(r[0]), int(r[-1]) + 1)).astype(np.float32) for r in runs]
        sample = np.concatenate(blocks)
        scales = _root_mean_squares(sample)
        weights = np.repeat(np.square(scales.astype(np.float64)), groups).reshape(-1, groups)
        if importance is not None:
            weights *= Weighted(np.zeros((1, ENTRIES, GROUP), np.float32), importance, width).weights
        books = fit_codebooks(
            _divided(sample, scales).reshape(-1, GROUP),
            weights.reshape(-1),
            self.num_codebooks,
            beam=effort.beam,
            rounds=effort.rounds,
            rng=rng,
            whole=len(chosen) == rows,
        )
        if importance is not None:
            values, scales = sample[:_REFIT_ROWS], scales[:_REFIT_ROWS]
            for _ in range(effort.refits):
                metric = Weighted(books, importance, width)
                codes = metric.encode(_divided(values, scales).reshape(-1, GROUP), effort.beam)
                sums = metric.decode(codes).reshape(values.shape)
                best = _best_scales(values, sums, metric.under(sums))
                books = refit(metric, books, codes, values, best, _REFIT_STEPS)
        return FittedAdditive(self.num_codebooks, self.effort, codebooks=books.astype(np.float16))

    def quantize(
        self,
        weight: NDArray[Any],
        importance: Importance = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> AdditiveTensor:
        """Fit codebooks to these rows and encode them."""
        fitted = self.fit(weight.shape[0], lambda rows: weight[rows], seed, importance)
        return fitted.quantize(weight, importance, wide=wide)

    def errors(
        self, weight: NDArray[Any], result: QuantizedTensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """As :meth:`Scheme.errors`, a few rows at a time."""
        lost, squares = np.empty(len(weight)), np.empty(len(weight))
        for rows in _chunks(weight):
            wanted = weight[rows].astype(np.float64)
            squares[rows] = np.square(wanted).sum(axis=1)
            wanted -= result.dequantize(rows)
            lost[rows] = np.square(wanted).sum(axis=1)
        return lost, squares

    @property
    def rate(self) -> float:
        """Of two codebooks; more take longer in proportion."""
        return _EFFORTS[self.effort].rate * 2 / max(2, self.num_codebooks)


@dataclass(frozen=True, eq=False)
class FittedAdditive(Additive):
    """The scheme with the codebooks of one tensor: encodes rows, each by itself.

    Parameters
    ----------
    num_codebooks, effort
        See :class:`Additive`.
    codebooks : ndarray of float16, shape (num_codebooks, 256, 8)
    """

    codebooks: NDArray[np.float16] = field(kw_only=True)
    row_independent: ClassVar[bool] = True

    def quantize(
        self,
        weight: NDArray[Any],
        importance: Importance = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> AdditiveTensor:
        """Encode rows: entries for the row over its root mean square, then the scale that fits them best.

        With ``importance`` (see :mod:`trapetum.quantize.additive_feedback`) "best" is what the inputs say.
        """
        from trapetum.quantize.additive_feedback import Weighted
        from trapetum.quantize.additive_fit import Encoder

        effort = _EFFORTS[self.effort]
        rows, in_features = weight.shape
        encoder: Encoder | Weighted = Encoder(self.codebooks)
        if importance is not None:
            encoder = Weighted(self.codebooks, importance, in_features)
        codes = np.empty((self.num_codebooks, in_features // GROUP, rows), np.uint8)
        scales = np.empty(rows, scale_dtype(wide))
        for part in _chunks(weight):
            values = weight[part].astype(np.float32)
            divisors = _root_mean_squares(values)
            for _ in range(effort.passes):
                vectors = _divided(values, divisors).reshape(-1, GROUP)
                found = encoder.encode(vectors, effort.beam, effort.sweeps)
                sums = encoder.decode(found).reshape(values.shape)
                best = _best_scales(values, sums, encoder.under(sums))
                divisors = best.astype(scales.dtype).astype(np.float32)
            codes[:, :, part] = found.reshape(len(values), -1, self.num_codebooks).transpose(2, 1, 0)
            scales[part] = divisors
        return AdditiveTensor(codes, self.codebooks, scales)


def additive_arrays(
    shape: tuple[int, ...], num_codebooks: int, codebooks: np.dtype[Any], scales: np.dtype[Any]
) -> Arrays:
    """Stored arrays of an additive tensor."""
    rows, in_features = matrix_shape(shape)
    return {
        "codes": (np.dtype(np.uint8), (rows, in_features // GROUP * num_codebooks)),
        "codebooks": (codebooks, (num_codebooks, ENTRIES, GROUP)),
        "scales": (scales, (rows, 1)),
    }


def scale_dtype(wide: bool) -> np.dtype[Any]:
    """Of row scales."""
    return np.dtype(np.float32 if wide else np.float16)


def _chunks(weight: NDArray[Any]) -> list[slice]:
    return row_blocks(weight.shape[0], weight.shape[1], _CHUNK_WEIGHTS)


def _root_mean_squares(values: NDArray[Any]) -> Floats:
    """Of each row; added in float64, which holds the square of any float32."""
    found = [np.sqrt(np.square(values[r].astype(np.float64)).mean(axis=1)) for r in _chunks(values)]
    return np.concatenate(found).astype(np.float32)


def _divided(values: Floats, scales: Floats) -> Floats:
    """Rows over their scales; zeros where the scale is zero."""
    divisors: Floats = np.where(scales == 0, np.float32(1), scales)
    found: Floats = np.divide(values, divisors[:, None], dtype=np.float32)
    found[scales == 0] = 0
    return found


def _best_scales(values: Floats, sums: Floats, weighted: Floats) -> Floats:
    """``w H p / p H p`` of each row, given p H: the factor of the decoded row p that leaves the least error."""
    along = np.einsum("rc,rc->r", values, weighted, dtype=np.float64)
    norm = np.einsum("rc,rc->r", sums, weighted, dtype=np.float64)
    found: Floats = np.divide(along, norm, out=np.zeros_like(along), where=norm > 0).astype(np.float32)
    return found
