"""A model folder in Hugging Face form, as one source of named tensors.

:meth:`Checkpoint.open` decides which files hold the weights (module ``weight_files``), opens and validates
every header, and compares the index with the files, all before the first weight is read. What the index
says wins; what it leaves out is never dropped in silence:

* a tensor of the index that its file lacks is refused, naming the file that does have it;
* a tensor that lies in an indexed file without being in the index is used, and noted by name (readers that
  load whole shards use it, too); in two such files it is ambiguous and refused;
* a second copy in another shard than the index says is not used, and noted.

``config.json`` is read at opening, but a missing or broken one is raised only where ``config`` is asked
for: a bare weight file can still be inspected, and nothing that needs the config can miss the error.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, Self

import numpy as np

from trapetum.errors import CheckpointError, FormatError
from trapetum.formats.packed import packed_format
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.strict_json import require_text, shown
from trapetum.formats.weight_files import NUMBERED, WeightFiles, find_weight_files, listed, read_json
from trapetum.tensors import DenseTensor

__all__ = ["SIDE_FILES", "Checkpoint"]

SIDE_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|preprocessor_config|processor_config|video_preprocessor_config|chat_template)\.json"
    r"|(merges|vocab)\.txt|chat_template\.jinja|(tokenizer|spiece|sentencepiece\.bpe)\.model|[\w.-]+\.tiktoken"
)
"""Names of the files that travel with the weights."""


class Checkpoint:
    """An open model folder (or lone file); implements ``TensorSource``. Made by :meth:`open`.

    Attributes
    ----------
    path : Path
        What the user named.
    folder : Path
        Where config and tokenizer files are looked for.
    files : list of SafetensorsFile
        The files in use, by name.
    notes : list of str
        What a person should know: files that are not used, tensors that the index forgot, ...
    title : str
        Name of the folder.
    """

    kind = "checkpoint"

    def __init__(
        self,
        path: Path,
        folder: Path,
        files: list[SafetensorsFile],
        where: dict[str, SafetensorsFile],
        notes: list[str],
    ) -> None:
        self.path, self.folder, self.files, self.notes = path, folder, files, notes
        self.title = folder.resolve().name
        self._where = where
        self._config: dict[str, Any] | CheckpointError
        try:
            self._config = read_json(folder / "config.json", constants=True)
            require_text(self._config, f"{folder / 'config.json'}: content")
        except CheckpointError as error:
            self._config = error
        except FormatError as error:
            self._config = CheckpointError(error.message)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        mmap: bool = True,
        reader: type[SafetensorsFile] = SafetensorsFile,
    ) -> Self:
        """Open a model and validate all of it except the values of its weights.

        Parameters
        ----------
        path : path-like
            A folder, or one ``.safetensors`` file (config and tokenizer are then looked for beside it).
        mmap : bool, default True
            See :meth:`SafetensorsFile.open`.
        reader : type
            What opens a weight file.

        Raises
        ------
        CheckpointError
            If the folder, its index and its files do not make one model.
        FormatError
            If a weight file breaks the rules of its format.
        """
        path = Path(path)
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise CheckpointError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if stat.S_ISDIR(mode):
            folder, found = path, find_weight_files(path)
        elif path.name.endswith(".safetensors"):
            folder, found = path.parent, WeightFiles([path])
            if match := NUMBERED.fullmatch(path.name):
                found.notes.append(f"only {path.name} is read, 1 of {int(match[3])} shards")
        else:
            raise CheckpointError(f"{path}: neither a folder nor a .safetensors or .gguf file")
        files: list[SafetensorsFile] = []
        try:
            for file in found.files:
                files.append(reader.open(file, mmap=mmap))
            notes = found.notes + [note for file in files for note in file.notes]
            where = _assign(found, files, notes)
        except BaseException:
            for opened in files:
                opened.close()
            raise
        return cls(path, folder, files, where, notes)

    @property
    def config(self) -> dict[str, Any]:
        """Content of config.json.

        Raises
        ------
        CheckpointError
            If it is missing or not a JSON object.
        """
        if isinstance(self._config, CheckpointError):
            hint = self._config.hint or "A model needs the config.json that came with its weights."
            raise CheckpointError(self._config.message, hint=hint)
        return self._config

    def names(self) -> list[str]:
        """Tensor names: files by name, each in the order of its bytes, the fastest to stream."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._file(name).tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; bfloat16 and float8 from ml_dtypes."""
        return self._file(name).tensors[name].dtype

    def layout(self, name: str) -> str:
        """Always ``"dense"``."""
        self._file(name)
        return DenseTensor.layout

    def file(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self._file(name).path

    def load(self, name: str, rows: slice | None = None) -> DenseTensor:
        """A tensor, or some rows of its matrix form as a [selected rows, in_features] tensor.

        Raises
        ------
        CheckpointError
            If there is no such tensor.
        FormatError
            If its bytes cannot be read.
        """
        return DenseTensor(self._file(name).read(name, rows))

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop mapped pages; see :meth:`SafetensorsFile.release`."""
        self._file(name).release(name, rows)

    def packed_format(self) -> str | None:
        """The quantization that the checkpoint already has, such as ``"gptq"``; None for plain weights."""
        config = {} if isinstance(self._config, CheckpointError) else self._config
        return packed_format(config, {name: self.dtype(name) for name in self._where})

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is decoded from packed codes; never here, see ``formats.packed_ternary``."""
        self._file(name)
        return False

    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, where there is one."""
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None

    def side_files(self) -> list[Path]:
        """Config, tokenizer and generation files beside the weights, sorted; no licences, no model card."""
        return sorted(p for p in self.folder.iterdir() if SIDE_FILES.fullmatch(p.name) and p.is_file())

    def close(self) -> None:
        """Close all files. Tensors that were loaded stay valid."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._where[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: there is no tensor named {shown(name)}") from None


