"""What a .cbk file holds, as data: header fields, the walk of its records, and the rules of their sizes.

A .cbk has no tensor table: it is a magic, a header of integers and floats, and one sequential walk of
records whose lengths all follow from the header (docs/formats/cbk.md has the byte table). So one
:class:`CbkLayout` a magic says everything: reader, writer, size prediction and export share it, and a new
magic is one more entry of ``CBK_LAYOUTS`` (plus one entry of ``KINDS`` where it brings a new kind of
record).

=====  ============================================================  ===================================
kind   bytes of shape [out, in] (or [n])                             content
=====  ============================================================  ===================================
f32    4 * n                                                         float32
f16    2 * out * in                                                  float16, row-major, in fastest
S16    out * in / 2 (codes) + 64 * out (codebook f32 [16][out])      see ``formats.cbk_matrix``
=====  ============================================================  ===================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CBK_LAYOUTS", "KINDS", "Block", "CbkHeader", "CbkLayout", "Item", "Record", "Rule"]

Sizes = Mapping[str, int]

KINDS: dict[str, Callable[[tuple[int, ...]], int]] = {
    "f32": lambda shape: 4 * math.prod(shape),
    "f16": lambda shape: 2 * math.prod(shape),
    "S16": lambda shape: shape[0] * shape[1] // 2 + 16 * 4 * shape[0],
}


@dataclass(frozen=True)
class Record:
    """One record of a file: ``name`` as in a Hugging Face checkpoint, ``offset`` in bytes from the start."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return KINDS[self.kind](self.shape)


@dataclass(frozen=True)
class Item:
    """A line of a walk: ``name`` may use loop indices (``{layer}``), ``shape`` names sizes of the header."""

    name: str
    kind: str
    shape: tuple[str, ...]
    when: Callable[[Sizes], bool] | None = None


@dataclass(frozen=True)
class Block:
    """A repeated part of a walk: ``items`` for each value of ``index`` below the size ``count``."""

    index: str
    count: str
    items: tuple[Item | Block, ...]
    when: Callable[[Sizes], bool] | None = None


@dataclass(frozen=True)
class Rule:
    """A constraint on one size: ``size`` (``words`` in config.json terms) must be ``demand``."""

    size: str
    words: str
    demand: str
    holds: Callable[[int], bool]


@dataclass(frozen=True)
class CbkLayout:
    """Everything that sets one magic apart.

    Parameters
    ----------
    fields : tuple of (name, code)
        Header after the magic, in file order; code ``i`` is int32, ``f`` float32.
    derived : mapping
        Sizes computed from the fields, by name.
    inv_freq : str
        Name of the size that counts the rotary frequencies.
    stored_inv_freq : bool
        Whether they follow the header as float32; else ``rope_base ** (-2 d / head_dim) / rope_scale``.
    walk : tuple of Item and Block
        The records.
    rules : tuple of Rule
        What reader and kernels of the format demand.
    config : mapping
        Fixed entries of the synthesized config.json.
    config_keys : mapping
        config.json key -> header field.
    """

    magic: str
    fields: tuple[tuple[str, str], ...]
    derived: Mapping[str, Callable[[Sizes], int]]
    inv_freq: str
    stored_inv_freq: bool
    walk: tuple[Item | Block, ...]
    rules: tuple[Rule, ...]
    config: Mapping[str, Any]
    config_keys: Mapping[str, str]

    @property
    def format(self) -> str:
        """``struct`` format of the header fields (little-endian, unaligned)."""
        return "<" + "".join(code for _, code in self.fields)

    def sizes(self, values: Mapping[str, int | float]) -> dict[str, int]:
        """Integer fields and everything derived from them."""
        sizes = {name: int(values[name]) for name, code in self.fields if code == "i"}
        for name, rule in self.derived.items():
            sizes[name] = rule(sizes)
        return sizes

    def violations(self, values: Mapping[str, int | float]) -> list[str]:
        """Every broken rule, one phrase each, e.g. ``"hidden_size is 200, not a multiple of 256"``."""
        sizes = self.sizes(values)
        return [
            f"{rule.words} is {sizes[rule.size]}, not {rule.demand}"
            for rule in self.rules
            if not rule.holds(sizes[rule.size])
        ]


