"""From what a user calls a model to a folder on this disk: a path is taken as it is, a Hub id is fetched.

Only what quantization needs is downloaded (safetensors, JSON, tokenizer and chat-template files of the top
folder; no pickles, no code). A failure becomes one sentence and a next step. Texts of the Hub client are
never passed on: they are long, and none of them may ever carry the token into a log.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from trapetum.errors import CheckpointError
from trapetum.progress import Progress

__all__ = ["DOWNLOADED", "resolve_model"]

DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Patterns of the files that are fetched."""

_SKIPPED = ("*/*",)  # folders such as original/ and onnx/ hold the same weights in another form
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_LOGIN = "Pass --token, or set HF_TOKEN, or log in with the Hub's own command."
_LATER = "Try again later; files that are already there are kept."
_UNREACHED = {  # by name: the HTTP library differs between versions of the client
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "IncompleteSnapshotError",
    "ConnectionError",
    "TimeoutError",
    "TransportError",
}
_BY_STATUS = {
    401: ("the Hub refuses the token: it is missing, wrong or expired", _LOGIN),
    403: ("the Hub denies access to it with this token", _LOGIN),
    404: ("the Hub has no such model or file", "Check the spelling and the revision."),
    429: ("the Hub asks to slow down (too many requests)", _LATER),
}


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
    (progress or Progress()).note(
        f"fetching {text} from the Hub; files that are already here are not fetched again"
    )
    return _fetch(text, revision, token)


def _fetch(model: str, revision: str | None, token: str | None) -> Path:
    import huggingface_hub
    from tqdm import tqdm

    class Silent(tqdm):  # type: ignore[misc]
        """The client's own bars would write to the terminal of whoever calls this library."""

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})

    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            token=token,
            allow_patterns=list(DOWNLOADED),
            ignore_patterns=list(_SKIPPED),
            tqdm_class=Silent,
        )
    except Exception as error:  # OSError, ValueError, and whatever its HTTP library lets through
        raise _explained(model, revision, error) from None
    return Path(str(folder))


def _explained(model: str, revision: str | None, error: BaseException) -> CheckpointError:
    from huggingface_hub import constants, errors

    at = f"{model} (revision {revision})" if revision else model
    status = _status(error)
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model}"
        return CheckpointError(
            f"{at}: the model is gated; its licence must be accepted first",
            hint=f"Accept it on {page} with the account of the token. {_LOGIN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{at}: the Hub's model has no such revision", hint="Check the revision.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{at}: neither a local path nor a model on the Hub (or it is private)",
            hint=f"Check the spelling. For a private model: {_LOGIN}",
        )
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(
            f"{at}: neither a local path nor a valid Hub id", hint="A Hub id reads org/name."
        )
    if status is not None:
        text, hint = _BY_STATUS.get(status, (f"the Hub answers with HTTP status {status}", _LATER))
        return CheckpointError(f"{at}: {text}", hint=hint)
    if _UNREACHED & {kind.__name__ for kind in type(error).__mro__}:
        return CheckpointError(
            f"{at}: not a local path, and the Hub cannot be reached",
            hint="Check the path and the network; offline, name a folder that holds the model.",
        )
    if getattr(error, "errno", None):
        return CheckpointError(f"{at}: cannot be stored: {os.strerror(error.errno)}")  # type: ignore[attr-defined]
    return CheckpointError(f"{at}: the download failed ({type(error).__name__})", hint=_LATER)


def _status(error: BaseException | None) -> int | None:
    """HTTP status of an error or its cause: the client wraps a 429 in "not in the local cache"."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None
