"""The table of schemes: what can be done with one tensor, and exactly how many bytes that takes.

A scheme is a frozen dataclass with the members of :class:`~trapetum.quantize.scheme.Scheme`, one entry in
:data:`SCHEMES` and one in :data:`NAMED`, the names that ``--scheme`` and recipes use; where ``--bits`` or a recipe's
``bits`` should reach it, one entry in :data:`BITS`. Recipe, plan, job and artifact work from that protocol.

================  ==========  ===================================================================================
scheme            layout      what it does
================  ==========  ===================================================================================
``kmeans``        codebook    near-exact one-dimensional k-means, one codebook for each output row
``ternary``       ternary     exact three- or four-level codes, one scale for each group of a row
``additive``      additive    a sum of M vectors of eight weights, M codebooks a tensor, one scale a row
``gguf:TYPE``     blocks      the best blocks of a GGUF type that the search finds
``asis``          (settled)   takes over what is ternary or a block already; becomes one of the next four when seen
``asis-ternary``  ternary     codes and scales of weights that are ternary, without loss
``asis-gguf``     blocks      the blocks of a GGUF source, byte for byte
``asis-additive`` additive    the codes, codebooks and scales of an AQLM source
``asis-float8``   float8      the codes and scales of an FP8 source
``keep``          dense       nothing: the stored values travel bit for bit
================  ==========  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.packing import packed_row_bytes
from trapetum.quantize.additive import Additive
from trapetum.quantize.additive_intake import AdditiveAsIs
from trapetum.quantize.block_scheme import PREFIX, Blocks, BlocksAsIs
from trapetum.quantize.block_search import SEARCHES
from trapetum.quantize.float8_intake import Float8AsIs
from trapetum.quantize.hessian import Hessian
from trapetum.quantize.scheme import EFFORTS, Arrays, Importance, Scheme
from trapetum.quantize.ternary import Ternary
from trapetum.quantize.ternary_intake import AsIs, TernaryAsIs
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor, matrix_shape

__all__ = [
    "BITS",
    "NAMED",
    "SCHEMES",
    "KMeans",
    "Keep",
    "Options",
    "Scheme",
    "check_scheme_name",
    "scheme_from_bits",
    "scheme_from_spec",
]

# Weights a second and core, by effort and codebook size: bfloat16 rows of 4096, Gaussian, process CPU time on the
# reference core of ``estimate`` (Sapphire Rapids, 2.6 GHz); packing and the error's sum included.
_KMEANS_RATES: dict[str, dict[int, float]] = {
    "fast": {4: 85e6, 8: 45e6, 16: 55e6, 32: 35e6, 64: 13e6, 256: 85e6},
    "default": {4: 65e6, 8: 35e6, 16: 38e6, 32: 22e6, 64: 8e6, 256: 62e6},
    "high": {4: 25e6, 8: 14e6, 16: 9.5e6, 32: 5.4e6, 64: 3.3e6, 256: 6e6},
}


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

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
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
        importance: Importance = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> CodebookTensor:
        """Fit every row; deterministic, the seed is not used.

        With a second moment the codebook is fitted to what each input counts once the inputs after it have made up
        for what they can, the codes come from error feedback, and effort ``high`` refines both (``quantize.ldlq``).
        """
        from trapetum.quantize.kmeans import fit_codebooks

        if isinstance(importance, Hessian):
            from trapetum.quantize.ldlq import codebooks_under

            return CodebookTensor(
                *codebooks_under(weight, self.codebook_size, importance, self.effort, wide=wide)
            )
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

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """One array, under the tensor's own name."""
        return {"": (np.dtype(dtype), tuple(shape))}

    def quantize(
        self,
        weight: NDArray[Any],
        importance: Importance = None,
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


SCHEMES: dict[str, type[Scheme]] = {
    c.name: c
    for c in (
        KMeans,
        Additive,
        Ternary,
        Blocks,
        AsIs,
        TernaryAsIs,
        BlocksAsIs,
        AdditiveAsIs,
        Float8AsIs,
        Keep,
    )
}

# What "bits" means under each scheme: bits -> the parameters it stands for.
BITS: dict[str, dict[int, dict[str, Any]]] = {
    KMeans.name: {b: {"codebook_size": 1 << b} for b in (2, 3, 4, 5, 6, 8)},
    Additive.name: {b: {"num_codebooks": b} for b in (1, 2, 3, 4)},
}


@dataclass(frozen=True)
class Options:
    """What a recipe says beside the name of a scheme; a scheme takes what concerns it.

    Parameters
    ----------
    bits : int
    effort : str
    levels, group_size : int
        Of ternary schemes.
    """

    bits: int = 4
    effort: str = "default"
    levels: int = 3
    group_size: int = 128


NAMED: dict[str, Callable[[Options], Scheme]] = {
    KMeans.name: lambda o: scheme_from_bits(KMeans.name, o.bits, o.effort),
    Additive.name: lambda o: scheme_from_bits(Additive.name, o.bits, o.effort),
    Ternary.name: lambda o: Ternary(o.levels, o.group_size, effort=o.effort),
    AsIs.name: lambda o: AsIs(),
    **{PREFIX + kind: lambda o, kind=kind: Blocks(kind) for kind in SEARCHES},  # type: ignore[misc]
}
"""What ``--scheme`` and the ``scheme`` of a recipe may say."""


def check_scheme_name(text: str) -> str:
    """``text`` if it is a key of :data:`NAMED`.

    Raises
    ------
    ValueError
        With the names that are allowed.

    Examples
    --------
    >>> check_scheme_name("gguf:Q4_K")
    'gguf:Q4_K'
    """
    if text not in NAMED:
        plain = [n for n in NAMED if not n.startswith(PREFIX)]
        raise ValueError(
            f"is {text!r}; allowed: {', '.join(plain)}, {PREFIX}TYPE with TYPE one of {', '.join(SEARCHES)}"
        )
    return text


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
