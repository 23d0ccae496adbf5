"""How an artifact's tensors are spread over weight files; exact sizes before any data exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trapetum.errors import FormatError
from trapetum.formats.safetensors_writer import Entry, aligned_order, file_size, plan_shards, shard_names
from trapetum.formats.stored_arrays import Arrays, stored_entries

__all__ = ["METADATA", "Shard", "make_shard", "shard_layout"]

METADATA = {"format": "pt"}  # loaders of the Hugging Face world look for it


@dataclass(frozen=True)
class Shard:
    """One weight file.

    Parameters
    ----------
    file : str
        Its name.
    tensors : tuple of str
        The tensors (not arrays) in it.
    entries : tuple of Entry
        Their stored arrays in file order: by falling item size, then the tensors' order, then suffix.
    size : int
        Exact bytes of the file.
    """

    file: str
    tensors: tuple[str, ...]
    entries: tuple[Entry, ...]
    size: int


def make_shard(file: str, tensors: Mapping[str, Arrays]) -> Shard:
    """The shard ``file`` that holds exactly these tensors."""
    entries = aligned_order(e for name, arrays in tensors.items() for e in stored_entries(name, arrays))
    return Shard(file, tuple(tensors), tuple(entries), file_size(entries, METADATA))


def shard_layout(tensors: Mapping[str, Arrays], max_shard_bytes: int) -> list[Shard]:
    """Spread tensors over files in their order.

    Parameters
    ----------
    tensors : mapping of tensor name to (mapping of suffix to (dtype, shape))
        As ``Scheme.arrays`` announces them.
    max_shard_bytes : int
        Data bytes a file may hold; a larger tensor gets a file of its own.

    Returns
    -------
    list of Shard
        ``sum(s.size)`` is what the finished artifact's weight files take, to the byte.

    Raises
    ------
    FormatError
        If two tensors would be stored under one name.
    """
    owner: dict[str, str] = {}
    for name, arrays in tensors.items():
        for entry in stored_entries(name, arrays):
            if owner.setdefault(entry.name, name) != name:
                raise FormatError(
                    f"tensors {owner[entry.name]} and {name} would both be stored as {entry.name}"
                )
    names = list(tensors)
    sizes = [sum(e.nbytes for e in stored_entries(n, tensors[n])) for n in names]
    groups = plan_shards(sizes, max_shard_bytes)
    files = shard_names(len(groups), numbered=True)
    return [
        make_shard(file, {names[i]: tensors[names[i]] for i in group}) for file, group in zip(files, groups)
    ]
