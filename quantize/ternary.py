"""Ternary and four-level schemes: two bits a weight and one float16 scale a group, exactly fitted.

``--levels 3`` allows {-d, 0, +d} in each group, ``--levels 4`` adds +2d with d of either sign: the fourth code that two
bits have anyway. Both are what the GGUF types PQ2_0 (groups of 128) and Q2_0 (groups of 64) hold, so an export loses
nothing. The search is ``quantize.ternary_search``; here are the shapes, the refusals, and what ternary weights cost.

A row must be whole groups: padding it would change the length of the activations that meet it. Rows that are not take
a fallback that the plan names, or are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.packing import packed_row_bytes
from trapetum.quantize.hessian import Hessian
from trapetum.quantize.scheme import Arrays, Importance, Scheme
from trapetum.rotation import ROTATION_KEY
from trapetum.tensors import BlockTensor, QuantizedTensor, TernaryTensor, matrix_shape

if TYPE_CHECKING:
    from trapetum.quantize.plan import Plan, PlanRow

__all__ = ["GROUP_SIZES", "LEVELS", "Ternary", "cost_note", "ternary_arrays"]

LEVELS = (3, 4)
GROUP_SIZES = (128, 64)

# Weights a second on the reference core of ``estimate``, packing and the error's sum included.
_RATES = {3: 28e6, 4: 13e6}
_FEW_BIT_LAYOUTS, _FEW_BITS = (TernaryTensor.layout, BlockTensor.layout), 2.3
_SAMPLE_TENSORS, _SAMPLE_WEIGHTS = 8, 1 << 16


def ternary_arrays(shape: tuple[int, ...], group_size: int, scales: np.dtype[Any]) -> Arrays:
    """``codes`` (two bits a weight) and ``scales`` of a ternary tensor."""
    rows, in_features = matrix_shape(shape)
    return {
        "codes": (np.dtype(np.uint8), (rows, packed_row_bytes(in_features, 2))),
        "scales": (scales, (rows, in_features // group_size)),
    }


@dataclass(frozen=True)
class Ternary(Scheme):
    """Codes -1, 0, +1 (and +2) times one scale for each group of a row.

    Parameters
    ----------
    levels : {3, 4}
    group_size : {128, 64}
        Weights a scale.
    rotated : bool
        Whether the weights are folded with the model's Hadamard rotation first.
    effort : {"fast", "default", "high"}
        ``high`` refines codes and scales where the second moment of the inputs is known; nothing else has a choice.

    Examples
    --------
    >>> Ternary().misfit((8, 96))
    'rows of 96 are not whole groups of 128'
    """

    levels: int = 3
    group_size: int = 128
    rotated: bool = False
    effort: str = "default"
    name: ClassVar[str] = "ternary"
    layout: ClassVar[str] = TernaryTensor.layout
    limit: ClassVar[float] = 65504.0

    def __post_init__(self) -> None:
        if self.levels not in LEVELS:
            raise RecipeError(f"levels is {self.levels}; 3 and 4 are allowed")
        if self.group_size not in GROUP_SIZES:
            raise RecipeError(f"group_size is {self.group_size}; 128 and 64 are allowed")

    @property
    def label(self) -> str:
        """``ternary g128``, ``4-level g64``, with ``+ hadamard`` where rotated."""
        name = "ternary" if self.levels == 3 else "4-level"
        return f"{name} g{self.group_size}{' + hadamard' if self.rotated else ''}"

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """``codes`` and float16 ``scales``."""
        return ternary_arrays(shape, self.group_size, np.dtype(np.float16))

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Rows must be whole groups."""
        length = matrix_shape(shape)[1]
        return (
            f"rows of {length} are not whole groups of {self.group_size}"
            if length % self.group_size
            else None
        )

    def fallbacks(self) -> tuple[Scheme, ...]:
        """Groups of 64, then 4-bit codebooks, which fit any row."""
        from trapetum.quantize.schemes import KMeans

        smaller = [replace(self, group_size=g) for g in GROUP_SIZES if g < self.group_size]
        return (*smaller, KMeans(16))

    def quantize(
        self,
        weight: NDArray[Any],
        importance: Importance = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> TernaryTensor:
        """Fit every group exactly; ``weight`` is rotated already where the scheme says so."""
        if isinstance(importance, Hessian):
            from trapetum.quantize.ldlq import Rounds, ternary_codes

            codes, scales = ternary_codes(
                np.ascontiguousarray(weight, dtype=np.float32),
                self.group_size,
                self.levels,
                importance.shared(),
                importance.shared_damped() if self.effort == "high" else None,
                Rounds(),
            )
        else:
            from trapetum.quantize.ternary_search import fit_groups

            codes, scales = fit_groups(weight, self.group_size, self.levels, importance)
        return TernaryTensor(codes, scales, self.levels, ROTATION_KEY if self.rotated else None)

    @property
    def rate(self) -> float:
        """Measured on Gaussian rows of 4096."""
        return _RATES[self.levels]


def cost_note(plan: Plan) -> str | None:
    """One sentence on what two bits a weight cost this model, measured on a sample; None where none are planned.

    Parameters
    ----------
    plan : Plan
        Rows at the start of up to eight of its tensors with at most 2.3 bits a weight (ternary ones, and GGUF types
        that are made for ternary models) are quantized twice: as planned, and to 4 bits.
    """
    chosen = [r for r in plan.rows if r.scheme.layout in _FEW_BIT_LAYOUTS and r.bpw <= _FEW_BITS]
    if not chosen:
        return None
    step = -(-len(chosen) // _SAMPLE_TENSORS)
    lost, lost_4bit, norm = (float(v) for v in _sampled(plan, chosen[::step]).sum(axis=0))
    if not norm:
        return None
    ternary, four = lost / norm, lost_4bit / norm
    if ternary == 0:
        return "the sampled weights are ternary already, so nothing is lost; --scheme asis proves it tensor by tensor"
    label = chosen[0].scheme.label
    return (
        f"{label} keeps these weights with a relative squared error of {ternary:.3f} on a sample, 4 bits with "
        f"{four:.4f}, {ternary / four:.0f} times less: a model that was not trained for ternary weights gets much worse"
    )


def _sampled(plan: Plan, rows: Sequence[PlanRow]) -> NDArray[np.float64]:
    """(squared error, squared error at 4 bits, squares) of a few rows of each tensor, float64 [tensors, 3]."""
    from trapetum.quantize.schemes import KMeans

    found = []
    for row in rows:
        count, width = matrix_shape(row.shape)
        few = slice(0, min(count, max(1, _SAMPLE_WEIGHTS // width)))
        values = plan.sampled(row, few, row.scheme.limit)
        plan.source.release(row.name)
        error, squares = _errors(row.scheme, values)
        found.append((error, _errors(KMeans(16), values)[0], squares))
    return np.array(found)


def _errors(scheme: Scheme, values: NDArray[Any]) -> tuple[float, float]:
    result: QuantizedTensor = scheme.quantize(values, wide=scheme.wide(values))
    error, squares = scheme.errors(values, result)
    return float(error.sum()), float(squares.sum())
