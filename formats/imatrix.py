"""What calibration knows about the inputs of each linear layer: llama.cpp's importance files and our second moments.

Three forms, told apart by their first bytes (docs/formats/imatrix.md has the bytes):

=========  ==============================================================================================
``gguf``   llama.cpp's importance matrix: sums of squared inputs and token counts, a row for each expert
``dat``    its predecessor: mean squares times the number of calls, all experts in one vector
``moments``  ours, a safetensors file: ``mean(x x^T)`` of every distinct input, shared by the weights that read it
=========  ==============================================================================================

Everything is asked for by the checkpoint's name of a weight. An expert that saw no token takes the mean of the experts
that did, weighted by their tokens; it never discards the others. Values that are negative, NaN or infinite are refused
by name: each of them once became NaN in somebody's weights. A stack of experts, quantized as one tensor, takes the
mean of all that saw tokens.

Source: llama.cpp, tools/imatrix/imatrix.cpp and tools/quantize/quantize.cpp.
"""

from __future__ import annotations

import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.formats.gguf import GgufFile
from trapetum.formats.gguf_header import MAGIC
from trapetum.formats.gguf_values import ValueType
from trapetum.formats.gguf_writer import GgufWriter
from trapetum.formats.imatrix_names import is_known, stored_name, written_names
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter, header_bytes

__all__ = [
    "ImatrixFile",
    "InputStatistics",
    "MomentsFile",
    "MomentsWriter",
    "open_statistics",
    "write_imatrix",
]

MOMENTS_FORMAT = "trapetum-moments-1"
_MOST_TOKENS = 10**18


class InputStatistics(ABC):
    """An open file of statistics.

    Attributes
    ----------
    path : Path
    kind : str
        ``gguf``, ``dat`` or ``moments``.
    notes : list of str
        What a person should know.
    """

    path: Path
    kind: str
    notes: list[str]

    @abstractmethod
    def names(self) -> list[str]:
        """Weights that the file knows, in its own spelling."""

    @abstractmethod
    def diagonal(self, name: str, in_features: int) -> NDArray[np.float32] | None:
        """Mean square of each input of a weight.

        Parameters
        ----------
        name : str
            The checkpoint's name of the weight.
        in_features : int

        Returns
        -------
        ndarray of float32, shape (in_features,), or None
            None where nothing is known.

        Raises
        ------
        FormatError
            If the file holds another number of values for this weight, or unusable ones.
        """

    def shared(self, name: str) -> tuple[str, int] | None:
        """(key of the input that a weight reads, tokens) where the file has its moment, else None."""
        return None

    def moment(self, name: str, in_features: int) -> tuple[str, NDArray[np.float32], int] | None:
        """(key of the input, ``mean(x x^T)``, tokens) of a weight; None where the file has diagonals only."""
        return None

    def close(self) -> None:  # noqa: B027 - only one form keeps a file open
        """Close the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Entry:
    """Mean squares of one weight: all experts in one vector, and the tokens that each of them saw."""

    values: NDArray[np.float32]
    counts: NDArray[np.float32]


class ImatrixFile(InputStatistics):
    """llama.cpp's importance matrix, both forms; made by :func:`open_statistics`.

    Parameters
    ----------
    path : Path
    kind : str
    entries : mapping of str to _Entry
        By GGUF name.
    """

    def __init__(self, path: Path, kind: str, entries: Mapping[str, _Entry]) -> None:
        self.path, self.kind, self.notes = path, kind, []
        self._entries = entries
        foreign = [n for n in entries if not is_known(n)]
        if foreign:
            self.notes.append(
                f"{path}: {len(foreign)} entries are of no tensor that we know and are not used: "
                + ", ".join(foreign[:4])
            )

    def names(self) -> list[str]:
        """GGUF names, in file order."""
        return list(self._entries)

    def diagonal(self, name: str, in_features: int) -> NDArray[np.float32] | None:
        """See :meth:`InputStatistics.diagonal`."""
        key, expert = stored_name(name)
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.values.size % in_features or not entry.values.size:
            raise FormatError(
                f"{self.path}: {key} has {entry.values.size} values; a multiple of the {in_features} inputs of "
                f"{name} is needed",
                hint="The file belongs to another model.",
            )
        matrices = entry.values.reshape(-1, in_features)
        if expert is not None and expert >= len(matrices):
            raise FormatError(f"{self.path}: {key} has {len(matrices)} experts; {name} is number {expert}")
        if "_exps." not in key and len(matrices) != 1:
            raise FormatError(
                f"{self.path}: {key} has {entry.values.size} values; {name} has {in_features} inputs",
                hint="The file belongs to another model.",
            )
        counts = np.broadcast_to(entry.counts, (len(matrices),)) if entry.counts.size == 1 else entry.counts
        if counts.size != len(matrices):
            raise FormatError(f"{self.path}: {key} has {counts.size} counts for {len(matrices)} matrices")
        if expert is not None and counts[expert] > 0:
            own: NDArray[np.float32] = matrices[expert]
            return own
        if not counts.any():
            return None
        pooled: NDArray[np.float32] = np.average(matrices, axis=0, weights=counts).astype(np.float32)
        return pooled


class MomentsFile(InputStatistics):
    """Our second moments; made by :func:`open_statistics`."""

    def __init__(self, file: SafetensorsFile) -> None:
        self.path, self.kind, self.notes = Path(file.path), "moments", []
        self._file = file
        try:
            inputs = json.loads(file.metadata["inputs"])
            counts = json.loads(file.metadata["tokens"])
        except (KeyError, ValueError) as error:
            raise FormatError(
                f"{self.path}: the keys inputs and tokens of its metadata are not JSON"
            ) from error
        if (
            not isinstance(inputs, dict)
            or not isinstance(counts, dict)
            or not all(isinstance(v, str) and v in file.tensors for v in inputs.values())
            or not all(isinstance(counts.get(v), int) and counts[v] >= 0 for v in inputs.values())
        ):
            raise FormatError(f"{self.path}: its metadata names inputs that are not in the file")
        self._inputs: dict[str, str] = inputs
        self._tokens: dict[str, int] = counts

    def names(self) -> list[str]:
        """Names of the weights."""
        return list(self._inputs)

    def diagonal(self, name: str, in_features: int) -> NDArray[np.float32] | None:
        """See :meth:`InputStatistics.diagonal`."""
        found = self.moment(name, in_features)
        if found is None:
            return None
        squares: NDArray[np.float32] = found[1].diagonal().copy()
        return squares

    def shared(self, name: str) -> tuple[str, int] | None:
        """See :meth:`InputStatistics.shared`."""
        key = self._inputs.get(name)
        return None if key is None or self._tokens[key] == 0 else (key, self._tokens[key])

    def moment(self, name: str, in_features: int) -> tuple[str, NDArray[np.float32], int] | None:
        """See :meth:`InputStatistics.moment`."""
        found = self.shared(name)
        if found is None:
            return None
        key, tokens = found
        info = self._file.tensors[key]
        if info.shape != (in_features, in_features) or info.dtype != np.float32:
            raise FormatError(
                f"{self.path}: {key} is {info.dtype} {list(info.shape)}; float32 [{in_features}, {in_features}] is "
                f"needed for {name}",
                hint="The file belongs to another model.",
            )
        moment = self._file.read(key)
        _check(self.path, key, moment, moment.diagonal())
        return key, moment, tokens

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_statistics(path: str | os.PathLike[str]) -> InputStatistics:
    """Open any of the three forms; everything but the moments themselves is read and checked.

    Raises
    ------
    FormatError
        If the file is none of them, or holds negative, NaN or infinite values.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from None
    if start[:4] == MAGIC:
        return ImatrixFile(path, "gguf", _read_gguf(path))
    if start[8:9] == b"{":
        file_ = SafetensorsFile.open(path)
        try:
            if file_.metadata.get("format") != MOMENTS_FORMAT:
                raise FormatError(
                    f"{path}: a safetensors file, but not one of second moments ({MOMENTS_FORMAT})"
                )
            return MomentsFile(file_)
        except BaseException:
            file_.close()
            raise
    return ImatrixFile(path, "dat", _read_dat(path))


