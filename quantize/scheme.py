"""What a scheme is: the protocol from which recipe, plan, job and artifact work.

A *scheme* names a search and its parameters; a *layout* (``trapetum.tensors``) names how its result is stored. The
table of schemes is ``quantize.schemes``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trapetum.quantize.hessian import Hessian
from trapetum.tensors import QuantizedTensor

__all__ = ["EFFORTS", "Arrays", "Effort", "Importance", "Scheme"]

Effort = Literal["fast", "default", "high"]
EFFORTS: tuple[str, ...] = get_args(Effort)
"""How near to the best result a search goes."""

Arrays = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Stored arrays: suffix -> (dtype, shape)."""

Importance = Hessian | NDArray[np.float32] | None
"""What is known of a tensor's inputs: their second moment, the mean square of each, or nothing."""


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
        True where any block of rows gives the same bytes as the whole tensor: the job works by row blocks. Where it
        is False, that is true of what :meth:`fit` returns.
    limit : float
        Largest magnitude of a weight that can be stored; a tensor beyond it is refused before any work.
    """

    name: ClassVar[str]
    layout: ClassVar[str]
    row_independent: ClassVar[bool] = True
    limit: ClassVar[float] = math.inf

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name for tables, such as ``kmeans K=16``."""

    def spec(self) -> dict[str, Any]:
        """The scheme as JSON values: stored in the artifact, compared when a job resumes."""
        return {"name": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}

    @abstractmethod
    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
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

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Why a tensor of this shape cannot be stored so, as in ``rows of 96 are not whole groups of 128``; or None."""
        return None

    def fallbacks(self) -> tuple[Scheme, ...]:
        """What a tensor takes, first fit first, where this scheme does not fit and the recipe names nothing else."""
        return ()

    def wide(self, block: NDArray[Any]) -> bool:
        """Whether these rows need the wide variant of the layout; the job ORs the answers over a tensor's blocks.

        Parameters
        ----------
        block : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
        """
        return False

    def fit(
        self, rows: int, read: Callable[[slice], NDArray[Any]], seed: int, importance: Importance = None
    ) -> Scheme:
        """What the rows of one tensor share is settled, from a sample of them; the scheme itself by default.

        Parameters
        ----------
        rows : int
            Rows of the tensor's matrix form.
        read : callable
            A row block: bfloat16, float16 or float32 [rows, in_features].
        seed : int
            Seed of this tensor.
        importance : Hessian, or ndarray of float32, shape (in_features,), optional
            As for :meth:`quantize`.

        Returns
        -------
        Scheme
            ``row_independent``; its :meth:`quantize` is asked for every row block.
        """
        return self

    def quantize(
        self,
        weight: NDArray[Any],
        importance: Importance = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> QuantizedTensor:
        """Quantize rows.

        Schemes that take over what a source stores do not have this: ``Plan.taken`` gives their arrays.

        Parameters
        ----------
        weight : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
        importance : Hessian, or ndarray of float32, shape (in_features,), optional
            The second moment of the inputs, or the weight of each input in the squared error.
        wide : bool
            The tensor's answer of :meth:`wide`.
        seed : int
            Seed of this tensor; schemes without randomness ignore it.

        Returns
        -------
        QuantizedTensor of shape (rows, in_features)
        """
        raise TypeError(f"{self.label} takes over what the source stores: no values are quantized")

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

    def proof(self, weight: NDArray[Any], result: QuantizedTensor) -> Mapping[str, int | float] | None:
        """Counts that show that nothing was lost, for schemes that promise it; see ``ternary_intake.add_proofs``."""
        return None

    @property
    @abstractmethod
    def rate(self) -> float:
        """Weights a second that one reference core does (see ``estimate``), for the prediction of time."""
