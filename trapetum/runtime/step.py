"""One token through the whole model as one program of kernels (``kernels.cpu.program``).

The general forward pass is Python between products: some 60 us a product, which is most of the time of a small model
and a fifth of that of a model of 300 M weights. A :class:`Step` writes down once, for one cache, every call that a
token needs, with the addresses of weights and of buffers; then a token is one call for each thread, which allocates
nothing. What a step cannot do (see :func:`build_step`) goes the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import activations, blocks, codebook16, codebook_table, dense, layer, ternary
from trapetum.kernels.cpu.activations import BYTE_LIMIT, GROUP, WORD_LIMIT, padded
from trapetum.kernels.cpu.prepared import Blocks, Codebook16, Dense, Expanded, Prepared, Table, Ternary
from trapetum.kernels.cpu.program import callback, run
from trapetum.runtime.attention import Cache
from trapetum.runtime.layers import Attention, GatedMlp, Layer, Linear, Norm, Rotary
from trapetum.runtime.matrix import PreparedMatrix

if TYPE_CHECKING:
    from trapetum.runtime.model import Model

__all__ = ["Step", "build_step"]

Floats = NDArray[np.float32]

_SERIAL_WEIGHTS = 1 << 18  # a product of so many takes some 25 us: not worth waiting for another thread
_TILE_WEIGHTS = 1 << 16


def build_step(model: Model, cache: Cache) -> Step | None:
    """The step of a model that continues a cache of one sequence; None where there is none.

    There is one for fused matrices of the layouts in ``_PRODUCTS``, without rotations, with heads and widths that are
    multiples of 8. The cache must not grow.
    """
    linears: list[Linear] = [model.head]
    ropes = set(model.config.ropes)
    if (
        model.head.softcap is not None
        or len(ropes) != 1
        or any(r is None or r.regime(1 << 60) for r in ropes)
    ):
        return None
    for one in model.layers:
        parts = _plain(one)
        if parts is None:
            return None
        mixer, ffn = parts
        linears += [mixer.q, mixer.k, mixer.v, mixer.o, ffn.gate, ffn.up, ffn.down]
    for linear in linears:
        matrix = linear.matrix
        if linear.rotation is not None or not isinstance(matrix, PreparedMatrix) or not matrix.fused:
            return None
        if type(matrix.prepared) not in _PRODUCTS or matrix.in_features % 8:
            return None
        if isinstance(matrix.prepared, Ternary):
            ternary_ok = not matrix.prepared.precise and matrix.prepared.scales.dtype == np.uint16
            if not ternary_ok:
                return None
    if model.config.head_dim % 16 or model.config.rotary_dim != model.config.head_dim:
        return None
    return Step(model, cache)


def _plain(one: Layer) -> tuple[Attention, GatedMlp] | None:
    """The blocks of a layer that has nothing which the kernels do not know."""
    mixer, ffn = one.mixer, one.ffn
    if not isinstance(mixer, Attention) or not isinstance(ffn, GatedMlp) or ffn.act != "silu":
        return None
    if mixer.cache_type != "f32" or mixer.scale is not None or mixer.softcap is not None or mixer.sinks is not None:
        return None
    if one.attn_norm is None or one.ffn_norm is None or one.attn_post_norm or one.ffn_post_norm:
        return None
    if any(norm is not None and norm.weight.size != mixer.head_dim for norm in (mixer.q_norm, mixer.k_norm)):
        return None
    return mixer, ffn


class Step:
    """See :func:`build_step`.

    Parameters
    ----------
    model : Model
    cache : Cache
        Room for every position to come.
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        self._model, self._cache, self._pool = model, cache, model.pool
        self._program = _Program()
        head_dim = model.config.head_dim
        self._hidden = np.zeros(model.config.hidden_size, np.float32)
        self._cos, self._sin = np.zeros(head_dim // 2, np.float32), np.zeros(head_dim // 2, np.float32)
        self._position = np.zeros(1, np.int64)
        self.logits = np.zeros(model.head.matrix.rows, np.float32)
        for number, one in enumerate(model.layers):
            self._layer(one, number)
        x = self._norm(self._hidden, model.final_norm)
        self._multiply(x, [(model.head, self.logits)])
        self._operations = self._program.table()
        self._counters = np.zeros(len(self._operations) + 1, np.int64)

    def __call__(self, token: int) -> Floats:
        """Append a token to the cache; float32 [vocab_size], valid until the next call."""
        position = self._cache.length
        self._hidden[:] = self._model.embedding(np.array([token]))[0]
        cos, sin = self._rotary(position)
        self._cos[:], self._sin[:], self._position[0] = cos[0, 0], sin[0, 0], position
        self._counters[:] = 0
        threads = self._pool.threads
        self._pool.together(lambda thread: run(self._operations, self._counters, thread, threads))
        self._cache.length += 1
        return self.logits

    def _rotary(self, position: int) -> Rotary:
        """Cosines and sines; every layer has the same."""
        (table,) = (
            t for t in self._model.rotary(position, position + 1, position + 1).values() if t is not None
        )
        return table

    def _layer(self, one: Layer, number: int) -> None:
        program, cache, config = self._program, self._cache, self._model.config
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        mixer, ffn = cast(Attention, one.mixer), cast(GatedMlp, one.ffn)  # build_step saw to it
        x = self._norm(self._hidden, cast(Norm, one.attn_norm))
        projections = (mixer.q, mixer.k, mixer.v)
        q, k, v = (program.buffer(n, linear.matrix.rows) for n, linear in zip("qkv", projections))
        self._multiply(x, list(zip(projections, (q, k, v))))
        for y, norm, count in ((q, mixer.q_norm, heads), (k, mixer.k_norm, kv_heads)):
            if norm is not None:
                self._norm(y, norm, y, count)
            program.add(layer.rotate_step, [y, self._cos, self._sin, count, dim])
        keys, values = cache.states[number].first
        capacity = keys.shape[1]
        for y, store in ((k, keys), (v, values)):
            program.add(layer.append_step, [y, store, kv_heads, dim, capacity, self._position])
        room = -(-capacity // 8) * 8
        scores, mixed = program.buffer("scores", heads * room), program.buffer("mixed", heads * dim)
        arguments = [q, keys, values, scores, mixed, heads, kv_heads, dim, capacity, room]
        program.add(
            layer.attend_step,
            [*arguments, mixer.window or 0, self._position],
            heads,
            1 if capacity > 64 else heads,
        )
        self._residual(mixed, mixer.o)
        x = self._norm(self._hidden, cast(Norm, one.ffn_norm))
        gate, up = (
            program.buffer(n, linear.matrix.rows) for n, linear in (("gate", ffn.gate), ("up", ffn.up))
        )
        self._multiply(x, [(ffn.gate, gate), (ffn.up, up)])
        program.add(layer.gate_step, [gate, up, gate.size], gate.size // 8, 512)
        self._residual(gate, ffn.down)

    def _residual(self, x: Floats, linear: Linear) -> None:
        y = self._program.buffer("residual", linear.matrix.rows)
        self._multiply(x, [(linear, y)])
        self._program.add(layer.add_step, [self._hidden, y, y.size])

    def _norm(self, x: Floats, norm: Norm, out: Floats | None = None, heads: int = 1) -> Floats:
        out = self._program.buffer("normed", x.size) if out is None else out
        weight = np.ascontiguousarray(norm.weight)
        self._program.add(
            layer.norm_step, [x, weight, np.array([norm.eps], np.float64), out, x.size // heads, heads]
        )
        return out

    def _multiply(self, x: Floats, products: Sequence[tuple[Linear, Floats]]) -> None:
        """Products of one input: its forms first, then all matrices side by side, then biases."""
        forms = _Forms(self._program, x)
        calls = []
        for linear, y in products:
            matrix = linear.matrix
            assert isinstance(matrix, PreparedMatrix)  # build_step saw to it
            function, arguments = _PRODUCTS[type(matrix.prepared)](matrix.prepared, forms, y)
            weights = matrix.rows * matrix.in_features
            tile = matrix.rows if weights <= _SERIAL_WEIGHTS else max(8, _TILE_WEIGHTS // matrix.in_features)
            calls.append((function, arguments, matrix.rows, tile))
        self._program.add_side_by_side(calls)
        for linear, y in products:
            if linear.bias is not None:
                self._program.add(layer.add_step, [y, np.ascontiguousarray(linear.bias), y.size])


# ---------------------------------------------------------------------------- the table
class _Program:
    """Collects operations; every array that they name stays alive with it."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._group: list[int] = []  # operations of one number need nothing of each other
        self._alive: list[Any] = []
        self._buffers: dict[Any, NDArray[Any]] = {}

    def buffer(self, name: Any, size: int, dtype: Any = np.float32) -> NDArray[Any]:
        """A buffer by name, shared by all layers; at least as large as asked for the first time."""
        key = (name, size, np.dtype(dtype))
        if key not in self._buffers:
            self._buffers[key] = np.zeros(size, dtype)
        return self._buffers[key]

    def add(self, function: Callable[..., None], arguments: list[Any], total: int = 1, tile: int = 1) -> None:
        """An operation that needs the ones before it."""
        self.add_side_by_side([(function, arguments, total, tile)])

    def add_side_by_side(self, calls: Sequence[tuple[Callable[..., None], list[Any], int, int]]) -> None:
        """Operations that need the ones before them, but not each other."""
        group = self._group[-1] + 1 if self._group else 0
        for function, arguments, total, tile in calls:
            compiled = callback(function)
            numbers = [_number(a) for a in arguments]
            table = np.array(numbers, np.int64)
            self._alive += [compiled, table, *arguments]
            self._rows.append([compiled.address, table.ctypes.data, total, tile, 0])
            self._group.append(group)

    def table(self) -> NDArray[np.int64]:
        """The operations, int64 [n, 5]; threads wait only where one of them needs what another wrote."""
        table = np.array(self._rows, np.int64)
        spread = table[:, 2] > table[:, 3]
        group = np.array(self._group)
        spread_groups = set(group[spread].tolist())
        for k in range(len(table) - 1):
            ends = group[k] != group[k + 1]
            table[k, 4] = ends and (int(group[k]) in spread_groups or int(group[k + 1]) in spread_groups)
        return table


def _number(argument: Any) -> int:
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise ValueError("arguments of a program are contiguous arrays")
        return int(argument.ctypes.data)
    return int(argument)


class _Forms:
    """The forms of one input that its matrices ask for, each made once by an operation before them."""

    def __init__(self, program: _Program, x: Floats) -> None:
        self.x = x
        self._program = program
        self._made: dict[Any, tuple[NDArray[Any], ...]] = {}

    def words(self) -> tuple[NDArray[Any], ...]:
        """(q int16, scales)."""
        return self._quantized("words", np.int16, WORD_LIMIT, activations.quantize_words_step)

    def bytes(self, size: int) -> tuple[NDArray[Any], ...]:
        """(q int8, scales, quads) for weights with a scale for ``size`` inputs."""
        q, scales = self._quantized("bytes", np.int8, BYTE_LIMIT, activations.quantize_bytes_step)
        block = min(size, GROUP)
        if ("arranged", block) not in self._made:
            add, buffer = self._program.add, self._program.buffer
            arranged = q
            if block < GROUP:
                arranged = buffer(("arranged", block), q.size, np.int8)
                add(activations.arrange_step, [q, q.size, block, arranged])
            quads = buffer(("quads", block), q.size // GROUP * 8, np.int32)
            add(activations.quad_sums_step, [arranged, q.size, quads])
            self._made["arranged", block] = (arranged, scales, quads)
        return self._made["arranged", block]

    def sums(self, size: int) -> NDArray[Any]:
        """Sums of every ``size`` rounded activations."""
        q, scales = self.words()
        if ("sums", size) not in self._made:
            out = self._program.buffer(("sums", size), -(-q.size // size // 8) * 8)
            self._program.add(activations.block_sums_step, [q, q.size, scales, size, out, out.size])
            self._made["sums", size] = (out,)
        return self._made["sums", size][0]

    def _quantized(
        self, name: str, dtype: Any, limit: int, function: Callable[..., None]
    ) -> tuple[NDArray[Any], ...]:
        if name not in self._made:
            count = padded(self.x.size)
            q = self._program.buffer(name, count, dtype)
            scales = self._program.buffer((name, "scales"), count // GROUP)
            self._program.add(function, [self.x, self.x.size, limit, q, scales])
            self._made[name] = (q, scales)
        made: tuple[NDArray[Any], ...] = self._made[name]
        return made


# ---------------------------------------------------------------------------- products
_Call = tuple[Callable[..., None], list[Any]]


def _codebook16(m: Codebook16, x: _Forms, y: Floats) -> _Call:
    arrays = [m.codes, m.planes, m.scales, m.rows, padded(m.in_features)]
    return codebook16.multiply_step, [*arrays, *x.words(), y]


def _table(m: Table, x: _Forms, y: Floats) -> _Call:
    arrays = [m.codes, m.tables, m.rows, m.in_features, m.tables.shape[1]]
    return codebook_table.multiply_step, [*arrays, x.x, y]


def _expanded(m: Expanded, x: _Forms, y: Floats) -> _Call:
    arrays = [m.words, m.scales, m.rows, padded(m.in_features)]
    return codebook_table.multiply_expanded_step, [*arrays, *x.words(), y]


def _ternary(m: Ternary, x: _Forms, y: Floats) -> _Call:
    arrays = [m.codes, m.scales, m.rows, padded(m.in_features), m.scales.shape[1], m.size]
    return ternary.multiply_step, [*arrays, *x.bytes(m.size), y]


def _blocks(m: Blocks, x: _Forms, y: Floats) -> _Call:
    q, scales = x.words()
    sums = x.sums(blocks.block_size(m.kind)) if m.dmin.shape[1] else np.zeros(8, np.float32)
    columns = [a.shape[1] for a in (m.d, m.steps, m.dmin, m.mins)]
    arrays = [m.table, m.codes, m.d, m.steps, m.dmin, m.mins, m.rows, padded(m.in_features), *columns]
    return blocks.STEP[m.kind], [*arrays, q, scales, sums, sums.size, y]


def _dense(m: Dense, x: _Forms, y: Floats) -> _Call:
    return getattr(dense, f"multiply_{m.dtype.name}_step"), [m.values, m.rows, m.in_features, x.x, y]


_PRODUCTS: dict[type[Prepared], Callable[[Any, _Forms, Floats], _Call]] = {
    Codebook16: _codebook16,
    Table: _table,
    Expanded: _expanded,
    Ternary: _ternary,
    Blocks: _blocks,
    Dense: _dense,
}