def _check(path: Path, name: str, values: NDArray[Any], squares: NDArray[Any]) -> None:
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise FormatError(f"{path}: {name} holds {bad} NaN or infinite values; finite ones are needed")
    if (squares < 0).any():
        raise FormatError(
            f"{path}: {name} holds {int((squares < 0).sum())} negative values; mean squares are never negative"
        )


def _read_gguf(path: Path) -> dict[str, _Entry]:
    entries = {}
    with GgufFile.open(path) as file:
        if file.metadata.get("general.type") != "imatrix":
            raise FormatError(
                f"{path}: a GGUF file, but its general.type is {file.metadata.get('general.type')!r}, not 'imatrix'"
            )
        for name in file.tensors:
            weight = name.removesuffix(".in_sum2")
            if weight == name:
                continue
            counted = f"{weight}.counts"
            if counted not in file.tensors:
                raise FormatError(f"{path}: {name} has no {counted}")
            for part in (name, counted):
                if file.tensors[part].type_name != "F32":
                    raise FormatError(f"{path}: {part} is {file.tensors[part].type_name}; F32 is needed")
            sums = file.load(name).dequantize()
            counts = file.load(counted).dequantize().reshape(-1)
            sums = sums.reshape(-1, sums.shape[-1])
            _check(path, name, sums, sums)
            _check(path, counted, counts, counts)
            if len(sums) != len(counts):
                raise FormatError(f"{path}: {name} has {len(sums)} rows, but {len(counts)} counts")
            means = sums / np.maximum(counts, np.float32(1.0))[:, None]
            entries[weight] = _Entry(means.astype(np.float32).reshape(-1), counts)
    if not entries:
        raise FormatError(f"{path}: no tensor NAME.in_sum2 is in this importance file")
    return entries


