"""DeepSeek's latent attention and experts in a GGUF (family ``deepseek2``), as llama.cpp computes them.

Engines keep latents as the keys and values of one head, so the file has ``kv_b_proj`` in two halves by head: the key
half transposed, ``attn_k_b`` [heads, kv_lora, nope], and the value half, ``attn_v_b`` [heads, value, kv_lora]. A
transpose mixes rows, so both are written decoded: float16 where that is exact (codebooks are), else as float32.

The sizes of heads that the keys state are those of the cache, ``kv_lora + rope`` and ``kv_lora``, with one key-value
head; the model's own are the ones that end in ``_mla``.

Source: llama.cpp, src/models/deepseek2.cpp, src/llama-context.cpp (YaRN) and conversion/deepseek.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from trapetum.formats.decoded import decoded, rotation_of
from trapetum.formats.gguf_values import KeyValue, ValueType
from trapetum.formats.source import TensorSource
from trapetum.models.config import ModelConfig
from trapetum.models.deepseek import LATENT, LatentOptions
from trapetum.models.experts import SECTION, Routing
from trapetum.rotation import HadamardRotation
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor, matrix_shape

__all__ = ["SplitLatents", "latent_faults", "latent_pairs", "split_latents"]

_FAMILY = "deepseek2"
# llama.cpp takes models of so many layers as those without a latent of the queries.
_LITE_LAYERS = (26, 27)
_GATING = {"softmax": 1, "softmax_groups": 1, "sigmoid_groups": 2}


@dataclass(frozen=True)
class _HalfRecord:
    """What an artifact would say of a half."""

    layout: str
    shape: tuple[int, ...]
    nbytes: int
    relative_error: float | None

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


class SplitLatents:
    """A source with ``k_b_proj`` and ``v_b_proj`` in place of ``kv_b_proj``; implements ``TensorSource``.

    Parameters
    ----------
    source : TensorSource
    options : LatentOptions
    halves : mapping of str to str
        New name -> the name of the whole.
    """

    def __init__(self, source: TensorSource, options: LatentOptions, halves: dict[str, str]) -> None:
        self.source, self.options, self._halves = source, options, halves
        self.path: Path = source.path
        self.kind, self.config, self.notes = source.kind, source.config, source.notes
        self.records: dict[str, Any] = dict(getattr(source, "records", {}))
        for name, whole in halves.items():
            if (record := self.records.get(whole)) is not None:
                shape, height = self.shape(name), self.options.nope + self.options.value
                rows = self.options.nope if "k_b_proj" in name else self.options.value
                share = record.nbytes * rows // height
                self.records[name] = _HalfRecord(DenseTensor.layout, shape, share, record.relative_error)

    def names(self) -> list[str]:
        """The source's, with the halves for the whole."""
        wholes = set(self._halves.values())
        return [*(n for n in self.source.names() if n not in wholes), *self._halves]

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        o = self.options
        if name not in self._halves:
            return self.source.shape(name)
        return (o.heads, o.kv_lora, o.nope) if "k_b_proj" in name else (o.heads, o.value, o.kv_lora)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; of a half, the narrowest that holds it."""
        whole = self._halves.get(name)
        if whole is None:
            return self.source.dtype(name)
        if self.source.layout(whole) == DenseTensor.layout:
            return self.source.dtype(whole)
        first = self.source.load(whole, slice(0, 1))
        exact = isinstance(first, CodebookTensor) and first.codebook.dtype == np.float16
        return np.dtype(np.float16 if exact and rotation_of(self.source, whole) is None else np.float32)

    def layout(self, name: str) -> str:
        """``dense`` of a half."""
        return DenseTensor.layout if name in self._halves else self.source.layout(name)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some rows of its matrix form."""
        whole = self._halves.get(name)
        if whole is None:
            return self.source.load(name, rows)
        o, shape = self.options, self.shape(name)
        height = o.nope + o.value
        per_head = shape[1]
        start, stop, _ = (rows or slice(None)).indices(matrix_shape(shape)[0])
        parts = [np.empty((0, shape[2]), self.dtype(name))]
        for head in range(start // per_head, -(-stop // per_head)):
            at = head * height + (0 if "k_b_proj" in name else o.nope)
            count = o.nope if "k_b_proj" in name else o.value
            values = self._values(whole, slice(at, at + count))
            first, last = max(start - head * per_head, 0), min(stop - head * per_head, per_head)
            turned = values.T if "k_b_proj" in name else values
            parts.append(turned[first:last].astype(self.dtype(name)))
        joined = np.concatenate(parts)
        return DenseTensor(joined if rows is not None else joined.reshape(shape))

    def _values(self, whole: str, rows: slice) -> Any:
        tensor = self.source.load(whole, rows)
        return tensor.values if isinstance(tensor, DenseTensor) else decoded(self.source, whole, rows)

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into a tensor; a half has none left."""
        return None if name in self._halves else rotation_of(self.source, name)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor."""
        whole = self._halves.get(name)
        self.source.release(name if whole is None else whole, rows if whole is None else None)

    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, where there is one."""
        return self.source.tokenizer_file()

    def side_files(self) -> list[Path]:
        """Config, tokenizer and generation files."""
        return self.source.side_files()

    def close(self) -> None:
        """Close all files."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def split_latents(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The same model with the halves; the source itself where it has them, or no latents."""
    options = config.sections.get(LATENT)
    if not isinstance(options, LatentOptions):
        return source
    arch = config.architecture
    names = arch.index(source.names())
    halves: dict[str, str] = {}
    for layer in range(config.num_hidden_layers):
        place = arch.locate(config, names, "kv_b", layer)
        if place is not None:
            halves |= {arch.tensor_name(part, layer): place.name for part in ("k_b", "v_b")}
    return SplitLatents(source, options, halves) if halves else source


def latent_faults(config: ModelConfig) -> list[str]:
    """Why engines would compute another model; empty where they would not."""
    options, routing = config.sections.get(LATENT), config.sections.get(SECTION)
    if not isinstance(options, LatentOptions) or not isinstance(routing, Routing):
        return []
    faults, layers, sparse = [], config.num_hidden_layers, routing.sparse
    if not options.q_lora and layers not in _LITE_LAYERS:
        faults.append(
            f"{layers} layers without q_lora_rank: engines know such models of 26 and 27 layers in the family {_FAMILY}"
        )
    if options.q_lora and layers in _LITE_LAYERS:
        faults.append(
            f"a model of {layers} layers has no q_lora_rank in the family {_FAMILY} as engines compute it"
        )
    if not options.interleaved:
        faults.append(f"rope_interleave is false, and engines rotate neighbours in the family {_FAMILY}")
    if True in sparse and not all(sparse[sparse.index(True) :]):
        faults.append("dense layers after the first with experts have no place in a GGUF")
    if routing.router == "softmax_groups" and routing.chosen_groups < routing.groups:
        faults.append(
            "topk_method is group_limited_greedy, and engines judge a group by its two best experts, not by its best"
        )
    rope = config.rope
    if rope.type == "yarn" and not math.isclose(
        rope.magnitude, _engine_magnitude(rope.factor, rope.mscale_all_dim)
    ):
        faults.append(
            f"mscale is {rope.mscale:g} and mscale_all_dim {rope.mscale_all_dim:g}, and engines expect them to be equal"
        )
    return faults


def _engine_magnitude(factor: float, all_dim: float) -> float:
    """What engines multiply cosine and sine by: ``mscale`` is taken to be ``mscale_all_dim``, or 1 without that."""
    return 1.0 if all_dim or factor <= 1 else 0.1 * math.log(factor) + 1.0


def latent_pairs(config: ModelConfig) -> dict[str, KeyValue]:
    """Keys of the family that others have not or mean otherwise; empty for other models."""
    options, routing = config.sections.get(LATENT), config.sections.get(SECTION)
    if not isinstance(options, LatentOptions) or not isinstance(routing, Routing):
        return {}
    sparse = routing.sparse
    counts: dict[str, int] = {
        "attention.head_count_kv": 1,
        "attention.key_length": options.kv_lora + options.rope,
        "attention.value_length": options.kv_lora,
        "attention.key_length_mla": options.nope + options.rope,
        "attention.value_length_mla": options.value,
        "attention.kv_lora_rank": options.kv_lora,
        "leading_dense_block_count": sparse.index(True) if True in sparse else len(sparse),
        "expert_count": routing.experts,
        "expert_used_count": routing.chosen,
        "expert_feed_forward_length": routing.expert_size,
        "expert_shared_count": routing.shared_size // routing.expert_size,
        "expert_gating_func": _GATING[routing.router],
    }
    if options.q_lora:
        counts["attention.q_lora_rank"] = options.q_lora
    if routing.router == "sigmoid_groups":
        counts |= {"expert_group_count": routing.groups, "expert_group_used_count": routing.chosen_groups}
    pairs = {key: KeyValue(value, ValueType.UINT32) for key, value in counts.items()}
    pairs["expert_weights_scale"] = KeyValue(routing.scale, ValueType.FLOAT32)
    pairs["expert_weights_norm"] = KeyValue(routing.normalise, ValueType.BOOL)
    if config.rope.type == "yarn" and config.rope.mscale_all_dim:
        pairs["rope.scaling.yarn_log_multiplier"] = KeyValue(
            0.1 * config.rope.mscale_all_dim, ValueType.FLOAT32
        )
    return {f"{_FAMILY}.{key}": value for key, value in pairs.items()}
