"""Checkpoints whose ternary weights are packed, or only meant: read as the float32 weights that their format defines.

=====================  =========================================================================================
format                 weight of row o, input i
=====================  =========================================================================================
BitNet ``bitlinear``   ``t / weight_scale`` (the stored scale is a divisor)
BitNet                 ``t * weight_scale``
``autobitlinear``
BitNet ``online``      plain latent weights W, ternary only when used: s = 1 / mean(abs(W)), ``round(W s) / s``
                       clamped to one step, in the stored dtype
MLX, 2 bits            ``scale * q + bias``; taken where every bias is minus its scale, i.e. ``scale * (q - 1)``
=====================  =========================================================================================

BitNet packs four *row chunks* into a byte, not four neighbours: with R packed rows, bits 2k of row r hold row
``k R + r``, and t is the code less 1. MLX packs 16 neighbours into a 32-bit word, lowest bits first.

Everything is decoded by row blocks; nothing needs a whole tensor in memory. What a format cannot mean (code 3 in
BitNet, a scale that is no positive number, an affine MLX group) is refused by name.

Source: transformers 5 integrations/bitnet.py; MLX ``mx.quantize``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError, FormatError, UnsupportedModelError, listed
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.gguf_checkpoint import GgufCheckpoint, is_gguf
from trapetum.formats.packed_aqlm import AqlmCheckpoint
from trapetum.formats.packed_checkpoint import PackedCheckpoint
from trapetum.formats.packed_fp8 import Fp8Checkpoint
from trapetum.formats.packed_mxfp4 import GptOssCheckpoint, Mxfp4Checkpoint, is_gpt_oss
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.source import detect
from trapetum.formats.view import CheckpointView
from trapetum.tensors import matrix_shape

__all__ = [
    "AnyCheckpoint",
    "BitnetCheckpoint",
    "MlxCheckpoint",
    "OnlineBitnetCheckpoint",
    "open_checkpoint",
]

_CHUNK_WEIGHTS = 1 << 22
_ACTIVATIONS = "the original quantizes activations to 8 bits as well; here they stay float32"


class BitnetCheckpoint(PackedCheckpoint):
    """Packed BitNet: uint8 weights beside a ``weight_scale``."""

    def __init__(self, inner: Checkpoint) -> None:
        settings = _settings(inner)
        self._divides = settings.get("linear_class", "bitlinear") == "bitlinear"
        super().__init__(inner)
        rule = "t / weight_scale" if self._divides else "t * weight_scale"
        self.notes.append(
            f"packed as bitnet: {len(self._packed)} matrices are decoded exactly, weight = {rule}; {_ACTIVATIONS}"
        )

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        stored = set(self.inner.names())
        found: dict[str, tuple[int, ...]] = {}
        for name in self.inner.names():
            if not name.endswith(".weight") or self.inner.dtype(name) != np.uint8:
                continue
            shape = self.inner.shape(name)
            if f"{name}_scale" not in stored or len(shape) != 2:
                raise self._bad(
                    name,
                    f"is uint8 {list(shape)} without {name}_scale beside it; bitnet packs matrices with one",
                )
            found[name] = (4 * shape[0], shape[1])
        return found

    def _companions(self, name: str) -> tuple[str, ...]:
        return (f"{name}_scale",)

    def _decode(self, name: str, rows: slice) -> NDArray[np.float32]:
        height = self._packed[name][0] // 4
        pieces = [np.empty((0, self._packed[name][1]), np.uint8)]
        for chunk in range(4):
            first, last = max(rows.start - chunk * height, 0), min(rows.stop - chunk * height, height)
            if first < last:
                packed = self.inner.load(name, slice(first, last)).values
                pieces.append((packed >> np.uint8(2 * chunk)) & np.uint8(3))
        codes = np.concatenate(pieces)
        if codes.size and int(codes.max()) == 3:
            raise self._bad(name, "holds code 3; bitnet packs 0, 1 and 2")
        steps = codes.astype(np.float32) - np.float32(1)
        scale = self._scale(name)
        values: NDArray[np.float32] = steps / scale if self._divides else steps * scale
        return values

    def _scale(self, name: str) -> np.float32:
        values = self.inner.load(f"{name}_scale").dequantize().reshape(-1)
        if values.size != 1 or not 0 < values[0] < np.inf:
            raise self._bad(name, f"weight_scale is {values.tolist()[:4]}; one positive number is needed")
        return np.float32(values[0])


class OnlineBitnetCheckpoint(PackedCheckpoint):
    """BitNet latents: plain weights that the model makes ternary each time it uses them."""

    def __init__(self, inner: Checkpoint) -> None:
        self._kept = (*(_settings(inner).get("modules_to_not_convert") or ()), "lm_head", "embed")
        self._scales: dict[str, np.float32] = {}
        super().__init__(inner)
        self.notes.append(
            f"bitnet latents: {len(self._packed)} matrices are made ternary by their mean magnitude, as the model "
            f"does; {_ACTIVATIONS}"
        )

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        names = [n for n in self.inner.names() if n.endswith(".weight") and len(self.inner.shape(n)) == 2]
        return {n: self.inner.shape(n) for n in names if not any(k in n for k in self._kept)}

    def _companions(self, name: str) -> tuple[str, ...]:
        return ()

    def _decode(self, name: str, rows: slice) -> NDArray[np.float32]:
        latent = self.inner.load(name, rows).values
        scale = self._scale(name)
        steps = np.clip(np.rint(latent.astype(np.float32) * scale), -1, 1)  # halves to even, as torch.round
        values: NDArray[np.float32] = (steps / scale).astype(latent.dtype).astype(np.float32)
        return values

    def _scale(self, name: str) -> np.float32:
        """1 / mean magnitude of the whole tensor, added in float64; looked up once."""
        if name not in self._scales:
            rows, width = matrix_shape(self._packed[name])
            step, total = max(1, _CHUNK_WEIGHTS // max(width, 1)), 0.0
            for start in range(0, rows, step):
                part = slice(start, start + step)
                total += float(np.abs(self.inner.load(name, part).values.astype(np.float64)).sum())
                self.inner.release(name, part)
            mean = np.float32(total / max(rows * width, 1))
            self._scales[name] = np.float32(1) / max(mean, np.float32(1e-5))
        return self._scales[name]


class MlxCheckpoint(PackedCheckpoint):
    """MLX affine packs of 2 bits, where every bias is minus its scale."""

    _format = "mlx"

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.notes.append(f"packed by mlx: {len(self._packed)} matrices of 2 bits are decoded exactly")

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        faults = []
        stored = set(self.inner.names())
        if rotated := sorted(n for n in stored if n.endswith(".signs")):
            raise UnsupportedModelError(
                f"{self.path}: tensor {rotated[0]} belongs to a rotation, which is not read from MLX folders",
                hint="Use the GGUF file of this model.",
            )
        for name in self.inner.names():
            if self.inner.dtype(name) != np.uint32:
                continue
            words = self.inner.shape(name)[-1]
            scales, biases = self._companions(name)
            if scales not in stored or biases not in stored:
                faults.append(f"{name} has no scales and biases")
                continue
            groups = self.inner.shape(scales)[-1]
            in_features = 16 * words
            group = in_features // max(groups, 1)
            said = self._said(name)
            if said.get("bits") != 2 or said.get("group_size") != group or group * groups != in_features:
                faults.append(f"{name} has {said.get('bits')} bits in groups of {said.get('group_size')}")
                continue
            found[name] = (*self.inner.shape(name)[:-1], in_features)
        if faults:
            raise UnsupportedModelError(
                f"{self.path}: quantized by mlx; only 2-bit weights are taken over: {listed(faults)}",
                hint="Use the checkpoint that it was made from.",
            )
        return found

    def _said(self, name: str) -> dict[str, Any]:
        """What config.json says of one module."""
        config = self.inner.config
        general: dict[str, Any] = config.get("quantization") or config.get("quantization_config") or {}
        own = general.get(name.removesuffix(".weight"))
        return {**general, **own} if isinstance(own, dict) else general

    def _companions(self, name: str) -> tuple[str, ...]:
        stem = name.removesuffix(".weight")
        return f"{stem}.scales", f"{stem}.biases"

    def _decode(self, name: str, rows: slice) -> NDArray[np.float32]:
        scales, biases = (self.inner.load(n, rows).values.astype(np.float32) for n in self._companions(name))
        if bad := int(np.count_nonzero(biases != -scales)):
            raise self._bad(
                name,
                f"{bad} of {scales.size} groups have a bias that is not minus the scale: they are not ternary "
                "(mx.quantize itself does not keep ternary weights)",
            )
        words = self.inner.load(name, rows).values
        shifts = np.arange(0, 32, 2, dtype=np.uint32)
        codes = ((words[:, :, None] >> shifts) & np.uint32(3)).reshape(words.shape[0], scales.shape[1], -1)
        values: NDArray[np.float32] = codes.astype(np.float32) * scales[:, :, None] + biases[:, :, None]
        return values.reshape(words.shape[0], -1)


AnyCheckpoint: TypeAlias = Checkpoint | CheckpointView[Any] | GgufCheckpoint
"""What can be quantized: a model folder, packed or not, or a GGUF; all have the same members."""


def _settings(inner: Checkpoint) -> dict[str, Any]:
    """``quantization_config``, checked for what these rules do not cover."""
    found = inner.config.get("quantization_config")
    settings = found if isinstance(found, dict) else {}
    kind, mode = settings.get("linear_class", "bitlinear"), settings.get("quantization_mode", "offline")
    allowed = {("bitlinear", "offline"), ("autobitlinear", "offline"), ("autobitlinear", "online")}
    if (kind, mode) not in allowed:
        raise UnsupportedModelError(
            f"{inner.path}: bitnet with linear_class {kind!r} and quantization_mode {mode!r}; allowed: "
            + ", ".join(f"{k} {m}" for k, m in sorted(allowed))
        )
    if settings.get("use_rms_norm"):
        raise UnsupportedModelError(
            f"{inner.path}: bitnet with use_rms_norm, a norm in front of every linear layer, which is not computed here"
        )
    return settings


def _open_bitnet(inner: Checkpoint) -> PackedCheckpoint:
    online = _settings(inner).get("quantization_mode") == "online"
    return (OnlineBitnetCheckpoint if online else BitnetCheckpoint)(inner)


def _has_config(inner: Checkpoint) -> bool:
    try:
        return bool(inner.config)
    except CheckpointError:  # a bare weight file
        return False


_OPENERS: dict[str, Callable[[Checkpoint], PackedCheckpoint]] = {
    "aqlm": AqlmCheckpoint,
    "bitnet": _open_bitnet,
    "compressed-tensors": Fp8Checkpoint,
    "fbgemm_fp8": Fp8Checkpoint,
    "fp8": Fp8Checkpoint,
    "mlx": MlxCheckpoint,
    "modelopt": Fp8Checkpoint,
    "mxfp4": Mxfp4Checkpoint,
}


def _refuse_exports(path: str | os.PathLike[str]) -> None:
    """Files for engines hold nothing that could be quantized again without a second loss."""
    try:
        kind = detect(path)
    except FormatError:  # the checkpoint says what is wrong
        return
    if kind.name in ("cbk", "planes"):
        raise UnsupportedModelError(
            f"{path}: is {kind.text}, whose weights are quantized already; trapetum starts from float weights",
            hint="Use the original bfloat16, float16 or float32 checkpoint.",
        )


def open_checkpoint(
    path: str | os.PathLike[str], *, mmap: bool = True, reader: type[SafetensorsFile] = SafetensorsFile
) -> AnyCheckpoint:
    """Open a model folder or a GGUF; packed weights are decoded as they are read.

    Parameters
    ----------
    path : path-like
    mmap : bool
    reader : type
        What opens a safetensors file.

    Raises
    ------
    CheckpointError, FormatError, UnsupportedModelError
        See :meth:`Checkpoint.open`; also if the packed weights follow no rule of their format.
    """
    if is_gguf(path):
        return GgufCheckpoint.open(path, mmap=mmap)
    _refuse_exports(path)
    inner = Checkpoint.open(path, mmap=mmap, reader=reader)
    method = inner.packed_format()
    opener = _OPENERS.get(method or "")
    if method is None and _has_config(inner) and is_gpt_oss(inner.config):
        opener = GptOssCheckpoint
    if opener is None:
        return inner
    try:
        return opener(inner)
    except BaseException:
        inner.close()
        raise
