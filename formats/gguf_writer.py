"""Write GGUF files as a stream: everything is announced first, then the data follow in the announced order.

A writer is in one of four states and each call belongs to one of them::

    PAIRS   add, add_tensor          metadata and tensors are announced; nothing is written
    DATA    begin -> write ...       headers are written; data come tensor by tensor, in any number of pieces
    DONE    leaving the ``with``     padding, fsync, and all files get their names at once
    (an exception anywhere)          all temporary files are removed

llama.cpp wants the data in the order of the list and without gaps but the padding; the writer cannot do
otherwise. Above ``max_shard_bytes`` the tensors are spread over ``NAME-00001-of-0000N.gguf``; the first
file carries the metadata, all carry ``split.no``, ``split.count`` and ``split.tensors.count``.

Source: the GGUF specification (ggml, docs/gguf.md); llama.cpp, tools/gguf-split.
"""

from __future__ import annotations

import contextlib
import enum
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import FormatError
from trapetum.formats.atomic import atomic_file
from trapetum.formats.gguf_header import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_NAME_BYTES,
    padded,
)
from trapetum.formats.gguf_values import KeyValue, ValueType, encode_string, encode_value
from trapetum.formats.safetensors_writer import plan_shards
from trapetum.formats.strict_json import shown
from trapetum.tensors import matrix_shape

__all__ = ["GgufWriter", "split_names"]

VERSION = 3
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


class _State(enum.Enum):
    PAIRS = "announcing metadata and tensors"
    DATA = "writing data"
    DONE = "complete"


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    type_id: int
    nbytes: int

    def info(self, offset: int) -> bytes:
        dims = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *self.shape[::-1])
        return encode_string(self.name) + dims + struct.pack("<IQ", self.type_id, offset)


@dataclass(frozen=True)
class _Shard:
    path: Path
    entries: list[_Entry]
    header: bytes

    def size(self, alignment: int) -> int:
        return len(self.header) + sum(padded(e.nbytes, alignment) for e in self.entries)


