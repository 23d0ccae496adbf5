"""From what a user calls a model to a folder or file on this disk: a path is taken as it is, a Hub id is fetched.

Only what quantization needs is downloaded (safetensors, JSON, tokenizer and chat-template files of the top
folder, card and licences; no pickles, no code) into the Hub client's cache: a download that was cut off goes on,
``HF_HUB_OFFLINE=1`` uses what is there, and the folder's name holds the commit, which the artifact records.

A repository that has GGUF files and no safetensors gives its one GGUF; ``org/name/FILE.gguf`` names one of several.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trapetum.errors import CheckpointError, listed
from trapetum.hub_errors import explained, with_retries
from trapetum.progress import Progress

__all__ = ["DOWNLOADED", "check_hub_id", "resolve_model", "silent_bars"]

DOWNLOADED = (
    *("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"),
    *("README.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),  # what the artifact's card carries on
)
"""Patterns of the files that are fetched."""

_SKIPPED = ("*/*",)  # folders such as original/ and onnx/ hold the same weights in another form
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_HUB_ID = re.compile(rf"{_NAME}(/{_NAME})?")
_HUB_FILE = re.compile(rf"(?P<repo>{_NAME}/{_NAME})/(?P<file>(?:{_NAME}/)*{_NAME}\.gguf)")
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_PROJECTOR = "mmproj"  # such a GGUF holds no language model


def resolve_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The local path of a model.

    Parameters
    ----------
    model : str or path-like
        An existing folder or file, a Hub id (``org/name`` or ``name``), or a GGUF of one (``org/name/FILE.gguf``).
    revision : str, optional
        Branch, tag or commit; for a Hub id only.
    token : str, optional
        Access token; by default the one that the Hub client finds by itself.
    progress : Progress, optional

    Returns
    -------
    Path
        A folder, or a GGUF file.

    Raises
    ------
    CheckpointError
        If there is no such path and it is no Hub id, or the Hub does not give it.
    """
    text = os.fspath(model)
    if os.path.exists(text):
        if revision is not None:
            raise CheckpointError(
                f"{text}: a revision was given ({revision}), but this is a local path",
                hint="Leave the revision out.",
            )
        return Path(text)
    named = _HUB_FILE.fullmatch(text)
    repo = named["repo"] if named else text
    check_hub_id(repo)
    progress = progress or Progress()
    progress.note(f"fetching {text} from the Hub; files that are already here are not fetched again")
    at = f"{text} (revision {revision})" if revision else text
    try:
        return _fetch(repo, named["file"] if named else None, revision, token, progress)
    except CheckpointError:
        raise
    except Exception as error:  # OSError, ValueError, and whatever its HTTP library lets through
        raise explained(at, repo, error, CheckpointError, "download") from None


def check_hub_id(text: str) -> None:
    """Refuse what is neither a path nor a Hub id.

    Raises
    ------
    CheckpointError
    """
    if not _HUB_ID.fullmatch(text) or ".." in text or "--" in text or text.endswith((".git", ".safetensors")):
        raise CheckpointError(
            f"{text}: there is no such file or folder", hint="Name a folder, or a Hub id such as org/name."
        )


def silent_bars(tick: Callable[[], None] | None = None) -> Any:
    """A class of progress bars that print nothing: the client's own would write to the terminal of our caller.

    Parameters
    ----------
    tick : callable, optional
        Called whenever some bytes have come; what it raises ends the download.
    """
    from tqdm import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if tick is not None:
                tick()
            return None

    return Silent


def _fetch(repo: str, file: str | None, revision: str | None, token: str | None, progress: Progress) -> Path:
    import huggingface_hub

    def snapshot() -> str:
        return str(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                token=token,
                allow_patterns=list(DOWNLOADED),
                ignore_patterns=list(_SKIPPED),
                tqdm_class=silent_bars(),
            )
        )

    if file is None:
        folder = Path(with_retries(snapshot, repo, progress))
        if any(folder.glob("*.safetensors")):
            return folder
        file = _only_gguf(repo, folder, revision, token, progress)
        if file is None:
            return folder
        revision = folder.name if folder.parent.name == "snapshots" else revision
    paths = []
    for name in _family(file):

        def download(name: str = name) -> str:
            return huggingface_hub.hf_hub_download(
                repo, name, revision=revision, token=token, tqdm_class=silent_bars()
            )

        paths.append(Path(with_retries(download, f"{repo}/{name}", progress)))
    return paths[0]


def _family(file: str) -> list[str]:
    """All parts of a split GGUF, or the file itself.

    Examples
    --------
    >>> _family("m-00002-of-00002.gguf")
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    match = _SPLIT.fullmatch(file)
    if match is None:
        return [file]
    return [f"{match[1]}-{i:05d}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]


def _only_gguf(
    repo: str, folder: Path, revision: str | None, token: str | None, progress: Progress
) -> str | None:
    """The GGUF of a repository without safetensors; None where it has none either.

    Raises
    ------
    CheckpointError
        If it has several: which counts is for the user to say.
    """
    import huggingface_hub
    from huggingface_hub import constants

    def look() -> dict[str, int]:
        info = huggingface_hub.HfApi(token=token, library_name="trapetum").model_info(
            repo, revision=revision, files_metadata=True
        )
        return {s.rfilename: s.size or 0 for s in info.siblings or []}

    if constants.HF_HUB_OFFLINE:
        sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*.gguf")}
    else:
        sizes = with_retries(look, repo, progress)
    families: dict[str, int] = {}
    for name, size in sorted(sizes.items()):
        if name.endswith(".gguf") and not name.rpartition("/")[2].startswith(_PROJECTOR):
            first = _family(name)[0]
            families[first] = families.get(first, 0) + size
    if len(families) > 1:
        raise CheckpointError(
            f"{repo}: holds {len(families)} GGUF models and no safetensors: "
            + listed([f"{name} ({size:,} bytes)" for name, size in families.items()]),
            hint=f"Name one of them, such as {repo}/{_largest(families)}: more bits, less loss.",
        )
    return next(iter(families), None)


def _largest(families: dict[str, int]) -> str:
    return max(families, key=lambda name: families[name])
