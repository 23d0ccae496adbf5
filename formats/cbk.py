"""Reading .cbk files; ``formats.cbk_records`` says what is in one, docs/formats/cbk.md is the byte table.

The format has no names, no checksum and no real vocabulary size, so this reader trusts nothing: opening
checks magic, header, every size rule and the exact length of the file; loading a tensor checks that its
floats are finite; :meth:`CbkFile.faults` reads everything once, padding and the manifest's checksums
included. What the file cannot say is taken from the files beside it (manifest, config.json, tokenizer.json)
if they fit its header.

Codebooks are float32 on disk, while the GPU runtimes round them to float16 at upload: a loaded tensor keeps
the float32 values.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.formats.cbk_additive import parse_additive
from trapetum.formats.cbk_header import read_header
from trapetum.formats.cbk_manifest import MODEL_FILE, is_intact, manifest_paths
from trapetum.formats.cbk_matrix import ENTRIES, unpack_s16, unpack_s256
from trapetum.formats.cbk_records import STORED, CbkHeader, Record
from trapetum.formats.checksums import file_sha256
from trapetum.formats.mapped import MappedFile
from trapetum.formats.strict_json import parse_json, shown
from trapetum.tensors import AdditiveTensor, CodebookTensor, DenseTensor, QuantizedTensor

__all__ = ["CbkFile", "padded_vocab"]

_DENSE: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}
_UNPACK = {"S16": unpack_s16, "S256": unpack_s256}
# Rows of these two are padded; by name, so that the record tables need not say it.
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
# Keys that a config.json beside the file may add; the others are the header's, or mean another architecture.
_BORROWED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
_CHUNK = 16 << 20


def padded_vocab(vocab_size: int) -> int:
    """The next multiple of 256, as the header stores it."""
    return -(-vocab_size // 256) * 256


class CbkFile:
    """A .cbk as a ``TensorSource``: Hugging Face names, [out, in] order; made by :meth:`open`.

    Rows that only pad the vocabulary are hidden where the real size is known (``vocab_known``).

    Attributes
    ----------
    header : CbkHeader
    records : dict of str to Record
    manifest : dict or None
        Content of the manifest beside the file, ``manifest_path``.
    vocab_known : bool
        Whether ``config["vocab_size"]`` is the real size rather than the padded one.
    """

    kind = "cbk"

    def __init__(
        self, path: Path, data: MappedFile, header: CbkHeader, vocab_size: int | None = None
    ) -> None:
        self.path = path
        self.header = header
        self.records: dict[str, Record] = {r.name: r for r in header.records()}
        self.notes: list[str] = [] if data.note is None else [data.note]
        self._data = data
        self.manifest_path: Path | None = None
        self.manifest = self._read_manifest()
        beside = self._neighbour_config()
        if vocab_size is not None and "vocab_size" not in beside:
            if padded_vocab(vocab_size) != header.sizes.get("vocab"):
                raise FormatError(
                    f"{path}: a vocabulary of {vocab_size} does not fit the header's {header.sizes.get('vocab')}"
                )
            beside["vocab_size"] = vocab_size
        self.vocab_known = "vocab_size" in beside
        self.config = self._synthesize(beside)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, mmap: bool = True, vocab_size: int | None = None
    ) -> CbkFile:
        """Open and check everything that the header decides.

        Parameters
        ----------
        path : path
            The file, or a folder that holds ``model.cbk``.
        mmap : bool
            Map the file; where that is refused it is read with ``pread``.
        vocab_size : int, optional
            The real size, for a file with nothing beside it that says so.

        Raises
        ------
        FormatError
            If magic, header, sizes or length of the file are wrong.
        """
        file = Path(path)
        if file.is_dir():
            file = file / MODEL_FILE
        data = MappedFile.open(file, mmap=mmap)
        try:
            return cls(file, data, read_header(file, data), vocab_size)
        except BaseException:
            data.close()
            raise

    def names(self) -> list[str]:
        """Names in file order."""
        return list(self.records)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without padding rows, where the real vocabulary is known."""
        record = self.records[name]
        if name in _VOCABULARY and self.vocab_known:
            return int(self.config["vocab_size"]), record.shape[1]
        return record.shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype of a dense record; float32 for a codebook, and where values are decoded (``STORED``)."""
        record = self.records[name]
        return np.dtype("<f4") if record.stored else _DENSE.get(record.kind, np.dtype("<f4"))

    def layout(self, name: str) -> str:
        """``dense``, ``codebook`` or ``additive``."""
        kind = self.records[name].kind
        if kind in _DENSE:
            return DenseTensor.layout
        return CodebookTensor.layout if kind in _UNPACK else AdditiveTensor.layout

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """One tensor, or some of its rows.

        Parameters
        ----------
        name : str
        rows : slice, optional
            Rows of the matrix, step 1.

        Returns
        -------
        DenseTensor (f16, f32), CodebookTensor (codebook float32) or AdditiveTensor

        Raises
        ------
        FormatError
            If a value is not finite, or an additive record has another form than the header says.
        """
        record, shape = self.records[name], self.shape(name)
        matrix = shape if len(shape) == 2 else (1, *shape)
        start, stop, _ = (rows or slice(None)).indices(matrix[0])
        if self.layout(name) == "dense":
            dtype = _DENSE[record.kind]
            step = matrix[1] * dtype.itemsize
            raw = self._data.read(record.offset + start * step, record.offset + max(stop, start) * step)
            values = raw.view(dtype).reshape(-1, matrix[1])
            self._finite(name, values)
            if record.stored:
                values = STORED[record.stored].decode(values.astype(np.float32), self.header.sizes)
            return DenseTensor(values if rows is not None else values.reshape(shape))
        part = slice(start, max(start, stop))
        if record.kind not in _UNPACK:
            whole = self._additive(record)
            self._finite(name, whole.codebooks)
            self._finite(name, whole.scales[part])
            return AdditiveTensor(whole.codes[:, :, part], whole.codebooks, whole.scales[part])
        packed, table = self._matrix(record)
        codes, codebook = _UNPACK[record.kind](packed, table, part)
        self._finite(name, codebook)
        return CodebookTensor(codes, codebook)

    def tokenizer_file(self) -> Path | None:
        """``tokenizer.json`` beside the file."""
        file = self.path.with_name("tokenizer.json")
        return file if file.is_file() else None

    def side_files(self) -> list[Path]:
        """config, tokenizer and generation files that travel with a folder export."""
        if self.path.name != MODEL_FILE:
            return [f for f in [self.tokenizer_file()] if f is not None]
        names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        return [f for f in (self.path.with_name(n) for n in names) if f.is_file()]

    def faults(self, advance: Callable[[int], None] = lambda count: None) -> Iterator[tuple[str, str]]:
        """Read everything once and yield what is wrong.

        Parameters
        ----------
        advance : callable
            Called with the bytes of each record read.

        Yields
        ------
        (record or file name, sentence)
            Values that are not finite, padding that is not zero, and what differs from the manifest's checksums.
        """
        yield from self._manifest_faults()
        known = {e["name"]: e.get("sha256") for e in (self.manifest or {}).get("records", [])}
        for name, record in self.records.items():
            if self.manifest is not None and self._digest(record) != known.get(name):
                yield name, "the bytes differ from the manifest's checksum"
            values, padding = self._checked(name, record)
            if bad := int(np.count_nonzero(~np.isfinite(values))):
                yield name, f"{bad} values are not finite"
            if np.any(padding):
                yield name, "rows that pad the vocabulary are not zero"
            self.release(name)
            advance(record.nbytes)

    def _manifest_faults(self) -> Iterator[tuple[str, str]]:
        """What does not need the records: the manifest itself, the header, the files beside it."""
        if self.manifest is None or self.manifest_path is None:
            return
        if not is_intact(self.manifest_path.read_bytes()):
            yield self.manifest_path.name, "the manifest was changed after it was written"
        header = self._data.read(0, self.header.nbytes)
        if hashlib.sha256(header.data).hexdigest() != self.manifest.get("header_sha256"):
            yield "header", "the header differs from the manifest's checksum"
        listed = self.manifest.get("files")
        for name, digest in listed.items() if isinstance(listed, dict) else ():
            file = self.path.with_name(Path(name).name)
            if not file.is_file() or file_sha256(file) != digest:
                yield file.name, "the file is missing or differs from the manifest's checksum"

    def release(self, name: str, rows: slice | None = None) -> None:
        """Let the system drop this tensor's pages; rows lie all over a matrix, so ``rows`` changes nothing."""
        record = self.records[name]
        self._data.release(record.offset, record.offset + record.nbytes)

    def close(self) -> None:
        """Give the file back; arrays loaded before stay valid."""
        self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, name: str, record: Record) -> tuple[NDArray[Any], NDArray[Any]]:
        """Every float of a record, and those of its padding rows."""
        rows = self.shape(name)[0]
        if record.kind in _DENSE:
            values = self._data.read(record.offset, record.offset + record.nbytes).view(_DENSE[record.kind])
            return values, values.reshape(record.shape)[rows:]
        if record.kind in _UNPACK:
            table = self._matrix(record)[1]
            return table, table[:, rows:]
        whole = self._additive(record)
        return np.concatenate([whole.codebooks.reshape(-1), whole.scales]), whole.scales[rows:]

    def _additive(self, record: Record) -> AdditiveTensor:
        what = f"{self.path}: tensor {record.name}"
        found = parse_additive(self._data.read(record.offset, record.offset + record.nbytes).data, what)
        count = int(record.kind[1:])
        if found.shape != record.shape or found.num_codebooks != count:
            raise FormatError(
                f"{what}: its record is {list(found.shape)} with {found.num_codebooks} codebooks; the header says "
                f"{list(record.shape)} with {count}"
            )
        return found

    def _matrix(self, record: Record) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        out, inputs = record.shape
        entries = ENTRIES[record.kind]
        middle = record.offset + record.nbytes - 4 * entries * out
        packed = self._data.read(record.offset, middle).reshape(inputs, -1)
        table = self._data.read(middle, record.offset + record.nbytes)
        return packed, table.view("<f4").reshape(entries, out)

    def _digest(self, record: Record) -> str:
        digest = hashlib.sha256()
        end = record.offset + record.nbytes
        for start in range(record.offset, end, _CHUNK):
            part = self._data.read(start, min(start + _CHUNK, end))
            digest.update(part.data)
        return digest.hexdigest()

    def _finite(self, name: str, values: NDArray[Any]) -> None:
        if bad := int(np.count_nonzero(~np.isfinite(values))):
            raise FormatError(
                f"{self.path}: tensor {name}: {bad} values are not finite",
                hint="The file is damaged, or was written from values beyond the range of float16.",
            )

    def _read_manifest(self) -> dict[str, Any] | None:
        for file in manifest_paths(self.path):
            if not file.is_file():
                continue
            content = _json_object(file)
            named = [e.get("name") for e in content.get("records", []) if isinstance(e, dict)]
            if named != list(self.records):
                raise FormatError(
                    f"{file}: is not the manifest of {self.path.name}: its list of records is another one",
                    hint="Move that file away if it belongs to something else.",
                )
            self.manifest_path = file
            return content
        return None

    def _neighbour_config(self) -> dict[str, Any]:
        """Real vocabulary size and token ids, from the manifest or from config.json."""
        sizes = self.header.sizes
        if "vocab" not in sizes:  # a block without embedding and head
            return {}
        candidates: list[tuple[Path | None, dict[str, Any]]] = []
        if self.manifest is not None:
            candidates.append((None, self.manifest.get("config", {})))
        file = self.path.with_name("config.json")
        if file.is_file():
            candidates.append((file, _json_object(file)))
        for origin, config in candidates:
            vocab = config.get("vocab_size")
            fits = isinstance(vocab, int) and vocab > 0 and padded_vocab(vocab) == sizes["vocab"]
            if origin is None or (fits and config.get("hidden_size") == sizes["hidden"]):
                if not fits:
                    raise FormatError(
                        f"{self.path}: the manifest's vocab_size is {shown(vocab)}, which does not fit "
                        f"the header's {sizes['vocab']}"
                    )
                return {k: config[k] for k in ("vocab_size", *_BORROWED) if config.get(k) is not None}
            self.notes.append(f"{file.name} beside the file belongs to another model; ignored")
        return {}

    def _synthesize(self, beside: dict[str, Any]) -> dict[str, Any]:
        layout, values = self.header.layout, self.header.values
        return {
            **layout.config(values),
            **{key: values[field] for key, field in layout.config_keys.items()},
            "trapetum_inv_freq": [float(v) for v in self.header.inv_freq],
            **beside,
        }


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(file.read_bytes(), str(file), constants=True)
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{file}: holds no JSON object")
    return content