def _assign(found: WeightFiles, files: list[SafetensorsFile], notes: list[str]) -> dict[str, SafetensorsFile]:
    """Which file each tensor is read from; checks the index against the files and appends notes."""
    holders: dict[str, list[SafetensorsFile]] = {}
    for file in files:
        for name in file.tensors:
            holders.setdefault(name, []).append(file)
    by_name = {file.path.name: file for file in files}
    indexed = {name: by_name[value] for name, value in (found.weight_map or {}).items()}
    for name, file in indexed.items():
        if name not in file.tensors:
            others = [f.path.name for f in holders.get(name, [])]
            actual = f"it is in {' and '.join(others)}" if others else "no file has it"
            raise CheckpointError(
                f"{found.index}: says that {shown(name)} is in {file.path.name}, but {actual}"
            )
    where: dict[str, SafetensorsFile] = {}
    forgotten: list[str] = []
    spare: list[str] = []
    for name, having in holders.items():
        if len(having) > 1 and name not in indexed:
            both = " and ".join(f.path.name for f in having)
            raise CheckpointError(
                f"{found.files[0].parent}: tensor {shown(name)} is in {both}, and no index says which counts"
            )
        where[name] = indexed.get(name, having[0])
        if name not in indexed:
            forgotten.append(f"{name} ({having[0].path.name})")
        spare += [f"{name} ({file.path.name})" for file in having if file is not where[name]]
    if found.index is None:
        return where
    if forgotten:
        notes.append(f"used although {found.index.name} forgot it: {listed(forgotten, 20)}")
    if spare:
        notes.append(f"not used, {found.index.name} names another file: {listed(spare, 20)}")
    held = sum(file.tensors[name].nbytes for name, file in where.items())
    if found.total_size not in (None, held):
        notes.append(f"{found.index.name} says {found.total_size} bytes in all, the tensors have {held}")
    return where
