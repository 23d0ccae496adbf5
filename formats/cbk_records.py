"""What a .cbk file holds, as data: header fields, the walk of its records, and the rules of their sizes.

A .cbk has no tensor table: it is a magic, a header of integers and floats, and one sequential walk of
records whose lengths all follow from the header (docs/formats/cbk.md has the byte table). So one
:class:`CbkLayout` a magic says everything: reader, writer, size prediction and export share it, and a new
magic is one more entry of ``formats.cbk_layouts.CBK_LAYOUTS`` (plus one entry of ``KINDS`` where it brings a new
kind of record).

=======  ============================================================  ===================================
kind     bytes of shape [out, in] (or [n])                             content
=======  ============================================================  ===================================
f32      4 * n                                                         float32
f16      2 * out * in                                                  float16, row-major, in fastest
S16      out * in / 2 (codes) + 64 * out (codebook f32 [16][out])      see ``formats.cbk_matrix``
S256     out * in (codes) + 1024 * out (codebook f32 [256][out])       see ``formats.cbk_matrix``
A2, A3   24 + 4096 M + 2 * out + M * in / 8 * out                      see ``formats.cbk_additive``
=======  ============================================================  ===================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.formats.cbk_additive import additive_record_size

__all__ = ["KINDS", "STORED", "Block", "CbkHeader", "CbkLayout", "Item", "Record", "Rule", "Stored", "Values"]

Sizes = Mapping[str, int]
Values = Mapping[str, int | float]

KINDS: dict[str, Callable[[tuple[int, ...]], int]] = {
    "f32": lambda shape: 4 * math.prod(shape),
    "f16": lambda shape: 2 * math.prod(shape),
    "S16": lambda shape: shape[0] * shape[1] // 2 + 16 * 4 * shape[0],
    "S256": lambda shape: shape[0] * shape[1] + 256 * 4 * shape[0],
    "A2": lambda shape: additive_record_size(2, *shape),
    "A3": lambda shape: additive_record_size(3, *shape),
}


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Stored:
    """How a record's values relate to those of a checkpoint: ``encode`` before they are written, ``decode`` after."""

    encode: Callable[[Floats, Sizes], Floats]
    decode: Callable[[Floats, Sizes], Floats]


STORED = {
    "": Stored(lambda w, sizes: w, lambda w, sizes: w),
    "plus one": Stored(lambda w, sizes: w + np.float32(1), lambda w, sizes: w - np.float32(1)),
    "times root of hidden": Stored(
        lambda w, sizes: w * np.float32(math.sqrt(sizes["hidden"])),
        lambda w, sizes: w / np.float32(math.sqrt(sizes["hidden"])),
    ),
}
"""Values of ``Item.stored``; for dense records only."""


@dataclass(frozen=True)
class Record:
    """One record of a file: ``name`` as in a Hugging Face checkpoint, ``offset`` in bytes from the start."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    stored: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return KINDS[self.kind](self.shape)


@dataclass(frozen=True)
class Item:
    """A line of a walk: ``name`` may use loop indices (``{layer}``), ``shape`` names sizes of the header.

    ``kind`` may depend on the header (8-bit roles, additive experts); ``stored`` is a key of :data:`STORED`.
    """

    name: str
    kind: str | Callable[[Sizes], str]
    shape: tuple[str, ...]
    when: Callable[[Sizes], bool] | None = None
    stored: str = ""


@dataclass(frozen=True)
class Block:
    """A repeated part of a walk: ``items`` for each value of ``index`` below the size ``count``."""

    index: str
    count: str
    items: tuple[Item | Block, ...]
    when: Callable[[Sizes], bool] | None = None


@dataclass(frozen=True)
class Rule:
    """A constraint on one field or size: ``size`` (``words`` in config.json terms) must be ``demand``."""

    size: str
    words: str
    demand: str
    holds: Callable[[Any], bool]


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
    config : callable
        Entries of the synthesized config.json that follow from the header's values.
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
    config: Callable[[Values], dict[str, Any]]
    config_keys: Mapping[str, str]

    @property
    def format(self) -> str:
        """``struct`` format of the header fields (little-endian, unaligned)."""
        return "<" + "".join(code for _, code in self.fields)

    def sizes(self, values: Values) -> dict[str, int]:
        """Integer fields and everything derived from them."""
        sizes = {name: int(values[name]) for name, code in self.fields if code == "i"}
        for name, rule in self.derived.items():
            sizes[name] = rule(sizes)
        return sizes

    def violations(self, values: Values) -> list[str]:
        """Every broken rule, one phrase each, e.g. ``"hidden_size is 200, not a multiple of 256"``."""
        found = {**values, **self.sizes(values)}
        return [
            f"{rule.words} is {found[rule.size]:g}, not {rule.demand}"
            if isinstance(found[rule.size], float)
            else f"{rule.words} is {found[rule.size]}, not {rule.demand}"
            for rule in self.rules
            if not rule.holds(found[rule.size])
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
    values: Values
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
        for name, kind, shape, stored in _walk(self.layout.walk, self.sizes, self.sizes):
            record = Record(name, kind, shape, offset, stored)
            yield record
            offset += record.nbytes

    def file_bytes(self, limit: float = math.inf) -> int:
        """Exact length of the file; counting ends once it is beyond ``limit`` (the header may be garbage).

        Examples
        --------
        Llama-2-7B; the published file has 3,655,827,760 bytes.

        >>> from trapetum.formats.cbk_layouts import CBK_LAYOUTS
        >>> values = dict(n_layers=32, hidden=4096, n_heads=32, n_kv=32, head_dim=128, inter=11008)
        >>> values |= dict(vocab=32000, eps=1e-5, rope_base=1e4, rope_scale=1.0, has_bias=0)
        >>> CbkHeader(CBK_LAYOUTS["CBK3"], values, np.ones(64, np.float32)).file_bytes()
        3655827760
        """
        end = self.nbytes
        for record in self.records():
            end = record.offset + record.nbytes
            if end > limit:
                break
        return end


def _walk(
    items: tuple[Item | Block, ...], sizes: Sizes, names: Sizes
) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
    for item in items:
        if item.when is not None and not item.when(names):
            continue
        if isinstance(item, Item):
            kind = item.kind if isinstance(item.kind, str) else item.kind(sizes)
            yield item.name.format_map(names), kind, tuple(sizes[s] for s in item.shape), item.stored
        else:
            for index in range(sizes[item.count]):
                yield from _walk(item.items, sizes, {**names, item.index: index})
