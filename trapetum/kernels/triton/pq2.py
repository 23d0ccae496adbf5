"""Ternary and four-level matrices in Triton: ``y = x W^T`` from the bytes of planes-v1, for stacks of Triton and torch.

Activations are quantized to 8 bits a group of 128 inputs (scale = max |x| / 127 in float32, ties to even). Up to 16
tokens, programs share the rows and, where those are few, the inputs; their sums are added in a fixed order. More tokens
take larger tiles. Both are one kernel with other sizes: a product of integers on tensor cores, exact for each group,
which is then scaled and added in float32. Sizes are arguments at run time, so a new number of tokens compiles nothing.

    layers = open_pq2("model-planes")
    y = layers["model.layers.0.mlp.down_proj.weight"](x)         # float16, bfloat16 or float32 [..., in_features]

Importing this module without torch or triton raises :class:`~trapetum.errors.KernelUnavailable`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trapetum.errors import FormatError, KernelUnavailable, UnsupportedModelError, listed
from trapetum.formats.planes_entries import PlanesEntry
from trapetum.formats.planes_layout import BLOCK, GROUP_SIZE
from trapetum.formats.planes_source import PlanesSource
from trapetum.formats.strict_json import shown
from trapetum.tensors import matrix_shape

try:
    import torch
    import triton
    import triton.language as tl
except ImportError as problem:
    raise KernelUnavailable(
        f"the Triton kernels need torch and triton; {problem.name} cannot be imported",
        hint="Install trapetum[triton], and the torch build of your card.",
    ) from None

if TYPE_CHECKING:
    from trapetum.rotation import HadamardRotation

__all__ = ["MOST_TOKENS", "Pq2Linear", "open_pq2", "pq2_linear"]

MOST_TOKENS = 16
"""Tokens that the kernel for few takes; the least that a tensor core's tile has."""
MINIMUM = (8, 0)
"""Compute capability: integer tensor cores and asynchronous copies."""

