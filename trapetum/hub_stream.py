"""A model of the Hub whose weight files are here one or two at a time: what ``quantize --stream-download`` reads.

=====================  =======================================================================================
what                   where it is
=====================  =======================================================================================
config, tokenizer ...  the Hub client's cache, as for any model
weight files           in a temporary folder as sparse files: their true header and length, no data. So everything
                       that looks at names, shapes and sizes works before a weight is here
data of one file       fetched whole into the job's work folder by the Hub's client (which goes on where a connection
                       broke), compared with the Hub's SHA-256, opened, and removed when its tensors are done
anything else          single ranges of bytes over HTTP: two heads that are compared, a scale in another file
=====================  =======================================================================================

The folder is named as a snapshot in the Hub's cache is, so that the artifact records repository and commit as ever.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError
from trapetum.formats.checksums import file_sha256
from trapetum.formats.packed_ternary import AnyCheckpoint, open_checkpoint
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.safetensors_header import HEADER_LIMIT
from trapetum.hub import DOWNLOADED, check_hub_id, silent_bars
from trapetum.hub_errors import explained, with_retries
from trapetum.progress import Progress

if TYPE_CHECKING:
    from trapetum.formats.safetensors_header import TensorInfo

__all__ = ["HubStream", "StreamedFile", "open_stream"]

R = TypeVar("R")

_FIRST_BYTES = 256 << 10  # holds the header of most files: one request instead of two
_RANGE_BYTES = 16 << 20


class Abandoned(BaseException):
    """The job ended while a file was on its way. Not an ``Exception``: the client must not try again."""


class StreamedFile(SafetensorsFile):
    """A weight file whose data may be elsewhere; made by :meth:`open` on its sparse stand-in."""

    remote: Callable[[int, int], bytes] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True) -> StreamedFile:
        """As :meth:`SafetensorsFile.open`, without a map: pages of a file that is removed would stay."""
        return super().open(path, mmap=False)

    def bring(self, path: Path) -> None:
        """Read from this file from now on."""
        self.drop()
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def drop(self) -> None:
        """Have no data here."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _pread(self, info: TensorInfo, start: int, end: int) -> NDArray[np.uint8]:
        if self._fd is not None or self.remote is None:
            return super()._pread(info, start, end)
        pieces = [self.remote(at, min(at + _RANGE_BYTES, end)) for at in range(start, end, _RANGE_BYTES)]
        return np.frombuffer(bytearray().join(pieces), np.uint8)