def _read_dat(path: Path) -> dict[str, _Entry]:
    data = path.read_bytes()
    at = 0

    def number(what: str, most: int) -> int:
        nonlocal at
        if at + 4 > len(data):
            raise FormatError(f"{path}: ends at byte {len(data)} where {what} should be")
        (value,) = struct.unpack_from("<i", data, at)
        if not 0 <= value <= most:
            raise FormatError(
                f"{path}: {what} at byte {at} is {value}; 0 to {most} are possible in this file"
            )
        at += 4
        return int(value)

    entries: dict[str, _Entry] = {}
    for index in range(number("the number of entries", len(data) // 12)):
        length = number(f"the length of name {index}", min(4096, len(data) - at - 4))
        name = data[at : at + length].decode("utf-8", "replace")
        at += length
        calls = number(f"the calls of {name!r}", 2**31 - 1)
        count = number(f"the number of values of {name!r}", (len(data) - at - 4) // 4)
        values = np.frombuffer(data, "<f4", count, at).astype(np.float32)
        at += 4 * count
        if name in entries:
            raise FormatError(f"{path}: {name!r} occurs twice")
        _check(path, repr(name), values, values)
        if count:
            entries[name] = _Entry(values / np.float32(max(calls, 1)), np.ones(1, np.float32))
    if not entries:
        raise FormatError(f"{path}: holds no importance of any tensor")
    return entries


def write_imatrix(
    path: str | os.PathLike[str],
    squares: Mapping[str, tuple[NDArray[Any], int]],
    *,
    datasets: Sequence[str] = (),
    chunk_size: int = 512,
    replace: bool = True,
) -> list[str]:
    """Write the GGUF form, which llama.cpp's quantizer reads.

    Parameters
    ----------
    path : path-like
    squares : mapping of str to (ndarray, int)
        By the checkpoint's name of the weight: sum of squares of each input [in_features], and tokens. Experts of a
        layer become rows of one stack. Of a stack of all experts, [experts, in_features]: engines want as many rows as
        there are experts, and llama.cpp's quantizer stops where they are fewer.
    datasets : sequence of str
        What was read; informative.
    chunk_size : int
        Tokens in a sequence.
    replace : bool

    Returns
    -------
    list of str
        Weights that have no GGUF name and were left out.
    """
    stacks: dict[str, dict[int | None, tuple[NDArray[Any], int]]] = {}
    left_out = []
    for name, value in squares.items():
        keys = written_names(name)
        left_out += [] if keys else [name]
        for key, expert in keys:
            stacks.setdefault(key, {})[expert] = value
    most = max((count for stack in stacks.values() for _, count in stack.values()), default=0)
    arrays = {}
    for key, stack in sorted(stacks.items()):
        members = [stack[expert] for expert in sorted(stack, key=lambda e: e or 0)]
        rows = [np.atleast_2d(np.asarray(sums, np.float32)) for sums, _ in members]
        arrays[f"{key}.in_sum2"] = np.concatenate(rows)
        counts = [count for row, (_, count) in zip(rows, members) for _ in row]
        arrays[f"{key}.counts"] = np.array(counts, np.float32)[:, None]
    with GgufWriter(Path(path), replace=replace) as writer:
        writer.add("general.type", "imatrix")
        writer.add("imatrix.datasets", list(datasets), ValueType.ARRAY, ValueType.STRING)
        writer.add("imatrix.chunk_count", -(-most // chunk_size), ValueType.UINT32)
        writer.add("imatrix.chunk_size", chunk_size, ValueType.UINT32)
        for name, array in arrays.items():
            writer.add_tensor(name, "F32", array.shape)
        writer.begin()
        for name, array in arrays.items():
            writer.write(name, array)
    return left_out


class MomentsWriter:
    """Second moments as they come, layer after layer; a context manager.

    Parameters
    ----------
    path : path-like
    inputs : iterable of (tuple of str, int)
        The distinct inputs in the order of writing: the weights that read each, and its length.
    datasets : sequence of str
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inputs: Iterable[tuple[Sequence[str], int]],
        datasets: Sequence[str] = (),
    ) -> None:
        entries = []
        shared: dict[str, str] = {}
        for weights, width in inputs:
            key = f"{weights[0]}.moment"
            entries.append(Entry(key, np.dtype(np.float32), (width, width)))
            shared |= dict.fromkeys(weights, key)
        self._tokens = {e.name: _MOST_TOKENS for e in entries}  # room for any number
        self._metadata = {
            "format": MOMENTS_FORMAT,
            "inputs": json.dumps(shared),
            "datasets": json.dumps(list(datasets)),
        }
        reserve = len(header_bytes(entries, self._with_tokens()))
        self._writer = SafetensorsWriter(Path(path), entries, self._with_tokens(), reserve=reserve)

    def _with_tokens(self) -> dict[str, str]:
        return {**self._metadata, "tokens": json.dumps(self._tokens)}

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._writer.metadata = self._with_tokens()
        self._writer.__exit__(*exc)

    def write(self, weights: Sequence[str], moment: NDArray[Any], tokens: int) -> None:
        """Write the next input's ``mean(x x^T)`` over so many tokens."""
        key = f"{weights[0]}.moment"
        self._tokens[key] = tokens
        self._writer.write(key, np.ascontiguousarray(moment, np.float32))