# Products are exact integers of at most 128 * 2 * 127 = 32512. Added to 1.5 * 2**23 as the bits of a float32 they are
# its low bits, so that one subtraction makes floats of them: 4 of these a cycle where a conversion takes 1.
_MAGIC_BITS = tl.constexpr(0x4B400000)
_MAGIC = tl.constexpr(12582912.0)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["tokens", "slots", "groups"])
def quantize_activations(x, codes, scales, tokens, slots, groups, GROUPS: tl.constexpr):
    """x [tokens][128 groups] -> codes int8 of the same shape, scales float32 [groups][slots], 0 beyond the tokens.

    Of 16 inputs, input 4 b + s becomes byte 4 s + b: the order in which two shifts and a mask unpack a word of weights.
    A group with a value that is not finite gets the scale NaN, and with it every output of its token.
    """
    index = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    token = index % slots
    at = (token.to(tl.int64) * groups + index // slots) * 128
    inside = (token < tokens) & (index < slots * groups)
    place = tl.arange(0, 128)
    source = place // 16 * 16 + place % 4 * 4 + place // 4 % 4
    values = tl.load(x + at[:, None] + source[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = most < _INFINITY_BITS
    scale = tl.div_rn(tl.where(finite, most, 0).to(tl.float32, bitcast=True), 127.0)
    values = tl.where(finite[:, None], values, 0.0)
    quotients = tl.div_rn(values, tl.where(scale > 0.0, scale, 1.0)[:, None])
    # Added and taken away, 1.5 * 2**23 rounds to integers, halves to even. Subnormal scales are too coarse for 127.
    rounded = tl.minimum(tl.maximum((quotients + _MAGIC) - _MAGIC, -127.0), 127.0)
    tl.store(codes + at[:, None] + place[None, :], rounded.to(tl.int8), mask=inside[:, None])
    tl.store(scales + index, tl.where(finite, scale, float("nan")), mask=index < slots * groups)


@triton.jit
def _unpack(words, ROWS: tl.constexpr):
    """Words of 16 weights, int32 [ROWS, 8] -> code - 1, int8 [ROWS, 128], in the order of the activations.

    Four codes at a time: c + 0x7F has no carry into the next byte, and its top bit turned over is c - 1.
    """
    mask: tl.constexpr = 0x03030303
    bias: tl.constexpr = 0x7F7F7F7F
    field0 = tl.add(words & mask, bias, sanitize_overflow=False) ^ ~bias
    field1 = tl.add(words >> 2 & mask, bias, sanitize_overflow=False) ^ ~bias
    field2 = tl.add(words >> 4 & mask, bias, sanitize_overflow=False) ^ ~bias
    field3 = tl.add(words >> 6 & mask, bias, sanitize_overflow=False) ^ ~bias
    fields = tl.reshape(tl.join(tl.join(field0, field2), tl.join(field1, field3)), [ROWS, 32])
    low = tl.join(fields.to(tl.int8), (fields >> 16).to(tl.int8))
    high = tl.join((fields >> 8).to(tl.int8), (fields >> 24).to(tl.int8))
    return tl.reshape(tl.join(low, high), [ROWS, 128])


@triton.jit(do_not_specialize=["tokens", "rows", "groups", "share", "splits"])
def multiply(
    words, weight_scales, codes, scales, out, partial, tokens, rows, groups, share, splits,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Weights int32 [rows][8 groups] and float16 [rows][groups] times quantized activations.

    A program takes ROWS x TOKENS of the result and ``share`` groups. Of several ``splits`` each writes float32 partial
    [splits][tokens][rows]; a single one writes ``out`` [tokens][rows].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    slots = tl.cdiv(tokens, TOKENS) * TOKENS
    weight_row = tl.minimum(row, rows - 1).to(tl.int64)  # rows beyond the end repeat the last
    word_at = words + weight_row[:, None] * (groups * 8) + tl.arange(0, 8)[None, :]
    code_at = codes + token.to(tl.int64)[None, :] * (groups * 128) + tl.arange(0, 128)[:, None]
    present = (token < tokens)[None, :]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for group in range(split * share, tl.minimum(split * share + share, groups)):
        weights = _unpack(tl.load(word_at + group * 8), ROWS)
        activations = tl.load(code_at + group * 128, mask=present, other=0)
        start = tl.full([ROWS, TOKENS], _MAGIC_BITS, tl.int32)
        sums = (
            tl.dot(weights, activations, acc=start, out_dtype=tl.int32).to(tl.float32, bitcast=True) - _MAGIC
        )
        by_row = tl.load(weight_scales + weight_row * groups + group).to(tl.float32)
        by_token = tl.load(scales + group * slots + token)
        total = tl.fma(sums, by_row[:, None] * by_token[None, :], total)
    corner = tl.program_id(1).to(tl.int64) * TOKENS * rows + tl.program_id(0) * ROWS
    at = tl.arange(0, TOKENS)[None, :] * rows + tl.arange(0, ROWS)[:, None]
    inside = (row < rows)[:, None] & present
    if splits == 1:
        tl.store(out + corner + at, total.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial + (split.to(tl.int64) * tokens * rows + corner) + at, total, mask=inside)


@triton.jit(do_not_specialize=["count", "splits"])
def add_up(partial, out, count, splits, BLOCK: tl.constexpr):
    """Sums over the first axis of float32 [splits][count], in its order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(splits):
        total += tl.load(partial + at, mask=inside, other=0.0)
        partial += count
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


class _Tile(NamedTuple):
    """Sizes of :func:`multiply`."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int
    """So many keep a card of some hundred multiprocessors busy. A constant: every card gives the same bits."""


# By the instructions of the compiled loops: at 128 rows a lane of the kernel for few tokens spends 2.3 on a weight, at
# 64 rows 3.0 (sm_90). Larger tiles than these spill registers. Not timed on a card yet.
_FEW = _Tile(rows=128, tokens=MOST_TOKENS, warps=4, stages=4, programs=512)
_MANY = _Tile(rows=128, tokens=128, warps=8, stages=3, programs=128)
_GROUPS = 8
_BLOCK = 512
# Without contraction of products and sums, results do not depend on what the compiler joins; where it pays, `multiply`
# says so itself.
_EXACT = {"enable_fp_fusion": False}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NAMES = ", ".join(str(dtype) for dtype in _DTYPES)


def pq2_linear(x: torch.Tensor, planes: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x W^T`` with 8-bit activations.

    Parameters
    ----------
    x : tensor of float16, bfloat16 or float32, shape (..., in_features)
    planes : tensor of uint8, shape (rows, in_features / 128 * 34)
        A planes-v1 tensor as the file has it, on the device of ``x``.
    out_dtype : torch.dtype, optional
        One of the same; that of ``x`` by default.

    Returns
    -------
    tensor of ``out_dtype``, shape (..., rows)
        The same bits in every call.

    Raises
    ------
    ValueError
        If dtypes, shapes or devices do not fit, or a gradient is asked for.
    KernelUnavailable
        If the device has no such kernels.
    """
    rows, in_features = _sizes(planes)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if x.dtype not in _DTYPES or out_dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype} and the result {out_dtype}; {_NAMES} are allowed")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}; (..., {in_features}) is needed")
    if x.device != planes.device:
        raise ValueError(f"x is on {x.device}, the planes are on {planes.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "x requires a gradient, which these kernels have not; use torch.no_grad() or x.detach()"
        )
    _check_device(x.device)
    flat = _aligned(x.reshape(-1, in_features))
    out = torch.empty((flat.shape[0], rows), dtype=out_dtype, device=x.device)
    if out.numel():
        with torch.cuda.device_of(x):
            _launch(flat, _aligned(planes), out)
    return out.reshape(*x.shape[:-1], rows)


def _sizes(planes: torch.Tensor) -> tuple[int, int]:
    """N and K."""
    if (
        planes.dtype != torch.uint8
        or planes.ndim != 2
        or not planes.numel()
        or planes.shape[1] % BLOCK.type_size
    ):
        raise ValueError(
            f"planes are {planes.dtype} {tuple(planes.shape)}; uint8 (rows, in_features / {GROUP_SIZE} * "
            f"{BLOCK.type_size}) are needed"
        )
    return planes.shape[0], planes.shape[1] // BLOCK.type_size * GROUP_SIZE


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where kernels take it from; an address of another alignment would be another kernel."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _check_device(device: torch.device) -> None:
    if device.type == "cpu" and not isinstance(multiply, triton.JITFunction):
        return  # Triton's interpreter
    if device.type != "cuda":
        raise KernelUnavailable(
            f"the activations are on the device {device}; the Triton kernels run on CUDA devices",
            hint="Move layer and activations there; TRITON_INTERPRET=1 runs kernels slowly on the CPU.",
        )
    if (found := _capability(device.index)) < MINIMUM:
        raise KernelUnavailable(
            f"{device} has compute capability {found[0]}.{found[1]}; the Triton kernels need {MINIMUM[0]}.{MINIMUM[1]} "
            f"or newer"
        )


@cache
def _capability(index: int) -> tuple[int, int]:
    found: tuple[int, int] = torch.cuda.get_device_capability(index)
    return found


def _launch(x: torch.Tensor, planes: torch.Tensor, out: torch.Tensor) -> None:
    """Quantize, multiply, and add up where programs share the inputs."""
    tokens, rows, groups = x.shape[0], out.shape[1], x.shape[1] // GROUP_SIZE
    tile = _FEW if tokens <= MOST_TOKENS else _MANY
    blocks = triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens)
    slots = blocks[1] * tile.tokens
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty((groups, slots), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(slots * groups, _GROUPS),)
    quantize_activations[grid](x, codes, scales, tokens, slots, groups, GROUPS=_GROUPS, num_warps=4, **_EXACT)
    share = triton.cdiv(groups, min(groups, max(1, tile.programs // (blocks[0] * blocks[1]))))
    splits = triton.cdiv(groups, share)
    partial = (
        scales if splits == 1 else torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
    )
    flat = planes.reshape(-1)
    end = rows * groups * (GROUP_SIZE // 4)
    multiply[(*blocks, splits)](
        flat[:end].view(torch.int32), flat[end:].view(torch.float16), codes, scales, out, partial,
        tokens, rows, groups, share, splits,
        ROWS=tile.rows, TOKENS=tile.tokens, num_warps=tile.warps, num_stages=tile.stages, **_EXACT,
    )  # fmt: skip
    if splits > 1:
        count = tokens * rows
        add_up[(triton.cdiv(count, _BLOCK),)](
            partial, out, count, splits, BLOCK=_BLOCK, num_warps=4, **_EXACT
        )


class Pq2Linear(torch.nn.Module):
    """A planes-v1 matrix as a module; made by :func:`open_pq2`.

    Parameters
    ----------
    planes : tensor of uint8, shape (rows, in_features / 128 * 34)
    rotation : HadamardRotation, optional
        Folded into the weights; activations are rotated to match.
    parts : mapping of str to slice, optional
        Where in the result the outputs of each weight lie, if several were fused.
    """

    planes: torch.Tensor
    signs: torch.Tensor | None

    def __init__(
        self,
        planes: torch.Tensor,
        rotation: HadamardRotation | None = None,
        parts: Mapping[str, slice] | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = _sizes(planes)
        self.parts = dict(parts or {})
        self.block_size = rotation.block_size if rotation is not None else 0
        signs = None if rotation is None else torch.from_numpy(rotation.signs[self.in_features].copy())
        self.register_buffer("planes", _aligned(planes))
        self.register_buffer("signs", None if signs is None else signs.to(planes.device))

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See :func:`pq2_linear`."""
        out_dtype = x.dtype if out_dtype is None else out_dtype
        if self.signs is not None:
            x = _rotated(x, self.signs, self.block_size)
        return pq2_linear(x, self.planes, out_dtype)

    def warm_up(self, dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
        """Compile everything that activations of this dtype need, whatever their number: before a graph is captured."""
        for tokens in (1, MOST_TOKENS + 1):  # the most splits that each of the two tiles can have
            self(torch.zeros(tokens, self.in_features, dtype=dtype, device=self.planes.device), out_dtype)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _rotated(x: torch.Tensor, signs: torch.Tensor, block_size: int) -> torch.Tensor:
    """H (s * x), float32: not rounded before it is quantized."""
    v = x.float() * signs
    step = 1
    while step < block_size:
        pairs = v.reshape(-1, 2, step)
        v = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1)
        step *= 2
    return v.reshape(x.shape) * block_size**-0.5


def open_pq2(
    path: str | os.PathLike[str], names: Iterable[str] | None = None, device: str | torch.device = "cuda"
) -> dict[str, Pq2Linear]:
    """Ternary matrices of a planes file, as modules.

    Parameters
    ----------
    path : path-like
        What ``trapetum export --format planes`` wrote: the folder, or the file in it.
    names : iterable of str, optional
        Tensors of the file; all ternary ones by default. Fused ones have the name of the whole (``qkv_proj``).
    device : str or torch.device

    Raises
    ------
    FormatError, CheckpointError
        If the file is broken, or a name is not in it.
    UnsupportedModelError
        If there is no ternary matrix, or a named one has another layout.
    """
    with PlanesSource.open(path) as source:
        ternary = [name for name, entry in source.entries.items() if isinstance(entry, PlanesEntry)]
        if not ternary:
            held = listed(sorted({entry.layout for entry in source.entries.values()})) or "dense tensors only"
            raise UnsupportedModelError(
                f"{path}: holds no {PlanesEntry.layout} matrix, for which there are Triton kernels; it holds {held}",
                hint="Quantize with --scheme ternary, or use --device cuda, which has kernels for every layout.",
            )
        return {name: _open(source, name, device) for name in (ternary if names is None else names)}


def _open(source: PlanesSource, name: str, device: str | torch.device) -> Pq2Linear:
    entry = source.entries.get(name)
    if entry is None:
        whole = next((e.name for e in source.entries.values() if name in {p.name for p in e.parts}), None)
        raise FormatError(
            f"{source.path}: there is no matrix named {shown(name)}"
            + (f" of its own; it is a part of {shown(whole)}" if whole else "")
        )
    if not isinstance(entry, PlanesEntry):
        raise UnsupportedModelError(
            f"{source.path}: tensor {shown(name)} has the layout {entry.layout}; there are Triton kernels for "
            f"{PlanesEntry.layout} only",
            hint="Use --device cuda, which has kernels for every layout.",
        )
    ends = np.cumsum([matrix_shape(part.shape)[0] for part in entry.parts]).tolist()
    parts = {p.name: slice(a, b) for p, a, b in zip(entry.parts, [0, *ends[:-1]], ends, strict=True)}
    planes = torch.from_numpy(np.array(source.raw(name))).to(device)
    return Pq2Linear(planes, source.rotation_of(entry.parts[0].name), parts)
