"""The same model in another basis of its residual stream: outliers spread over all channels, for any stock engine.

A norm without a mean (RMSNorm) commutes with every orthogonal Q once its gain is moved into the layers that read it, so
the residual stream x may be carried as Q x, and nothing is left to do at run time. With s signs, H the Walsh-Hadamard
matrix of blocks of a power of two, ``Q = H diag(s)``, g the gain that a layer's input is multiplied by, and R the like
inside one attention head:

====================================  ====================================  =======================================
tensor                                becomes                               why
====================================  ====================================  =======================================
embedding row e                       Q e                                   begins the stream
q, k, gate, up, router, head row w    Q (g * w)                             reads the stream behind a norm
v                                     R (Q (g * w))                         the same; and R inside each head
o                                     Q W R^T                               undoes R, writes to the stream
down                                  Q W                                   writes to the stream
bias of o and down                    Q b                                   added to the stream
bias of v                             R b
norm in front of a block, final norm  1 everywhere                          its gain is in the layers behind it
tied head                             a tensor of its own, Q (g * e)        the embedding has no gain
====================================  ====================================  =======================================

Norms of queries and keys, rotary embeddings and everything else inside a block see what they saw before. A norm behind
a block (Gemma 2 and 3, OLMo 2) multiplies what is added to the stream by a gain that does not commute with Q: such
models are refused, and so is every family whose blocks are not plain attention.

Turned tensors are float32, computed in float64 and rounded after each of at most two turns. Rows of a
layer that writes mix with those of their block of Q, at most :data:`LARGEST`, so they are read by whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import UnsupportedModelError
from trapetum.formats.view import CheckpointView
from trapetum.models.architectures import with_tied
from trapetum.models.config import parse_config
from trapetum.models.modules import Module, Role
from trapetum.rotation import HadamardRotation, random_signs
from trapetum.tensors import DenseTensor, matrix_shape

if TYPE_CHECKING:
    from trapetum.formats.packed_ternary import AnyCheckpoint
    from trapetum.models.architecture import Architecture
    from trapetum.models.config import ModelConfig

__all__ = ["LARGEST", "RotatedCheckpoint"]

LARGEST = 1024
"""Most channels that one block of Q mixes."""

_SMALLEST = 8
_COLUMNS = 256  # of a block of rows turned at a time: 2 MiB in float64
_NORMS = ("attn_norm", "ffn_norm", "final_norm")
_ATTENTION = ("q", "k", "v", "qkv")
_FEED_FORWARD = ("gate", "up", "gate_up", "router")
_FLOAT32: np.dtype[Any] = np.dtype(np.float32)

Values: TypeAlias = NDArray[Any]


class RotatedCheckpoint(CheckpointView["AnyCheckpoint"]):
    """A checkpoint read in another basis; logits are the same but for rounding.

    Parameters
    ----------
    inner : Checkpoint, PackedCheckpoint or GgufCheckpoint
        Closed with this.
    architecture : Architecture
    seed : int
        Of the signs.

    Raises
    ------
    UnsupportedModelError
        If something in the architecture does not commute with the rotation.
    """

    def __init__(self, inner: AnyCheckpoint, architecture: Architecture, seed: int) -> None:
        super().__init__(inner)
        config = parse_config(inner.config)
        self.architecture = architecture.settled(inner.names())
        _require_plain(inner.path, self.architecture, config)
        self.config = with_tied(inner.config, tied=False)
        roles = self.architecture.index(inner.names())
        self._names: Mapping[Role, str] = roles
        self._head = self.architecture.tensor_name("head") if Role("head", part="head") not in roles else None
        self._stream = _rotation(f"residual {seed}", config.hidden_size, config.hidden_size)
        self._heads = _head_rotation(self.architecture, config, seed)
        turned = "values inside each head" if self._heads else "no values"
        self.notes.append(
            f"residual rotation: blocks of {self._stream.block_size} of {config.hidden_size} channels, {turned}; "
            "gains are in the layers behind them, the head is a tensor of its own"
        )

    def names(self) -> list[str]:
        """As the source's, and a head where it has none."""
        return [*self.inner.names(), *([self._head] if self._head else [])]

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self.inner.shape(self._source_name(name))

    def dtype(self, name: str) -> np.dtype[Any]:
        """float32 of what is turned."""
        return _FLOAT32 if self._turn(name) else self.inner.dtype(self._source_name(name))

    def file(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self.inner.file(self._source_name(name))

    def load(self, name: str, rows: slice | None = None) -> DenseTensor:
        """A tensor, or some rows of its matrix form, in the new basis."""
        turn = self._turn(name)
        if turn is None:
            role = self.architecture.role(name)
            found = self.inner.load(self._source_name(name), rows)
            values = (
                found.values
                if isinstance(found, DenseTensor)
                else found.dequantize(slice(None) if rows else None)
            )
            if role.kind == "norm" and role.part in _NORMS:
                offset = self.architecture.module(role.part).offset
                values = np.full_like(values, 1.0 - offset)
            return DenseTensor(values)
        shape = self.shape(name)
        start, stop, _ = (rows or slice(None)).indices(matrix_shape(shape)[0])
        values = turn(slice(start, max(start, stop)))
        return DenseTensor(values if rows is not None else values.reshape(shape))

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop mapped pages: those of the whole tensor, for rows mix."""
        self.inner.release(self._source_name(name))

    def packed_format(self) -> str | None:
        """Of the source."""
        return self.inner.packed_format()

    def _source_name(self, name: str) -> str:
        return self._names[Role("embed", part="embed")] if name == self._head else name

    def _turn(self, name: str) -> Callable[[slice], Values] | None:
        """What computes rows of a tensor in the new basis; None where it stays as it is."""
        role = self.architecture.role(name)
        if role.kind == "bias":
            return self._turn_bias(name, role)
        if role.kind == "norm" or role.part not in {m.part for m in self.architecture.modules}:
            return None
        module = self.architecture.module(role.part)
        if module.kind == "embed":
            return lambda rows: self._stream.fold(self._values(name, rows))
        if module.shape[-1] == "hidden":
            gain = self._gain(module, role.layer)
            if module.part == "v" and self._heads:
                heads = self._heads

                def turn(rows: slice) -> Values:
                    def read(part: slice) -> Values:
                        return self._stream.fold(self._values(name, part) * gain)

                    return _outputs(heads, read, rows, *self.shape(name))

                return turn
            return lambda rows: self._stream.fold(self._values(name, rows) * gain)
        if module.shape[-2:-1] == ("hidden",):
            inside = self._heads if module.part == "o" else None

            def read(rows: slice) -> Values:
                values = self._values(name, rows)
                return values if inside is None else inside.fold(values)

            return lambda rows: _outputs(self._stream, read, rows, *matrix_shape(self.shape(name)))
        return None

    def _turn_bias(self, name: str, role: Role) -> Callable[[slice], Values] | None:
        module = self.architecture.module(role.part)
        if module.shape[-2] == "hidden":
            return lambda rows: self._stream.fold(self._values(name, rows))
        if module.part == "v" and self._heads:
            heads = self._heads
            return lambda rows: heads.fold(self._values(name, rows))
        return None

    def _values(self, name: str, rows: slice) -> NDArray[np.float64]:
        found = self.inner.load(self._source_name(name), rows)
        values = found.values if isinstance(found, DenseTensor) else found.dequantize(slice(None))
        return values.astype(np.float64)

    def _gain(self, module: Module, layer: int | None) -> NDArray[np.float64]:
        """What the input of a layer is multiplied by: the gain of the norm in front of it."""
        part = _norm_before(module)
        stored = self.inner.load(self._names[Role("norm", layer, part=part)]).dequantize().reshape(-1)
        gain: NDArray[np.float64] = stored.astype(np.float64) + self.architecture.module(part).offset
        return gain


def _norm_before(module: Module) -> str:
    if module.part == "head":
        return "final_norm"
    return "attn_norm" if module.kind in _ATTENTION else "ffn_norm"


def _require_plain(path: Path, architecture: Architecture, config: ModelConfig) -> None:
    """Refuse by name what the table of this module does not cover."""
    parts = {m.part for m in architecture.modules}
    if architecture.any_architecture or not set(_NORMS) <= parts:
        raise UnsupportedModelError(
            f"{path}: rotate residual: architecture {architecture.model_type} has no norm in front of each block that "
            "is known to be the only one",
            hint="Leave --rotate out.",
        )
    mixers = {architecture.blocks(config, layer)[0] for layer in range(config.num_hidden_layers)}
    faults = [f"{m} blocks" for m in sorted(mixers - {"attention"})]
    known = (*_ATTENTION, *_FEED_FORWARD, "embed", "head", "o", "down")
    for m in architecture.modules:
        if "hidden" not in m.shape:
            continue
        if m.kind == "norm" and m.part not in _NORMS:
            faults.append(f"{m.part}, a norm behind a block")
        elif m.kind not in (*known, "norm"):
            faults.append(f"{m.part}, a {m.kind} that reads or writes the stream")
    if faults:
        raise UnsupportedModelError(
            f"{path}: rotate residual: architecture {architecture.model_type} does not commute with a rotation of its "
            f"residual stream: {', '.join(faults)}",
            hint="Leave --rotate out; --hadamard turns single layers of a few families instead.",
        )
    if config.hidden_size & -config.hidden_size < _SMALLEST:
        raise UnsupportedModelError(
            f"{path}: rotate residual: {config.hidden_size} channels are no whole blocks of {_SMALLEST}",
            hint="Leave --rotate out.",
        )


def _rotation(text: str, period: int, *widths: int) -> HadamardRotation:
    """A rotation of blocks inside ``period`` channels, repeated over each of ``widths``."""
    block = min(LARGEST, period & -period)
    signs = random_signs(text, period)
    return HadamardRotation(block, {w: np.tile(signs, w // period) for w in widths})


def _head_rotation(architecture: Architecture, config: ModelConfig, seed: int) -> HadamardRotation | None:
    """The rotation inside heads, where v and o are tensors of their own and nothing is between them."""
    shapes = {m.part: m.shape for m in architecture.modules}
    plain = shapes.get("v") == ("key_value", "hidden") and shapes.get("o") == ("hidden", "query")
    size = config.head_dim
    if not plain or shapes.get("q") != ("query", "hidden") or size & -size < _SMALLEST:
        return None
    return _rotation(f"head {seed}", size, config.size("query"), config.size("key_value"))


def _outputs(
    rotation: HadamardRotation, read: Callable[[slice], Values], rows: slice, height: int, width: int
) -> NDArray[np.float32]:
    """Rows of ``Q W``: each is a sum over the rows of its block.

    Parameters
    ----------
    rotation : HadamardRotation
    read : callable
        Rows of W.
    rows : slice
    height, width : int
        Of W; a stack of matrices counts as one, for blocks do not cross their borders.
    """
    block = rotation.block_size
    period = next(w for w in rotation.signs if height % w == 0)
    signs = np.tile(rotation.signs[period], height // period)
    pieces = HadamardRotation(block, {block: np.ones(block, np.int8)})
    found = np.empty((rows.stop - rows.start, width), np.float32)
    for first in range(rows.start // block * block, rows.stop, block):
        whole = slice(first, first + block)
        values = read(whole) * signs[whole, None]
        low, high = max(first, rows.start), min(first + block, rows.stop)
        for column in range(0, width, _COLUMNS):
            turned = pieces.fold(np.ascontiguousarray(values[:, column : column + _COLUMNS].T))
            found[low - rows.start : high - rows.start, column : column + _COLUMNS] = turned.T[
                low - first : high - first
            ]
    return found