def split_names(path: Path, count: int) -> list[Path]:
    """File names of a model in ``count`` files.

    Examples
    --------
    >>> [p.name for p in split_names(Path("m.gguf"), 2)]
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


class GgufWriter:
    """One GGUF model, in one file or several; a context manager.

    Parameters
    ----------
    path : path
        Final name, ``NAME.gguf``.
    alignment : int
        A power of two; written as a key when it is not 32.
    max_shard_bytes : int, optional
        Data bytes a file; more are split over several.
    replace : bool
        Whether existing files may be replaced.

    Examples
    --------
    >>> import tempfile
    >>> from trapetum.formats.gguf import GgufFile
    >>> with tempfile.TemporaryDirectory() as d:
    ...     with GgufWriter(Path(d) / "m.gguf") as w:
    ...         w.add("general.architecture", "llama")
    ...         w.add_tensor("a.weight", "F32", (2, 2))
    ...         paths = w.begin()
    ...         w.write("a.weight", np.ones((2, 2), np.float32))
    ...     with GgufFile.open(Path(d) / "m.gguf") as f:
    ...         f.metadata["general.architecture"], f.load("a.weight").dequantize().tolist()
    ('llama', [[1.0, 1.0], [1.0, 1.0]])
    """

    def __init__(
        self,
        path: str | Path,
        *,
        alignment: int = DEFAULT_ALIGNMENT,
        max_shard_bytes: int | None = None,
        replace: bool = True,
    ) -> None:
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment is {alignment}; a power of two is required")
        self.path = Path(path)
        self.alignment = alignment
        self._max_shard_bytes = max_shard_bytes
        self._replace = replace
        self._state = _State.PAIRS
        self._kv: dict[str, KeyValue] = {}
        self._entries: dict[str, _Entry] = {}
        self._stack = contextlib.ExitStack()
        self._files: list[tuple[BinaryIO, list[_Entry]]] = []
        self._pending: list[tuple[BinaryIO, _Entry]] = []
        self._left = 0
        if alignment != DEFAULT_ALIGNMENT:
            self.add(ALIGNMENT_KEY, alignment, ValueType.UINT32)

    # ------------------------------------------------------------------ announcing
    def add(
        self, key: str, value: Any, type: ValueType | None = None, item_type: ValueType | None = None
    ) -> None:
        """Announce one metadata value.

        Parameters
        ----------
        key : str
        value : bool, int, float, str, or a sequence or array of them
        type : ValueType, optional
            May be omitted for a str, a bool and, with ``item_type``, an array.
        item_type : ValueType, optional
            Of an array.

        Raises
        ------
        FormatError
            For a key that occurs twice or belongs to the writer, and a value that does not fit its type.
        """
        self._require(_State.PAIRS)
        if type is None:
            guess = ValueType.BOOL if isinstance(value, bool) else ValueType.STRING
            type = guess if item_type is None else ValueType.ARRAY
        if key in self._kv:
            raise FormatError(f"{self.path}: the GGUF key {shown(key)} occurs twice")
        if not key or "\0" in key or key in _SPLIT_KEYS:
            raise FormatError(f"{self.path}: {shown(key)} cannot be a GGUF key of a model")
        if key == ALIGNMENT_KEY and (type is not ValueType.UINT32 or value != self.alignment):
            raise FormatError(
                f"{self.path}: {ALIGNMENT_KEY} is {value}, the writer aligns to {self.alignment}"
            )
        entry = KeyValue(value, type, item_type)
        encode_value(entry, key)
        self._kv[key] = entry

    def add_tensor(
        self, name: str, type: str | int, shape: tuple[int, ...], nbytes: int | None = None
    ) -> None:
        """Announce the next tensor.

        Parameters
        ----------
        name : str
            At most 63 bytes.
        type : str or int
            Name of a block type, or any id (then ``nbytes`` is needed).
        shape : tuple of int
            As in NumPy, row length last; at most 4 dimensions.
        nbytes : int, optional
            Data bytes of a type that is given by its id.

        Raises
        ------
        FormatError
            For a name that is too long or occurs twice, too many dimensions, or rows that are not whole
            blocks.
        """
        self._require(_State.PAIRS)
        what = f"{self.path}: tensor {shown(name)}"
        length = len(name.encode("utf-8", "surrogateescape"))
        if not 1 <= length <= MAX_NAME_BYTES:
            raise FormatError(
                f"{what} has a name of {length} bytes; GGUF allows {MAX_NAME_BYTES}",
                hint="Rename the tensor: names are never cut, since two could become one.",
            )
        if name in self._entries:
            raise FormatError(f"{what} occurs twice")
        if len(shape) > MAX_DIMS:
            raise FormatError(f"{what} has {len(shape)} dimensions; GGUF allows {MAX_DIMS}")
        if isinstance(type, str):
            kind = BLOCK_TYPES[type]
            rows, width = matrix_shape(shape)
            try:
                nbytes = rows * kind.row_bytes(width)
            except ValueError as error:
                raise FormatError(f"{what}: {error}") from None
            type = kind.id
        if nbytes is None:
            raise ValueError(f"nbytes is needed for a tensor of type id {type}")
        self._entries[name] = _Entry(name, tuple(shape), type, nbytes)

    def sizes(self) -> dict[Path, int]:
        """The files that there will be, and their exact bytes; nothing is written."""
        self._require(_State.PAIRS)
        return {shard.path: shard.size(self.alignment) for shard in self._shards()}

    # ------------------------------------------------------------------ writing
    def begin(self) -> list[Path]:
        """Write the headers.

        Returns
        -------
        list of Path
            The files that there will be.

        Raises
        ------
        OutputError
            If a file cannot be written.
        """
        self._require(_State.PAIRS)
        shards = self._shards()
        self._state = _State.DATA
        for shard in shards:
            # Left in reverse order: the first file, which an engine is pointed at, gets its name last.
            file = self._stack.enter_context(
                atomic_file(shard.path, size=shard.size(self.alignment), replace=self._replace)
            )
            file.write(shard.header)
            self._pending += [(file, entry) for entry in shard.entries]
        self._pending.reverse()
        self._left = self._pending[-1][1].nbytes if self._pending else 0
        self._skip_empty()
        return [shard.path for shard in shards]

    def write(self, name: str, data: NDArray[Any] | bytes) -> None:
        """Append data to the tensor whose turn it is.

        Parameters
        ----------
        name : str
            Of the tensor; must be the next that is not complete.
        data : ndarray or bytes
            Rows, or any piece, in C order.

        Raises
        ------
        ValueError
            If it is another tensor's turn or the data are too long.
        """
        self._require(_State.DATA)
        if not self._pending or self._pending[-1][1].name != name:
            turn = self._pending[-1][1].name if self._pending else "nothing"
            raise ValueError(f"{self.path}: data of {name!r} came where {turn!r} was announced")
        file, entry = self._pending[-1]
        flat = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        raw = np.ascontiguousarray(flat).reshape(-1).view(np.uint8).data
        if raw.nbytes > self._left:
            raise ValueError(f"{self.path}: {name!r} got more than its {entry.nbytes} bytes")
        file.write(raw)
        self._left -= raw.nbytes
        if not self._left:
            self._next()
            self._skip_empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stack.__exit__(kind, value, trace)
            return
        with self._stack:
            if self._state is not _State.DATA or self._pending:
                names = ", ".join(repr(entry.name) for _, entry in self._pending[::-1][:3])
                raise ValueError(f"{self.path}: data are missing: {names or 'begin() was not called'}")
        self._state = _State.DONE

    # ------------------------------------------------------------------ internals
    def _require(self, state: _State) -> None:
        if self._state is not state:
            raise ValueError(
                f"{self.path}: the writer is {self._state.value}; this call belongs to: {state.value}"
            )

    def _shards(self) -> list[_Shard]:
        entries = list(self._entries.values())
        sizes = [padded(e.nbytes, self.alignment) for e in entries]
        limit = self._max_shard_bytes if self._max_shard_bytes is not None else sum(sizes) + 1
        parts = [[entries[i] for i in part] for part in plan_shards(sizes, limit)]
        return [
            _Shard(path, part, self._header(part, number, len(parts)))
            for number, (path, part) in enumerate(zip(split_names(self.path, len(parts)), parts))
        ]

    def _header(self, entries: list[_Entry], number: int, count: int) -> bytes:
        kv = dict(self._kv) if number == 0 else {k: v for k, v in self._kv.items() if k == ALIGNMENT_KEY}
        if count > 1:
            values = (number, count, len(self._entries))
            types = (ValueType.UINT16, ValueType.UINT16, ValueType.INT32)
            kv |= {k: KeyValue(v, t) for k, v, t in zip(_SPLIT_KEYS, values, types)}
        parts = [MAGIC, struct.pack("<IQQ", VERSION, len(entries), len(kv))]
        parts += [encode_string(key) + encode_value(entry, key) for key, entry in kv.items()]
        offset = 0
        for entry in entries:
            parts.append(entry.info(offset))
            offset += padded(entry.nbytes, self.alignment)
        header = b"".join(parts)
        return header + bytes(padded(len(header), self.alignment) - len(header))

    def _next(self) -> None:
        file, entry = self._pending.pop()
        file.write(bytes(padded(entry.nbytes, self.alignment) - entry.nbytes))
        self._left = self._pending[-1][1].nbytes if self._pending else 0

    def _skip_empty(self) -> None:
        while self._pending and self._pending[-1][1].nbytes == 0:
            self._next()