@dataclass
class HubStream:
    """An open model of the Hub; made by :func:`open_stream`.

    Attributes
    ----------
    repo, commit : str
    sizes, hashes : dict of str
        Bytes and SHA-256 of the weight files that are streamed, as the Hub states them.
    source : checkpoint
        What is read; its weight files have no data until :meth:`bring`.
    """

    repo: str
    commit: str
    sizes: dict[str, int]
    hashes: dict[str, str]
    token: str | None = field(repr=False)  # a representation may end in a log
    progress: Progress = field(repr=False)
    source: AnyCheckpoint = field(init=False, repr=False)
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def most_bytes(self) -> int:
        """Disk that the data take at the peak: two files, one in work and one on its way."""
        return sum(sorted(self.sizes.values())[-2:])

    def fetch(self, name: str, folder: Path) -> Path:
        """Download a weight file whole and compare it with its checksum; runs on any thread.

        Parameters
        ----------
        name : str
        folder : Path
            Of the job; a file that is there already is not fetched again.

        Raises
        ------
        CheckpointError
            If the Hub does not give it, the disk does not hold it, or it is not what the Hub announces.
        """
        import huggingface_hub

        def fetch() -> str:
            return huggingface_hub.hf_hub_download(
                self.repo,
                name,
                revision=self.commit,
                token=self.token,
                local_dir=folder,
                tqdm_class=silent_bars(self._keep_on),
            )

        path = Path(self._asked(fetch, name))
        found = file_sha256(path)
        if found != self.hashes[name]:
            path.unlink()
            raise CheckpointError(
                f"{self.repo}/{name}: what was downloaded has sha256 {found}; the Hub announces {self.hashes[name]}",
                hint="Run the same command again: the file is fetched anew.",
            )
        return path

    def bring(self, name: str, path: Path) -> None:
        """Let the source read a weight file's data from ``path``."""
        self._file(name).bring(path)

    def drop(self, name: str, path: Path) -> None:
        """Forget a weight file's data and remove them."""
        self._file(name).drop()
        path.unlink(missing_ok=True)

    def end(self) -> None:
        """Stop what is on its way."""
        self._ended.set()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` of a weight file over HTTP.

        Raises
        ------
        CheckpointError
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        headers = {**build_hf_headers(token=self.token), "Range": f"bytes={start}-{end - 1}"}
        url = hf_hub_url(self.repo, name, revision=self.commit)

        def get() -> bytes:
            self._keep_on()
            response: Any = get_session().get(url, headers=headers)
            hf_raise_for_status(response)
            return bytes(response.content)

        data = self._asked(get, name, dropped=True)
        if len(data) != end - start:
            raise CheckpointError(
                f"{self.repo}/{name}: {len(data)} bytes came where bytes {start} to {end} were asked for",
                hint="Leave --stream-download out: this server does not give parts of files.",
            )
        return data

    def _keep_on(self) -> None:
        if self._ended.is_set():
            raise Abandoned

    def _file(self, name: str) -> StreamedFile:
        return next(f for f in self.source.files if f.path.name == name and isinstance(f, StreamedFile))

    def _asked(self, call: Callable[[], R], name: str, *, dropped: bool = False) -> R:
        try:
            return with_retries(call, f"{self.repo}/{name}", self.progress, dropped=dropped)
        except Exception as error:
            raise explained(f"{self.repo}/{name}", self.repo, error, CheckpointError, "download") from None

    def write_stand_in(self, path: Path) -> None:
        """A sparse file with the true header and length of the weight file of that name."""
        size = self.sizes[path.name]
        data = self.read_range(path.name, 0, min(size, _FIRST_BYTES))
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 + length <= min(size, HEADER_LIMIT):
            data += self.read_range(path.name, len(data), 8 + length)
        with open(path, "wb") as file:
            file.write(data[: 8 + length])
            file.truncate(size)


@contextlib.contextmanager
def open_stream(
    model: str, *, revision: str | None = None, token: str | None = None, progress: Progress | None = None
) -> Iterator[HubStream]:
    """Open a model of the Hub without its weights.

    Parameters
    ----------
    model : str
        A Hub id.
    revision, token : str, optional
    progress : Progress, optional

    Raises
    ------
    CheckpointError
        If it is no Hub id, the Hub does not give it, or it holds no safetensors file.
    """
    progress = progress or Progress()
    check_hub_id(model)
    progress.note(f"reading the headers of {model}; its weight files are fetched one after another")
    try:
        stream, small = _look(model, revision, token, progress)
    except CheckpointError:
        raise
    except Exception as error:
        at = f"{model} (revision {revision})" if revision else model
        raise explained(at, model, error, CheckpointError, "download") from None
    with contextlib.ExitStack() as stack:
        stack.callback(stream.end)
        root = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="trapetum-stream-", ignore_cleanup_errors=True)
        )
        folder = Path(root) / f"models--{stream.repo.replace('/', '--')}" / "snapshots" / stream.commit
        folder.mkdir(parents=True)
        for path in small.iterdir():
            if path.is_file() and path.name not in stream.sizes:
                os.symlink(path.resolve(), folder / path.name)
        for name in stream.sizes:
            stream.write_stand_in(folder / name)
        stream.source = open_checkpoint(folder, reader=StreamedFile)
        stack.callback(stream.source.close)
        for file in stream.source.files:
            if isinstance(file, StreamedFile) and file.path.name in stream.sizes:
                file.drop()
                file.remote = _ranges(stream, file.path.name)
        yield stream


def _ranges(stream: HubStream, name: str) -> Callable[[int, int], bytes]:
    return lambda start, end: stream.read_range(name, start, end)


def _look(model: str, revision: str | None, token: str | None, progress: Progress) -> tuple[HubStream, Path]:
    """What the repository holds, and the folder of its small files."""
    import huggingface_hub

    api = huggingface_hub.HfApi(token=token, library_name="trapetum")
    info = with_retries(
        lambda: api.model_info(model, revision=revision, files_metadata=True), model, progress
    )
    commit = str(info.sha)
    weights = {
        s.rfilename: s
        for s in info.siblings or []
        if s.rfilename.endswith(".safetensors") and "/" not in s.rfilename
    }
    if not weights:
        raise CheckpointError(
            f"{model}: holds no .safetensors file that could be streamed", hint="Leave --stream-download out."
        )
    # What has no announced checksum is small, and comes with the other small files.
    large = {n: s for n, s in weights.items() if s.lfs is not None and s.size}
    folder = with_retries(
        lambda: str(
            huggingface_hub.snapshot_download(
                model,
                revision=commit,
                token=token,
                allow_patterns=list(DOWNLOADED),
                ignore_patterns=["*/*", *large],
                tqdm_class=silent_bars(),
            )
        ),
        model,
        progress,
    )
    hashes = {n: str(s.lfs.sha256) for n, s in large.items() if s.lfs is not None}
    sizes = {n: int(s.size or 0) for n, s in large.items()}
    return HubStream(model, commit, sizes, hashes, token, progress), Path(folder)
