"""Recognises checkpoints that are already quantized, by their config and by tell-tale tensors.

Packed integers read as weights give a model that passes every container check and talks nonsense, so each
caller asks first. The config's word comes first (``quantization_config.quant_method``); tensors decide
where it has none, as in MLX folders, in bare weight files and in configs that were edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from trapetum.formats.dtypes import CODES

__all__ = ["packed_format"]

_Tensors = Mapping[str, np.dtype[Any]]


def packed_format(config: Mapping[str, Any], tensors: _Tensors) -> str | None:
    """Name of the quantization that a checkpoint is in, or None for plain weights.

    Parameters
    ----------
    config : mapping
        Content of config.json; may be empty.
    tensors : mapping of str to numpy.dtype
        All tensors.

    Examples
    --------
    >>> packed_format({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {})
    'gptq'
    >>> packed_format({}, {"q.weight": np.dtype(np.uint32), "q.scales": np.dtype(np.float16)})
    'mlx'
    """
    for part in (config, *(config.get(key) for key in ("text_config", "llm_config", "language_config"))):
        if isinstance(part, Mapping) and (method := _declared(part)):
            return method
    telling = tuple({sign.parts[0][0] for sign in _SIGNS})
    suspects = [name for name in tensors if name.endswith(telling)]
    return next((sign.format for sign in _SIGNS if any(sign.fits(name, tensors) for name in suspects)), None)


def _declared(config: Mapping[str, Any]) -> str | None:
    for key, default in (("quantization_config", "unknown"), ("compression_config", "compressed-tensors")):
        if isinstance(found := config.get(key), Mapping) and found:
            loaded = any(found.get(f"load_in_{bits}bit") for bits in (4, 8))  # before it had quant_method
            return str(found.get("quant_method") or ("bitsandbytes" if loaded else default))
    if isinstance(found := config.get("quantization"), Mapping) and found:  # the key of MLX
        return str(found.get("quant_method") or "mlx")
    return None


class _Sign(NamedTuple):
    """A format and the tensors of one stem that give it away: (suffix, dtype codes or ""), rarest first."""

    format: str
    parts: tuple[tuple[str, str], ...]

    def fits(self, name: str, tensors: _Tensors) -> bool:
        """Whether ``name`` is the first part and the others stand beside it."""
        stem = name.removesuffix(self.parts[0][0])
        if stem == name:
            return False
        return all(
            (dtype := tensors.get(stem + suffix)) is not None
            and (not codes or CODES.get(dtype) in codes.split())
            for suffix, codes in self.parts
        )


_FP8 = "F8_E4M3 F8_E5M2"
_SIGNS = (
    _Sign("gptq", ((".g_idx", "I32"), (".qweight", "I32"))),
    _Sign("awq", ((".qzeros", "I32"), (".qweight", "I32"))),
    _Sign("bitsandbytes", ((".absmax", ""), ("", "U8"))),
    _Sign("bitsandbytes", ((".SCB", "F32"), (".weight", "I8"))),
    _Sign("aqlm", ((".codebooks", ""), (".codes", ""))),
    _Sign("mxfp4", (("_blocks", "U8"), ("_scales", "U8"))),
    _Sign("compressed-tensors", ((".weight_packed", ""), (".weight_scale", ""))),
    _Sign("fp8", (("_scale_inv", ""),)),
    _Sign("fp8", ((".weight_scale", ""), (".weight", _FP8))),
    _Sign("nvfp4", ((".weight_scale", "F8_E4M3"), (".weight", "U8"))),
    _Sign("bitnet", ((".weight_scale", ""), (".weight", "U8"))),
    _Sign("int8", ((".weight_scale", ""), (".weight", "I8"))),
    _Sign("mlx", ((".scales", ""), (".weight", "U32"))),
    _Sign("hqq", ((".W_q", ""),)),
    _Sign("quip", ((".Qidxs", ""),)),
    _Sign("exl2", ((".q_weight", ""),)),
    _Sign("exl3", ((".trellis", ""),)),
)
