"""Parts of a model as the layers want them, wherever a checkpoint stores them.

A part is asked for by name, layer and expert. Fused and stacked tensors are cut by rows (``Architecture.locate``):
every stored layout can be read by rows, so a part of a quantized tensor is as good as a tensor of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError
from trapetum.formats.decoded import rotation_of
from trapetum.models.architectures import Place
from trapetum.runtime.environment import available_memory
from trapetum.runtime.layers import Linear, Norm
from trapetum.runtime.matrix import Matrix, build_matrix

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource
    from trapetum.kernels.cpu.pool import Pool
    from trapetum.models.config import ModelConfig

__all__ = ["Weights"]

Floats = NDArray[np.float32]

_EXPAND_BYTES = 2 << 30


class Weights:
    """Loads parts of a model.

    Parameters
    ----------
    source : TensorSource
        Stays open as long as what is loaded: weights that are not widened are read from its pages.
    config : ModelConfig
    pool : Pool
    precision : str
        See ``runtime.matrix``.
    cache_type : str
        How attention keeps keys and values: see ``runtime.attention``.

    Attributes
    ----------
    names : dict of Role to str
    expand : bool
        Whether dense matrices are widened to float32.
    """

    def __init__(
        self, source: TensorSource, config: ModelConfig, pool: Pool, precision: str, cache_type: str = "f32"
    ) -> None:
        self.source, self.config, self.pool, self.precision = source, config, pool, precision
        self.cache_type = cache_type
        self.names = config.architecture.index(source.names())
        sizes = {name: math.prod(source.shape(name)) for name in self.names.values()}
        wide = 4 * sum(size for name, size in sizes.items() if source.layout(name) in ("dense", "float8"))
        self.expand = wide <= _EXPAND_BYTES
        codes = sum(size for name, size in sizes.items() if source.layout(name) == "codebook")
        self._expand_codes = 3 * codes <= available_memory() // 2

    def find(
        self, part: str, layer: int | None = None, *, expert: int | None = None, bias: bool = False
    ) -> Place | None:
        """Where a part is; None where the checkpoint has none."""
        arch = self.config.architecture
        return arch.locate(self.config, self.names, part, layer, expert=expert, bias=bias)

    def place(self, part: str, layer: int | None = None, *, expert: int | None = None) -> Place:
        """Where a part is.

        Raises
        ------
        CheckpointError
            If the checkpoint has none.
        """
        place = self.find(part, layer, expert=expert)
        if place is None:
            where = "" if layer is None else f" of layer {layer}"
            raise CheckpointError(f"{self.source.path}: the part {part}{where} is missing")
        return place

    def matrix(self, part: str, layer: int | None = None, *, expert: int | None = None) -> Matrix:
        """A matrix in the form that multiplies."""
        place = self.place(part, layer, expert=expert)
        load = getattr(self.source, "compact", self.source.load)  # of packed sources
        matrix = build_matrix(
            load(place.name, place.rows),
            self.pool,
            expand=self.expand,
            precision=self.precision,
            expand_codes=self._expand_codes,
        )
        if self.expand:
            self.source.release(place.name, place.rows)
        return matrix

    def bias(self, part: str, layer: int | None = None, *, expert: int | None = None) -> Floats | None:
        """The bias of a part, where there is one."""
        place = self.find(part, layer, expert=expert, bias=True)
        return None if place is None else self._values(place)

    def linear(self, part: str, layer: int | None = None, *, expert: int | None = None) -> Linear:
        """A matrix with its bias, where there is one."""
        name = self.place(part, layer, expert=expert).name
        bias = self.bias(part, layer, expert=expert)
        return Linear(self.matrix(part, layer, expert=expert), bias, rotation_of(self.source, name))

    def vector(self, part: str, layer: int | None = None) -> Floats:
        """A small parameter, float32, flat."""
        return self._values(self.place(part, layer))

    def norm(self, part: str, layer: int | None = None) -> Norm:
        """A norm; its weight is what multiplies."""
        place = self.place(part, layer)
        weight = self._values(place)
        if place.module.offset:
            weight = weight + np.float32(place.module.offset)
        if part == "final_norm" and self.config.logit_scale != 1.0:
            weight = weight * np.float32(self.config.logit_scale)
        return Norm(weight, self.config.rms_norm_eps)

    def norm_if_any(self, part: str, layer: int | None = None) -> Norm | None:
        """A norm that only some families have."""
        return None if self.find(part, layer) is None else self.norm(part, layer)

    def _values(self, place: Place) -> Floats:
        width = self.source.shape(place.name)[-1:]
        if place.rows is not None and place.module.stacked and width:  # the biases of one expert, not of all
            first, last = (at // width[0] for at in (place.rows.start, place.rows.stop - 1))
            values = self.source.load(place.name, slice(first, last + 1)).dequantize().reshape(-1)
            return values[place.rows.start - first * width[0] : place.rows.stop - first * width[0]]
        values = self.source.load(place.name).dequantize().reshape(-1)
        return values if place.rows is None else values[place.rows]
