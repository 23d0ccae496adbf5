"""A GGUF model, in one file or split over several, as a ``TensorSource`` with Hugging Face names.

Tensors keep their stored form: plain numbers are dense, block types are ``BlockTensor``. A matrix with a scale beside
it (``NAME.scale``, which multiplies the layer's output) takes it in. config.json is put together from the metadata, and
q and k rows come back in the checkpoint's order. A family outside the table, a tensor without a counterpart or a
rotation that cannot be undone raise where ``config`` is asked for: such a file can be inspected, never run half.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from trapetum.errors import CheckpointError, FormatError, UnsupportedModelError, located
from trapetum.formats.gguf import GgufFile, GgufTensor
from trapetum.formats.gguf_config import model_config, model_family
from trapetum.formats.gguf_delta import DeltaSizes, delta_part
from trapetum.formats.gguf_names import (
    FAMILIES,
    ROPE_FACTORS,
    ROPE_LONG,
    ROPE_SHORT,
    Family,
    hf_name,
    stored_row_order,
)
from trapetum.formats.gguf_rotation import FoldedRotation, read_rotation
from trapetum.formats.gguf_tokenizer import tokenizer_config, tokenizer_json
from trapetum.formats.gguf_writer import split_names
from trapetum.formats.strict_json import shown
from trapetum.rotation import HadamardRotation
from trapetum.tensors import BlockTensor, DenseTensor, QuantizedTensor, TernaryTensor, matrix_shape

__all__ = ["GgufSource", "gguf_file"]

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_TERNARY = ("TQ1_0", "TQ2_0", "Q2_0", "PQ2_0", "PTQ1_0")
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def gguf_file(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF that a path means: the file, or in a folder without safetensors the only model; None for all else."""
    path = Path(path)
    try:
        if path.is_dir():
            found = {p.name: p for p in sorted(path.iterdir()) if p.suffix in (".gguf", ".safetensors")}
            splits = {n: m for n in found if (m := _SPLIT_NAME.fullmatch(n))}
            models = {splits[n]["stem"] if n in splits else n: p for n, p in reversed(found.items())}
            if len(models) != 1:
                return None
            (path,) = models.values()
        with path.open("rb") as file:
            return path if file.read(4) == b"GGUF" else None
    except (OSError, ValueError):  # nothing at all, a NUL in the name
        return None


