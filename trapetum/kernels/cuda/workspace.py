"""Scratch memory of the kernels of one stream: partial sums, arrival counters, quantized activations.

Grown while layers are made and first used, never while a graph is captured: buffers are kept until the workspace goes,
so that graphs that hold their addresses stay valid.
"""

from __future__ import annotations

from typing import Any

from trapetum.kernels.cuda.module import import_cupy

__all__ = ["Workspace"]


class Workspace:
    """Buffers that launches on one stream share.

    Attributes
    ----------
    partial : cupy.ndarray of float32
        Sums of tiles that several blocks share.
    arrived : cupy.ndarray of uint32
        Blocks that have left theirs; zero between launches.
    """

    def __init__(self) -> None:
        cupy = import_cupy()
        self._kept: list[Any] = []
        self.partial = cupy.empty(1 << 16, cupy.float32)
        self.arrived = cupy.zeros(1 << 12, cupy.uint32)
        self._codes = cupy.empty(0, cupy.int8)
        self._groups = cupy.empty(0, cupy.uint64)
        self._dense = cupy.empty(0, cupy.uint16)

    def reserve_partial(self, count: int) -> None:
        """At least so many partial sums."""
        if count > self.partial.size:
            self.partial = self._grown(self.partial, count)

    def reserve_tiles(self, count: int) -> None:
        """At least so many counters, all zero."""
        if count > self.arrived.size:
            self.arrived = self._grown(self.arrived, count)

    def activations(self, tokens: int, in_features: int) -> tuple[Any, Any]:
        """Buffers for quantized activations: a byte an input, and 8 bytes for each group of 128."""
        if tokens * in_features > self._codes.size:
            self._codes = self._grown(self._codes, tokens * in_features)
        if tokens * in_features // 128 > self._groups.size:
            self._groups = self._grown(self._groups, tokens * in_features // 128)
        return self._codes, self._groups

    def dense(self, count: int) -> Any:
        """A buffer for so many decoded weights of 16 bits."""
        if count > self._dense.size:
            self._dense = self._grown(self._dense, count)
        return self._dense

    def _grown(self, buffer: Any, count: int) -> Any:
        self._kept.append(buffer)
        return import_cupy().zeros(count, buffer.dtype)
