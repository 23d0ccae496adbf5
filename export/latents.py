"""Views of a DeepSeek model with ``kv_b_proj`` in halves (what a GGUF has) or whole (what a checkpoint has).

The halves are, for each head, its key rows transposed (``k_b_proj`` [heads, kv_lora, nope]) and its value rows
(``v_b_proj`` [heads, value, kv_lora]). A transpose mixes rows, so what is made here is decoded: float16 where that is
exact (codebooks are), else float32 or what was kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.export.stacks import StackedExperts
from trapetum.formats.artifact import Artifact
from trapetum.formats.decoded import decoded, rotation_of
from trapetum.formats.source import TensorSource
from trapetum.formats.view import SourceView
from trapetum.models.config import ModelConfig
from trapetum.models.deepseek import LATENT, LatentOptions
from trapetum.rotation import HadamardRotation
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor, matrix_shape

__all__ = ["LatentView", "joined_latents", "split_latents"]


@dataclass(frozen=True)
class _Record:
    """What an artifact would say of a tensor that is made here."""

    shape: tuple[int, ...]
    nbytes: int
    relative_error: float | None
    layout: str = DenseTensor.layout

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


class LatentView(SourceView[TensorSource], ABC):
    """A source in which some tensors are made of others; implements ``TensorSource``.

    Parameters
    ----------
    source : TensorSource
    options : LatentOptions
    made : mapping of str to tuple of str
        New name -> the tensors that it is made of, which are hidden.

    Attributes
    ----------
    records : dict
        Of an artifact, by the names here.
    """

    def __init__(
        self, source: TensorSource, options: LatentOptions, made: dict[str, tuple[str, ...]]
    ) -> None:
        super().__init__(source)
        self.options, self.made = options, made
        self._hidden = {origin for origins in made.values() for origin in origins}
        self.records: dict[str, Any] = (
            dict(source.records) if isinstance(source, Artifact | StackedExperts) else {}
        )
        for name, origins in made.items():
            known = [self.records[o] for o in origins if o in self.records]
            if len(known) == len(origins):
                share = math.prod(self.shape(name)) / sum(math.prod(source.shape(o)) for o in origins)
                size, errors = sum(r.nbytes for r in known), [r.relative_error for r in known]
                self.records[name] = _Record(self.shape(name), round(size * share), errors[0])

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a made tensor."""

    @abstractmethod
    def _block(self, name: str, head: int) -> NDArray[Any]:
        """The rows of one head of a made tensor."""

    def names(self) -> list[str]:
        """The source's but for what is hidden, then what is made."""
        return [*(n for n in self.inner.names() if n not in self._hidden), *self.made]

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._shape(name) if name in self.made else self.inner.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; of a made tensor, the narrowest that holds it."""
        if name not in self.made:
            return self.inner.dtype(name)
        found = {self._narrowest(origin) for origin in self.made[name]}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)

    def _narrowest(self, origin: str) -> np.dtype[Any]:
        if self.inner.layout(origin) == DenseTensor.layout:
            return self.inner.dtype(origin)
        first = self.inner.load(origin, slice(0, 1))
        exact = isinstance(first, CodebookTensor) and first.codebook.dtype == np.float16
        return np.dtype(np.float16 if exact and rotation_of(self.inner, origin) is None else np.float32)

    def layout(self, name: str) -> str:
        """``dense`` of what is made."""
        return DenseTensor.layout if name in self.made else self.inner.layout(name)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some rows of its matrix form."""
        if name not in self.made:
            return self.inner.load(name, rows)
        shape, dtype = self.shape(name), self.dtype(name)
        count = matrix_shape(shape)[0]
        per_head = count // self.options.heads
        start, stop, _ = (rows or slice(None)).indices(count)
        parts = [np.empty((0, shape[-1]), dtype)]
        for head in range(start // per_head, -(-stop // per_head)):
            first, last = max(start - head * per_head, 0), min(stop - head * per_head, per_head)
            parts.append(self._block(name, head)[first:last].astype(dtype))
        joined = np.concatenate(parts)
        return DenseTensor(joined if rows is not None else joined.reshape(shape))

    def _values(self, origin: str, rows: slice) -> NDArray[Any]:
        tensor = self.inner.load(origin, rows)
        return tensor.values if isinstance(tensor, DenseTensor) else decoded(self.inner, origin, rows)

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into a tensor; what is made has none left."""
        return None if name in self.made else rotation_of(self.inner, name)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor."""
        for origin in self.made.get(name, ()):
            self.inner.release(origin)
        if name not in self.made:
            self.inner.release(name, rows)


class _Split(LatentView):
    """``k_b_proj`` and ``v_b_proj`` in place of ``kv_b_proj``."""

    def _shape(self, name: str) -> tuple[int, ...]:
        o = self.options
        return (o.heads, o.kv_lora, o.nope) if "k_b_proj" in name else (o.heads, o.value, o.kv_lora)

    def _block(self, name: str, head: int) -> NDArray[Any]:
        o, (whole,) = self.options, self.made[name]
        at = head * (o.nope + o.value)
        if "k_b_proj" in name:
            return self._values(whole, slice(at, at + o.nope)).T
        return self._values(whole, slice(at + o.nope, at + o.nope + o.value))


class _Joined(LatentView):
    """``kv_b_proj`` in place of its halves."""

    def _shape(self, name: str) -> tuple[int, ...]:
        o = self.options
        return o.heads * (o.nope + o.value), o.kv_lora

    def _block(self, name: str, head: int) -> NDArray[Any]:
        o, (keys, values) = self.options, self.made[name]
        above = self._values(keys, slice(head * o.kv_lora, (head + 1) * o.kv_lora)).T
        return np.concatenate([above, self._values(values, slice(head * o.value, (head + 1) * o.value))])


def split_latents(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The same model with the halves; the source itself where it has them, or no latents."""
    options = config.sections.get(LATENT)
    if not isinstance(options, LatentOptions):
        return source
    arch = config.architecture
    made: dict[str, tuple[str, ...]] = {}
    names = arch.index(source.names())
    for layer in range(config.num_hidden_layers):
        if (place := arch.locate(config, names, "kv_b", layer)) is not None:
            made |= {arch.tensor_name(part, layer): (place.name,) for part in ("k_b", "v_b")}
    return _Split(source, options, made) if made else source


def joined_latents(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The same model with ``kv_b_proj`` whole; the source itself where it is, or has no latents."""
    options = config.sections.get(LATENT)
    if not isinstance(options, LatentOptions):
        return source
    arch = config.architecture
    made: dict[str, tuple[str, ...]] = {}
    names = arch.index(source.names())
    for layer in range(config.num_hidden_layers):
        halves = [arch.locate(config, names, part, layer) for part in ("k_b", "v_b")]
        found = tuple(place.name for place in halves if place is not None)
        if len(found) == len(halves):
            made[arch.tensor_name("kv_b", layer)] = found
    return _Joined(source, options, made) if made else source