@dataclass(frozen=True, eq=False)
class CbkHeader:
    """A file's header: the layout, its fields by name, and the rotary frequencies.

    Parameters
    ----------
    layout : CbkLayout
    values : mapping of str to int or float
        Every field of ``layout.fields``.
    inv_freq : ndarray of float32, shape (sizes[layout.inv_freq],)
    """

    layout: CbkLayout
    values: Mapping[str, int | float]
    inv_freq: NDArray[np.float32]

    @property
    def sizes(self) -> dict[str, int]:
        """Integer fields and derived sizes."""
        return self.layout.sizes(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes before the first record."""
        stored = 4 * self.sizes[self.layout.inv_freq] if self.layout.stored_inv_freq else 0
        return 4 + struct.calcsize(self.layout.format) + stored

    def to_bytes(self) -> bytes:
        """Magic, fields, frequencies."""
        fields = struct.pack(self.layout.format, *(self.values[name] for name, _ in self.layout.fields))
        stored = self.inv_freq.astype("<f4").tobytes() if self.layout.stored_inv_freq else b""
        return self.layout.magic.encode("ascii") + fields + stored

    def records(self) -> Iterator[Record]:
        """Every record in file order, with its offset."""
        offset = self.nbytes
        for name, kind, shape in _walk(self.layout.walk, self.sizes, self.sizes):
            record = Record(name, kind, shape, offset)
            yield record
            offset += record.nbytes

    def file_bytes(self) -> int:
        """Exact length of the file.

        Examples
        --------
        Llama-2-7B; the published file has 3,655,827,760 bytes.

        >>> values = dict(n_layers=32, hidden=4096, n_heads=32, n_kv=32, head_dim=128, inter=11008)
        >>> values |= dict(vocab=32000, eps=1e-5, rope_base=1e4, rope_scale=1.0, has_bias=0)
        >>> CbkHeader(CBK_LAYOUTS["CBK3"], values, np.ones(64, np.float32)).file_bytes()
        3655827760
        """
        end = self.nbytes
        for record in self.records():
            end = record.offset + record.nbytes
        return end


def _walk(
    items: tuple[Item | Block, ...], sizes: Sizes, names: Sizes
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for item in items:
        if item.when is not None and not item.when(names):
            continue
        if isinstance(item, Item):
            yield item.name.format_map(names), item.kind, tuple(sizes[s] for s in item.shape)
        else:
            for index in range(sizes[item.count]):
                yield from _walk(item.items, sizes, {**names, item.index: index})


def _multiple_of_256(n: int) -> bool:
    return n > 0 and n % 256 == 0


def _power_of_two(n: int) -> bool:
    return 2 <= n <= 1024 and n & (n - 1) == 0


def _positive(n: int) -> bool:
    return 0 < n < 1 << 20


_TILE = "a multiple of 256"
# S16 kernels take 256 output columns at a time; head_dim is reduced in a tree with one thread an element.
_LLAMA_RULES = (
    # bounds the walk of a file whose header is garbage: a million layers would take half a minute to refuse
    Rule("n_layers", "num_hidden_layers", "between 1 and 4096", lambda n: 0 < n <= 4096),
    Rule("n_heads", "num_attention_heads", "between 1 and 1048575", _positive),
    Rule("n_kv", "num_key_value_heads", "between 1 and 1048575", _positive),
    Rule("n_heads % n_kv", "num_attention_heads % num_key_value_heads", "0", lambda n: n == 0),
    Rule("head_dim", "head_dim", "a power of two from 2 to 1024", _power_of_two),
    Rule("hidden", "hidden_size", _TILE, _multiple_of_256),
    Rule("inter", "intermediate_size", _TILE, _multiple_of_256),
    Rule("q_dim", "num_attention_heads * head_dim", _TILE, _multiple_of_256),
    Rule("kv_dim", "num_key_value_heads * head_dim", _TILE, _multiple_of_256),
    Rule("vocab", "the padded vocabulary", _TILE, _multiple_of_256),
)


def _has_bias(sizes: Sizes) -> bool:
    return bool(sizes.get("has_bias"))


_ATTENTION = "model.layers.{layer}.self_attn."
_LLAMA_WALK: tuple[Item | Block, ...] = (
    Item("model.embed_tokens.weight", "f16", ("vocab", "hidden")),
    Block(
        "layer",
        "n_layers",
        (
            Item("model.layers.{layer}.input_layernorm.weight", "f32", ("hidden",)),
            Item(_ATTENTION + "q_proj.weight", "S16", ("q_dim", "hidden")),
            Item(_ATTENTION + "q_proj.bias", "f32", ("q_dim",), _has_bias),
            Item(_ATTENTION + "k_proj.weight", "S16", ("kv_dim", "hidden")),
            Item(_ATTENTION + "k_proj.bias", "f32", ("kv_dim",), _has_bias),
            Item(_ATTENTION + "v_proj.weight", "S16", ("kv_dim", "hidden")),
            Item(_ATTENTION + "v_proj.bias", "f32", ("kv_dim",), _has_bias),
            Item(_ATTENTION + "o_proj.weight", "S16", ("hidden", "q_dim")),
            Item("model.layers.{layer}.post_attention_layernorm.weight", "f32", ("hidden",)),
            Item("model.layers.{layer}.mlp.gate_proj.weight", "S16", ("inter", "hidden")),
            Item("model.layers.{layer}.mlp.up_proj.weight", "S16", ("inter", "hidden")),
            Item("model.layers.{layer}.mlp.down_proj.weight", "S16", ("hidden", "inter")),
        ),
    ),
    Item("model.norm.weight", "f32", ("hidden",)),
    Item("lm_head.weight", "S16", ("vocab", "hidden")),
)
_LLAMA_INTS = tuple((n, "i") for n in ("n_layers", "hidden", "n_heads", "n_kv", "head_dim", "inter", "vocab"))
_LLAMA_DERIVED: dict[str, Callable[[Sizes], int]] = {
    "q_dim": lambda s: s["n_heads"] * s["head_dim"],
    "kv_dim": lambda s: s["n_kv"] * s["head_dim"],
    "half_head": lambda s: s["head_dim"] // 2,
    "n_heads % n_kv": lambda s: s["n_heads"] % s["n_kv"] if s["n_kv"] > 0 else s["n_heads"],
}
_LLAMA_CONFIG_KEYS = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "hidden",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv",
    "head_dim": "head_dim",
    "intermediate_size": "inter",
    "vocab_size": "vocab",
    "rms_norm_eps": "eps",
    "rope_theta": "rope_base",
}


def _llama(magic: str, tail: tuple[tuple[str, str], ...], rules: tuple[Rule, ...], stored: bool) -> CbkLayout:
    return CbkLayout(
        magic=magic,
        fields=(*_LLAMA_INTS, ("eps", "f"), ("rope_base", "f"), *tail),
        derived=_LLAMA_DERIVED,
        inv_freq="half_head",
        stored_inv_freq=stored,
        walk=_LLAMA_WALK,
        rules=(*_LLAMA_RULES, *rules),
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        config_keys=_LLAMA_CONFIG_KEYS,
    )


CBK_LAYOUTS: dict[str, CbkLayout] = {
    layout.magic: layout
    for layout in (
        _llama("CBK1", (), (), stored=False),
        _llama("CBK2", (("rope_scale", "f"),), (), stored=False),
        _llama(
            "CBK3",
            (("rope_scale", "f"), ("has_bias", "i")),
            (Rule("has_bias", "has_bias", "0 or 1", lambda n: n in (0, 1)),),
            stored=True,
        ),
    )
}
