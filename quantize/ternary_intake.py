"""Taking over weights that are ternary already: detection for each tensor, codes without loss, and the proof.

A checkpoint of a ternary model often comes unpacked, as bfloat16 values {-s, 0, +s} with one s for a whole row (BitNet,
TriLM) or for each group of 128 or 64. Fitting such weights anew would find the same codes; here nothing is fitted. The
survey looks at every group, the widest candidate first; a tensor that fails any group of every candidate is kept as it
is. Groups that hold +2s (or -2s) beside {-s, 0, +s} take the fourth code.

Packed checkpoints (``formats.packed_ternary``) are decoded by their own formula and go the same way: the proof compares
the codes that are stored with the values that the source's format gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trapetum.quantize.scheme import Arrays, Importance, Scheme
from trapetum.quantize.ternary import ternary_arrays
from trapetum.tensors import DenseTensor, QuantizedTensor, TernaryTensor

__all__ = ["AsIs", "Recognition", "TernaryAsIs", "add_proofs", "proof_text", "recognise"]

_GROUPS = (128, 64)  # after the whole row


@dataclass(frozen=True)
class AsIs(Scheme):
    """A request: take the tensor over as it is. The survey replaces it by what it finds."""

    name: ClassVar[str] = "asis"
    layout: ClassVar[str] = DenseTensor.layout

    @property
    def label(self) -> str:
        """``asis``."""
        return self.name

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """At most what is stored now."""
        return {"": (np.dtype(dtype), tuple(shape))}

    @property
    def rate(self) -> float:
        """Bound by reading and writing."""
        return 300e6


@dataclass(frozen=True)
class TernaryAsIs(Scheme):
    """Codes and scales of weights that are ternary, exactly.

    Parameters
    ----------
    group_size : int
        Weights a scale; a whole row where it has one scale.
    levels : {3, 4}
    """

    group_size: int
    levels: int = 3
    name: ClassVar[str] = "asis-ternary"
    layout: ClassVar[str] = TernaryTensor.layout

    @property
    def label(self) -> str:
        """``asis ternary g128``."""
        return f"asis {'ternary' if self.levels == 3 else '4-level'} g{self.group_size}"

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """``codes`` and ``scales``, float32 where float16 does not hold one of them."""
        return ternary_arrays(shape, self.group_size, np.dtype(np.float32 if wide else np.float16))

    def quantize(
        self,
        weight: NDArray[Any],
        importance: Importance = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> TernaryTensor:
        """Take the values apart.

        Raises
        ------
        ValueError
            If they are not ternary: the survey looked at other bytes.
        """
        codes, scales, counts = _split(weight, self.group_size)
        if counts is None:
            raise ValueError(
                "the weights changed while the job ran: a group that was ternary is not any more"
            )
        return TernaryTensor(codes, scales.astype(np.float32 if wide else np.float16), self.levels)

    def proof(self, weight: NDArray[Any], result: QuantizedTensor) -> Mapping[str, int | float]:
        """Counted from the stored codes, and the largest difference from ``weight``, which must be 0."""
        if not isinstance(result, TernaryTensor):
            raise TypeError(f"a ternary tensor is proved, not {type(result).__name__}")
        by_group = result.codes.reshape(*result.scales.shape, -1)
        empty = int((by_group == 1).all(axis=2).sum())
        values = result.dequantize(slice(None)).astype(np.float64)
        exact = result.scales.astype(np.float16, copy=False).astype(np.float32) == result.scales
        difference = float(np.max(np.abs(values - weight.astype(np.float64)), initial=0.0))
        if difference != 0:
            raise ValueError(f"codes and scales differ from the weights by {difference:g}")
        return {
            "groups": result.scales.size,
            "single_magnitude_groups": result.scales.size - empty - int((by_group == 3).any(axis=2).sum()),
            "zero_groups": empty,
            "code_3": int(np.count_nonzero(result.codes == 3)),
            "scales_exact_in_float16": int(np.count_nonzero(exact)),
            "max_difference": difference,
        }

    @property
    def rate(self) -> float:
        """Measured on rows of 4096."""
        return 25e6


@dataclass
class Recognition:
    """What the row blocks of one tensor say about being ternary, added up.

    Attributes
    ----------
    groups : dict of int to (levels, float32)
        Group sizes that every block allows, the widest first, with the levels and whether a scale needs float32.
    blocks : int
    """

    groups: dict[int, tuple[int, bool]] = field(default_factory=dict)
    blocks: int = 0

    def add(self, other: Recognition) -> None:
        """Take in another block."""
        if self.blocks:
            both = [g for g in self.groups if g in other.groups]
            self.groups = {
                g: (max(self.groups[g][0], other.groups[g][0]), self.groups[g][1] or other.groups[g][1])
                for g in both
            }
        else:
            self.groups = dict(other.groups)
        self.blocks += other.blocks

    def settle(self, shape: tuple[int, ...], nbytes: int) -> tuple[TernaryAsIs, bool] | None:
        """The scheme (and its ``wide``) that stores the tensor in less than ``nbytes``; None where there is none."""
        for group, (levels, wide) in self.groups.items():
            scheme = TernaryAsIs(group, levels)
            arrays = scheme.arrays(shape, np.dtype(np.float32), wide).values()
            if sum(int(np.prod(s)) * d.itemsize for d, s in arrays) < nbytes:
                return scheme, wide
        return None


def recognise(values: NDArray[Any]) -> Recognition:
    """Which groupings make these rows ternary.

    Parameters
    ----------
    values : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
        All finite.

    Examples
    --------
    >>> row = np.array([[0.5, 0, -0.5, 0.5], [0, 0.25, 0.25, 0]], np.float32)
    >>> recognise(row).groups
    {4: (3, False)}
    """
    length = values.shape[1]
    found = {}
    for group in (length, *(g for g in _GROUPS if g < length and length % g == 0)):
        _, scales, counts = _split(values, group)
        if counts is not None:
            with np.errstate(over="ignore"):
                inexact = bool((scales.astype(np.float16).astype(np.float32) != scales).any())
            found[group] = (4 if counts[1] else 3, inexact)
    return Recognition(found, 1)


def _split(
    weight: NDArray[Any], group: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32], tuple[int, int] | None]:
    """Codes, scales and (zero groups, codes 3); None for the counts where a group is not ternary."""
    from trapetum.kernels.cpu.ternary_split import split_groups

    rows, columns = weight.shape
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((rows, columns // group), np.float32)
    zero, threes = split_groups(np.ascontiguousarray(weight, dtype=np.float32), group, codes, scales)
    return codes, scales, None if zero < 0 else (int(zero), int(threes))


def add_proofs(blocks: Sequence[Mapping[str, int | float]]) -> dict[str, int | float]:
    """The proof of a tensor from those of its row blocks: counts add up, ``max_`` keys are maxima."""
    return {k: (max if k.startswith("max_") else sum)(b[k] for b in blocks) for k in blocks[0]}


def proof_text(proof: Mapping[str, int | float]) -> str:
    """A proof in words."""
    exact, groups = proof["scales_exact_in_float16"], proof["groups"]
    return (
        f"{groups:,} groups checked, {proof['single_magnitude_groups']:,} with one magnitude, "
        f"{proof['zero_groups']:,} zero, {proof['code_3']:,} codes 3, largest difference {proof['max_difference']:g}, "
        f"{'all' if exact == groups else f'{exact:,} of {groups:,}'} scales exact in float16"
    )
