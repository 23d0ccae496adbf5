"""From what a user calls a model to a folder on this disk: a path is taken as it is, a Hub id is fetched.

Only what quantization needs is downloaded (safetensors, JSON, tokenizer and chat-template files of the top
folder, card and licences; no pickles, no code) into the Hub client's cache: a download that was cut off goes on,
``HF_HUB_OFFLINE=1`` uses what is there, and the folder's name holds the commit, which the artifact records.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trapetum.errors import CheckpointError
from trapetum.hub_errors import explained, with_retries
from trapetum.progress import Progress

__all__ = ["DOWNLOADED", "resolve_model"]

DOWNLOADED = (
    *("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"),
    *("README.md", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"),  # what the artifact's card carries on
)
"""Patterns of the files that are fetched."""

_SKIPPED = ("*/*",)  # folders such as original/ and onnx/ hold the same weights in another form
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


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
        An existing folder or file, or a Hub id (``org/name`` or ``name``).
    revision : str, optional
        Branch, tag or commit; for a Hub id only.
    token : str, optional
        Access token; by default the one that the Hub client finds by itself.
    progress : Progress, optional

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
    if not _HUB_ID.fullmatch(text) or ".." in text or "--" in text or text.endswith((".git", ".safetensors")):
        raise CheckpointError(
            f"{text}: there is no such file or folder", hint="Name a folder, or a Hub id such as org/name."
        )
    progress = progress or Progress()
    progress.note(f"fetching {text} from the Hub; files that are already here are not fetched again")
    return _fetch(text, revision, token, progress)


def _fetch(model: str, revision: str | None, token: str | None, progress: Progress) -> Path:
    import huggingface_hub
    from tqdm import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        """The client's own bars would write to the terminal of whoever calls this library."""

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})

    def fetch() -> str:
        return str(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                token=token,
                allow_patterns=list(DOWNLOADED),
                ignore_patterns=list(_SKIPPED),
                tqdm_class=Silent,
            )
        )

    try:
        return Path(with_retries(fetch, model, progress))
    except Exception as error:  # OSError, ValueError, and whatever its HTTP library lets through
        at = f"{model} (revision {revision})" if revision else model
        raise explained(at, model, error, CheckpointError, "download") from None
