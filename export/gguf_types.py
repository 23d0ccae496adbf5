"""Which GGUF type a tensor gets: what is asked for, what is possible, and what costs least.

Ternary tensors get a ternary type and blocks stay what they are; both without loss. A codebook has no counterpart
in GGUF, so its values are fitted again: with ``auto``, into the smallest stock type that adds at most a tenth of the
error that the tensor already has. The choice is made on rows spread over the tensor, all of them where it is small; the
report states what the whole tensor lost.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES, BlockType
from trapetum.errors import CheckpointError, RecipeError
from trapetum.export.gguf_ternary import TERNARY_NAMES
from trapetum.formats.source import TensorSource
from trapetum.quantize.block_scheme import Blocks
from trapetum.quantize.block_search import fit_blocks
from trapetum.tensors import DenseTensor, QuantizedTensor, matrix_shape

__all__ = [
    "AUTO",
    "FITTED_NAMES",
    "PLAIN_NAMES",
    "TYPE_NAMES",
    "cheapest_type",
    "fallback_type",
    "known_type",
    "squares",
]

AUTO = "AUTO"
PLAIN_NAMES = ("F32", "F16", "BF16")
# By size; among equals the more accurate one first.
FITTED_NAMES = (
    "Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "IQ4_NL", "Q4_0", "Q4_1", "Q5_K", "Q5_0", "Q5_1", "Q6_K", "Q8_0",
)  # fmt: skip
TYPE_NAMES = (AUTO, *TERNARY_NAMES, *FITTED_NAMES, *PLAIN_NAMES)
"""What ``--gguf-type`` takes, in any case."""

_ADDED = 0.1  # of the tensor's own error
_SAMPLE_WEIGHTS = 1 << 18
# A sample of 2**18 weights gives the error of a tensor to about 2 %: leave that much.
_SAMPLE_MARGIN = 0.95
# Types that are far off show it on a few rows: 0.10 instead of 0.31 CPU seconds for a tensor of 1024 x 4096.
_GLANCE_WEIGHTS, _GLANCE_SLACK = 1 << 14, 1.5


def known_type(name: str | None) -> str:
    """The canonical spelling of a ``--gguf-type``; None means ``auto``.

    Raises
    ------
    RecipeError
        With the list of types.
    """
    upper = (name or AUTO).upper()
    if upper not in TYPE_NAMES:
        raise RecipeError(f"gguf type is {name!r}; allowed are {', '.join(TYPE_NAMES)}")
    return upper


def fallback_type(name: str, in_features: int) -> BlockType:
    """The type itself where rows are whole blocks of it, else the next that fits.

    Examples
    --------
    >>> fallback_type("Q4_K", 512).name, fallback_type("Q4_K", 96).name, fallback_type("Q4_K", 100).name
    ('Q4_K', 'Q5_0', 'F16')
    """
    wanted = Blocks(name)
    for scheme in (wanted, *wanted.fallbacks()):
        if isinstance(scheme, Blocks) and scheme.misfit((1, in_features)) is None:
            return BLOCK_TYPES[scheme.type]
    return BLOCK_TYPES["F16"]


def cheapest_type(
    artifact: TensorSource, name: str, own_error: float, source: tuple[TensorSource, str] | None
) -> BlockType:
    """The smallest stock type that adds at most a tenth of a tensor's own error.

    Parameters
    ----------
    artifact : TensorSource
    name : str
    own_error : float
        Relative squared error of the tensor in the artifact.
    source : (TensorSource, str), optional
        Encode from this tensor instead: then its whole error may be 1.1 times the artifact's.

    Raises
    ------
    CheckpointError
        If a value is not finite.
    """
    origin, tensor = source or (artifact, name)
    rows, width = matrix_shape(origin.shape(tensor))
    values = _sample(origin, tensor, _SAMPLE_WEIGHTS)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{origin.path}: tensor {tensor} holds values that are not finite")
    few = values[:: max(1, len(values) * width // _GLANCE_WEIGHTS)]
    allowed = own_error * (_ADDED if source is None else 1 + _ADDED)
    allowed *= 1.0 if len(values) == rows else _SAMPLE_MARGIN
    for entry in FITTED_NAMES:
        kind = BLOCK_TYPES[entry]
        if width % kind.block_size or np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
            continue
        if _error(few, entry) <= _GLANCE_SLACK * allowed and _error(values, entry) <= allowed:
            return kind
    with np.errstate(over="ignore"):
        rounded = DenseTensor(values.astype(np.float16))
    lost, norm = squares(values, rounded)
    return BLOCK_TYPES["F16" if lost <= allowed * norm else "F32"]


def _sample(source: TensorSource, name: str, weights: int) -> NDArray[np.float32]:
    """Rows spread evenly over a tensor, all of them where it is small."""
    rows, width = matrix_shape(source.shape(name))
    chosen = np.unique(np.linspace(0, rows - 1, max(1, min(rows, weights // max(width, 1)))).astype(np.int64))
    runs = np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1)
    parts = [source.load(name, slice(int(r[0]), int(r[-1]) + 1)).dequantize() for r in runs]
    return np.concatenate([part.reshape(-1, width) for part in parts])


def _error(values: NDArray[np.float32], kind: str) -> float:
    lost, norm = squares(values, fit_blocks(values, kind))
    return lost / norm if norm else 0.0


def squares(values: NDArray[np.float32], stored: QuantizedTensor) -> tuple[float, float]:
    """Squared error of a stored tensor, and the sum of squares of what it stands for."""
    lost = stored.dequantize(slice(None)).astype(np.float64)
    lost -= values
    return float(np.square(lost).sum()), float(np.square(values, dtype=np.float64).sum())