class GgufSource:
    """An open GGUF model; implements ``TensorSource``. Made by :meth:`open`.

    Attributes
    ----------
    path : Path
        What the user named.
    files : list of GgufFile
        The first one carries the metadata.
    notes : list of str
    """

    kind = "gguf"

    def __init__(self, path: Path, files: list[GgufFile]) -> None:
        self.path, self.files = path, files
        self.notes = [note for file in files for note in file.notes]
        self.metadata = files[0].metadata
        self._folder: Path | None = None
        self._remove: weakref.finalize[Any, Any] | None = None
        self._where: dict[str, tuple[GgufFile, GgufTensor]] = {}
        self._factors: dict[str, np.ndarray[Any, Any]] = {}
        self._strangers: list[str] = []
        self._names = FAMILIES.get(str(self.metadata.get("general.architecture")))
        self._scales: dict[str, np.float32] = {}
        for file in files:
            for name, info in file.tensors.items():
                if name in (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT):
                    self._factors[name] = file.load(name).dequantize().reshape(-1)
                    continue
                scaled = _scaled_weight(name, info, self._names)
                if scaled is not None:
                    self._scales[scaled] = file.load(name).dequantize()[0]
                    continue
                translated = hf_name(name, self._names)
                if translated is None:
                    self._strangers.append(name)
                if (translated or name) in self._where:
                    raise FormatError(f"{file.path}: tensor {shown(name)} occurs in two files of the model")
                self._where[translated or name] = file, info

    @cached_property
    def _family(self) -> Family:
        family = model_family(self.path, self.metadata)
        if self._strangers:
            raise UnsupportedModelError(
                f"{self.path}: tensor {shown(self._strangers[0])} has no counterpart in a "
                f"{family.model_type} model ({len(self._strangers)} such tensors)"
            )
        _ = self._rotation  # one that cannot be undone is refused here
        return family

    @cached_property
    def config(self) -> dict[str, Any]:
        """As config.json would say it.

        Raises
        ------
        UnsupportedModelError
            If the family or a tensor is not one that is known here.
        FormatError
            If metadata are missing.
        """
        return model_config(self.path, self._family, self.metadata, self._shapes(), self._factors)

    @property
    def records(self) -> dict[str, GgufTensor]:
        """Type and stored bytes of each tensor, by its name here."""
        return {name: info for name, (_, info) in self._where.items()}

    def faults(self) -> list[str]:
        """What strict engines refuse about the files, though it can be read here; empty for a good model."""
        found = []
        for file in self.files:
            try:
                GgufFile.open(file.path).close()
            except FormatError as error:
                found.append(error.message)
        return found

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True) -> Self:
        """Open a model; of a split one, any file names it, and so does a folder with nothing else.

        Raises
        ------
        FormatError
            If a file breaks the rules of its format, or a part of a split model is missing.
        UnsupportedModelError
            If the model is of a kind that cannot be read.
        """
        path = gguf_file(path) or Path(path)
        files: list[GgufFile] = []
        try:
            for part in _parts(path):
                files.append(GgufFile.open(part, mmap=mmap, strict=False))
            _check_split(files)
            return cls(path, files)
        except BaseException:
            for file in files:
                file.close()
            raise

    @property
    def title(self) -> str:
        """Name of the file, without its ending and the number of a part."""
        found = _SPLIT_NAME.fullmatch(self.path.name)
        return self.path.name.removesuffix(".gguf") if found is None else found["stem"]

    def file(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self._find(name)[0].path

    def names(self) -> list[str]:
        """Tensor names in the order of the files."""
        return list(self._where)

    @cached_property
    def _rotation(self) -> FoldedRotation | None:
        shapes = {info.name: info.shape for _, info in self._where.values()}
        return read_rotation(self.path, self.metadata, shapes)

    @cached_property
    def _delta(self) -> DeltaSizes | None:
        rotation = self._rotation
        grouped = rotation is not None and rotation.delta_grouped
        with located(self.path):
            sizes = DeltaSizes.read(self.metadata, grouped_output=grouped)
        if sizes is not None and sizes.moved and rotation is not None and not grouped:
            if any(name.endswith(".ssm_out.weight") for name in rotation.names):
                raise UnsupportedModelError(
                    f"{self.path}: a rotation is folded into ssm_out with its heads tiled "
                    "(prism.hadamard.gdn_v_grouped is not set), which cannot be undone here"
                )
        return sizes

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into a tensor; ``load`` gives the weights as stored, rotated."""
        folded = self._rotation
        return folded.rotation if folded is not None and self._find(name)[1].name in folded.names else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        shape, part = self._find(name)[1].shape, delta_part(name)
        if part and self._delta is not None:
            return self._delta.shape(part, shape)
        return (1, *shape) if _is_flat(name, shape) else shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; float32 for a block type."""
        kind = self._find(name)[1].type
        plain = None if kind is None or name in self._scales else kind.dtype
        return np.dtype(np.float32) if plain is None else plain

    def layout(self, name: str) -> str:
        """``"dense"`` or ``"blocks"``; ``"ternary"`` for ternary blocks with a scale beside them."""
        kind = self._find(name)[1].type
        if name in self._scales:
            return TernaryTensor.layout if kind is not None and kind.name in _TERNARY else DenseTensor.layout
        if kind is not None and (part := delta_part(name)) and self._delta is not None:
            if self._delta.cuts(part, kind.block_size):
                return DenseTensor.layout
        return DenseTensor.layout if kind is not None and kind.dtype is not None else BlockTensor.layout

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some rows of its matrix form as a (selected rows, in_features) tensor.

        Raises
        ------
        CheckpointError
            If there is no such tensor.
        UnsupportedModelError
            If its type is unknown.
        """
        stored = self._load(name, rows)
        scale = self._scales.get(name)
        return stored if scale is None else _scaled(stored, scale)

    def as_in_file(self, name: str) -> QuantizedTensor:
        """A tensor as engines read it: norms and rates as other numbers than a checkpoint's, heads in their order."""
        file, info = self._find(name)
        return file.load(info.name)

    def is_scaled(self, name: str) -> bool:
        """Whether a scale beside a tensor multiplies what :meth:`as_in_file` gives."""
        return name in self._scales

    def _load(self, name: str, rows: slice | None) -> QuantizedTensor:
        file, info = self._find(name)
        if (part := delta_part(name)) and (sizes := self._delta) is not None:
            restored = sizes.restored(part, file.load(info.name))
            return restored if rows is None else _rows(restored, rows)
        heads = self._interleaved_heads(name)
        if heads is None:
            return self._as_stored_by_checkpoints(name, file.load(info.name, rows))
        stored = file.load(info.name)
        if isinstance(stored, BlockTensor):
            order = stored_row_order(stored.rows, heads)[rows or slice(None)]
            return BlockTensor(stored.type, stored.blocks[order], info.shape if rows is None else ())
        if not isinstance(stored, DenseTensor):
            raise UnsupportedModelError(f"{file.path}: rows of {shown(info.name)} cannot be reordered")
        order = stored_row_order(info.shape[0], heads)
        values = stored.values[order]
        if rows is not None:
            values = values.reshape(matrix_shape(info.shape))[rows]
        return DenseTensor(values)

    def _as_stored_by_checkpoints(self, name: str, stored: QuantizedTensor) -> QuantizedTensor:
        """Norms of some families are more by one in a file; a map to one value may have lost its row."""
        if _is_flat(name, stored.shape):
            return DenseTensor(stored.dequantize()[None])
        family = self._names
        if family is None or not family.norm_offset or not name.endswith("norm.weight"):
            return stored
        if name.endswith(tuple(family.plain_norms)):
            return stored
        offset = family.norm_offset
        return DenseTensor(stored.dequantize() - np.float32(offset))

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor."""
        file, info = self._find(name)
        file.release(info.name)

    def tokenizer_file(self) -> Path | None:
        """A tokenizer.json made from the metadata; None where that cannot be done (``notes`` say why)."""
        return next((p for p in self.side_files() if p.name == "tokenizer.json"), None)

    def side_files(self) -> list[Path]:
        """config.json and tokenizer files made from the metadata, in a temporary folder that lives until close."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="trapetum-gguf-"))
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            content = {"config.json": self.config, "tokenizer_config.json": tokenizer_config(self.metadata)}
            tokenizer = tokenizer_json(self.metadata)
            if isinstance(tokenizer, str):
                self.notes.append(f"{self.path.name}: no tokenizer can be made of it: {tokenizer}")
            else:
                content["tokenizer.json"] = tokenizer
            for name, value in content.items():
                # Surrogates stand for bytes that are not UTF-8; escaped, they survive in JSON.
                (self._folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        return sorted(self._folder.iterdir())

    def close(self) -> None:
        """Close all files and remove the temporary ones; tensors that were loaded stay valid."""
        if self._remove is not None:
            self._remove()
            self._folder = self._remove = None
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[GgufFile, GgufTensor]:
        try:
            return self._where[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: there is no tensor named {shown(name)}") from None

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in self._where}

    def _interleaved_heads(self, name: str) -> int | None:
        """Heads of a tensor whose rows are stored interleaved; else None."""
        key = _HEADS.get(name.rpartition(".")[0].rpartition(".")[2])
        if key is None or not self._family.interleaved:
            return None
        heads, shape = int(self.config[key]), self._where[name][1].shape
        if not shape or heads < 1 or shape[0] % (2 * heads):
            raise FormatError(
                f"{self.path}: tensor {shown(name)} has shape {list(shape)}, which is not {heads} heads of even length"
            )
        return heads


def _is_flat(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a converter squeezed the one row of a shared expert's router."""
    return len(shape) == 1 and name.endswith(".shared_expert_gate.weight")


def _rows(tensor: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Some rows of the matrix form."""
    if isinstance(tensor, BlockTensor):
        return BlockTensor(tensor.type, tensor.blocks[rows])
    values = tensor.values if isinstance(tensor, DenseTensor) else tensor.dequantize()
    return DenseTensor(values.reshape(matrix_shape(tensor.shape))[rows])


def _scaled_weight(name: str, info: GgufTensor, family: Family | None) -> str | None:
    """Of ``NAME.scale``: what it scales, by the checkpoint's name."""
    stem, _, suffix = name.rpartition(".")
    plain = info.type is not None and info.type.name == "F32" and info.shape in ((1,), ())
    return hf_name(f"{stem}.weight", family) if suffix == "scale" and plain else None


def _scaled(stored: QuantizedTensor, scale: np.float32) -> QuantizedTensor:
    """A tensor times a number: exactly so for ternary blocks, whose scales become float32."""
    if isinstance(stored, BlockTensor) and stored.type in _TERNARY:
        kind = stored.block_type
        parts = kind.to_parts(stored.blocks.reshape(-1, kind.type_size))
        scales = parts["d"].astype(np.float32).reshape(stored.rows, -1) * scale
        codes = np.ascontiguousarray(parts["codes"], np.uint8).reshape(stored.rows, stored.in_features)
        return TernaryTensor(codes, scales, 4, shape=stored.shape)
    return DenseTensor(stored.dequantize() * scale)


def _parts(path: Path) -> list[Path]:
    found = _SPLIT_NAME.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count:
        raise FormatError(f"{path}: part {found['number']} of {found['count']} cannot exist")
    stem = path.with_name(found["stem"] + ".gguf")
    parts = split_names(stem, count) if count > 1 else [path]
    for part in parts:
        if not part.is_file():
            raise FormatError(f"{part}: this part of the split model is missing")
    return parts


def _check_split(files: list[GgufFile]) -> None:
    for number, file in enumerate(files):
        stated = file.metadata.get("split.count", 1)
        if stated != len(files) or file.metadata.get("split.no", 0) != number:
            raise FormatError(
                f"{file.path}: split.no {file.metadata.get('split.no')} of split.count {stated} does not fit "
                f"part {number + 1} of {len(files)} files",
                hint="Name a part of the complete set NAME-00001-of-0000N.gguf.",
            )
    total = files[0].metadata.get("split.tensors.count")
    found = sum(len(file.tensors) for file in files)
    if len(files) > 1 and total != found:
        raise FormatError(f"{files[0].path}: split.tensors.count is {total}, the files hold {found} tensors")
