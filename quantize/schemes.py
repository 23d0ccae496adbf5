"""The table of schemes: what can be done with one tensor, and exactly how many bytes that takes.

A *scheme* names a search and its parameters; a *layout* (``trapetum.tensors``) names how its result is stored. A scheme
is a frozen dataclass with five members (see :class:`Scheme`), one entry in :data:`SCHEMES` and, where ``--bits`` or a
recipe's ``bits`` should reach it, one entry in :data:`BITS`. Everything else (recipe, plan, job, artifact) works from
that protocol: nothing else in the package asks which scheme it is dealing with.

==========  ==========  =========================================================================================
scheme      layout      what it does
==========  ==========  =========================================================================================
``kmeans``  codebook    near-exact one-dimensional k-means, one codebook for each output row
``keep``    dense       nothing: the stored values travel bit for bit
==========  ==========  =========================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.packing import packed_row_bytes
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor, matrix_shape

__all__ = ["BITS", "EFFORTS", "SCHEMES", "KMeans", "Keep", "Scheme", "scheme_from_bits", "scheme_from_spec"]

EFFORTS = ("fast", "default", "high")

# Weights a second and core, by effort and codebook size: bfloat16 rows of 4096, Gaussian, process CPU time on the
# reference core of ``estimate`` (Sapphire Rapids, 2.6 GHz); packing and the error's sum included.
_KMEANS_RATES: dict[str, dict[int, float]] = {
    "fast": {4: 85e6, 8: 45e6, 16: 55e6, 32: 35e6, 64: 13e6, 256: 85e6},
    "default": {4: 65e6, 8: 35e6, 16: 38e6, 32: 22e6, 64: 8e6, 256: 62e6},
    "high": {4: 25e6, 8: 14e6, 16: 9.5e6, 32: 5.4e6, 64: 3.3e6, 256: 6e6},
}


@dataclass(frozen=True)
class Scheme(ABC):
    """What to do with one tensor.

    Attributes
    ----------
    name : str
        Key in :data:`SCHEMES`.
    layout : str
        Layout of the result, a key of ``trapetum.tensors.LAYOUTS``.
    row_independent : bool
        True where any block of rows gives the same bytes as the whole tensor: the job then works by row blocks.
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    row_independent: ClassVar[bool] = True

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name for tables, such as ``kmeans K=16``."""

    def spec(self) -> dict[str, Any]:
        """The scheme as JSON values: stored in the artifact, compared when a job resumes."""
        return {"name": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}

    @abstractmethod
    def arrays(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Stored arrays (suffix -> dtype, shape) of a tensor, before any work; their bytes are exact.

        Parameters
        ----------
        shape : tuple of int
            Logical shape of the tensor.
        dtype : dtype
            Stored dtype of the source.
        wide : bool
            Whether the tensor needs the wide variant, see :meth:`wide`.
        """

    def wide(self, block: NDArray[Any]) -> bool:
        """Whether these rows need the wide variant of the layout; the job ORs the answers over a tensor's blocks.

        Parameters
        ----------
        block : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
        """
        return False

    @abstractmethod
    def quantize(
        self,
        weight: NDArray[Any],
        importance: NDArray[np.float32] | None = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> QuantizedTensor:
        """Quantize rows.

        Parameters
        ----------
        weight : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
        importance : ndarray of float32, shape (in_features,), optional
            Weight of each input in the squared error.
        wide : bool
            The tensor's answer of :meth:`wide`.
        seed : int
            Seed of this tensor; schemes without randomness ignore it.

        Returns
        -------
        QuantizedTensor of shape (rows, in_features)
        """

    def errors(
        self, weight: NDArray[Any], result: QuantizedTensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What was lost, row by row, so that a tensor's sum does not depend on how its rows were cut.

        Parameters
        ----------
        weight : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
        result : QuantizedTensor
            What :meth:`quantize` made of it.

        Returns
        -------
        squared_error, squares : ndarray of float64, shape (rows,)
        """
        wanted = weight.astype(np.float64)
        lost = wanted - result.dequantize(slice(None))
        return np.square(lost).sum(axis=1), np.square(wanted).sum(axis=1)

    @property
    @abstractmethod
    def rate(self) -> float:
        """Weights a second that one reference core does (see ``estimate``), for the prediction of time."""


@dataclass(frozen=True)
class KMeans(Scheme):
    """One codebook of ``codebook_size`` values for each output row, ``ceil(log2 codebook_size)`` bits a weight.

    Parameters
    ----------
    codebook_size : int
        2 to 256 entries.
    effort : {"fast", "default", "high"}
        How near to the optimum; see ``quantize.kmeans``.

    Examples
    --------
    >>> KMeans(16).arrays((4, 6), np.dtype("float32"), False)
    {'codes': (dtype('uint8'), (4, 3)), 'codebook': (dtype('float16'), (4, 16))}
    """

    codebook_size: int
    effort: str = "default"
    name: ClassVar[str] = "kmeans"
    layout: ClassVar[str] = CodebookTensor.layout

    def __post_init__(self) -> None:
        if not 2 <= self.codebook_size <= 256:
            raise RecipeError(f"codebook_size is {self.codebook_size}; 2 to 256 are allowed")
        if self.effort not in EFFORTS:
            raise RecipeError(f"effort is {self.effort!r}; allowed: {', '.join(EFFORTS)}")

    @property
    def label(self) -> str:
        """``kmeans K=16``."""
        return f"kmeans K={self.codebook_size}"

    def arrays(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """``codes`` (bit stream) and ``codebook`` (float16, float32 when wide)."""
        rows, in_features = matrix_shape(shape)
        bits = (self.codebook_size - 1).bit_length()
        return {
            "codes": (np.dtype(np.uint8), (rows, packed_row_bytes(in_features, bits))),
            "codebook": (np.dtype(np.float32 if wide else np.float16), (rows, self.codebook_size)),
        }

    def wide(self, block: NDArray[Any]) -> bool:
        """True where float16 codebooks would overflow or lose values; see ``needs_wide_codebook``."""
        from trapetum.quantize.kmeans import needs_wide_codebook

        return needs_wide_codebook(block, self.codebook_size)

    def quantize(
        self,
        weight: NDArray[Any],
        importance: NDArray[np.float32] | None = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> CodebookTensor:
        """Fit every row; deterministic, the seed is not used."""
        from trapetum.quantize.kmeans import fit_codebooks

        return CodebookTensor(*fit_codebooks(weight, self.codebook_size, importance, self.effort, wide))

    def errors(
        self, weight: NDArray[Any], result: QuantizedTensor
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """As :meth:`Scheme.errors`, compiled."""
        from trapetum.quantize.kmeans import relative_error

        arrays = cast(CodebookTensor, result)
        return relative_error(weight, arrays.codes, arrays.codebook)

    @property
    def rate(self) -> float:
        """Measured on bfloat16 rows of 4096, Gaussian; the next larger measured codebook size counts."""
        rates = _KMEANS_RATES[self.effort]
        return rates[min(size for size in rates if size >= self.codebook_size)]


@dataclass(frozen=True)
class Keep(Scheme):
    """The tensor as it is stored."""

    name: ClassVar[str] = "keep"
    layout: ClassVar[str] = DenseTensor.layout

    @property
    def label(self) -> str:
        """``keep``."""
        return self.name

    def arrays(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """One array, under the tensor's own name."""
        return {"": (np.dtype(dtype), tuple(shape))}

    def quantize(
        self,
        weight: NDArray[Any],
        importance: NDArray[np.float32] | None = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> DenseTensor:
        """Wrap the rows."""
        return DenseTensor(weight)

    @property
    def rate(self) -> float:
        """Bound by reading and writing."""
        return 500e6


SCHEMES: dict[str, type[Scheme]] = {c.name: c for c in (KMeans, Keep)}

# What "bits" means under each scheme: bits -> the parameters it stands for.
BITS: dict[str, dict[int, dict[str, Any]]] = {
    KMeans.name: {b: {"codebook_size": 1 << b} for b in (2, 3, 4, 5, 6, 8)},
}


def scheme_from_bits(name: str, bits: int, effort: str = "default") -> Scheme:
    """Scheme ``name`` at ``bits`` bits a weight.

    Raises
    ------
    RecipeError
        If the scheme is unknown or does not come at that width.

    Examples
    --------
    >>> scheme_from_bits("kmeans", 4)
    KMeans(codebook_size=16, effort='default')
    """
    if name not in BITS:
        raise RecipeError(f"scheme is {name!r}; schemes with a bit width: {', '.join(sorted(BITS))}")
    if bits not in BITS[name]:
        allowed = ", ".join(str(b) for b in BITS[name])
        raise RecipeError(f"bits is {bits} for scheme {name}; allowed: {allowed}")
    cls = SCHEMES[name]
    extra = {"effort": effort} if "effort" in {f.name for f in fields(cls)} else {}
    return cls(**BITS[name][bits], **extra)


def scheme_from_spec(spec: Mapping[str, Any]) -> Scheme:
    """Undo :meth:`Scheme.spec`.

    Raises
    ------
    RecipeError
        If the name or a parameter is unknown, as in an artifact of a later version.
    """
    options = dict(spec)
    name = options.pop("name", None)
    if name not in SCHEMES:
        raise RecipeError(f"scheme is {name!r}; known: {', '.join(SCHEMES)}")
    try:
        return SCHEMES[name](**options)
    except TypeError as e:
        raise RecipeError(f"scheme {name} does not take these parameters: {sorted(options)}") from e
