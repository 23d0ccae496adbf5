"""What goes wrong with the Hub: one sentence and a next step each, and a bounded number of tries.

Texts of the Hub client are never passed on: they are long, and none of them may ever carry the token into a log.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from trapetum.errors import TrapetumError
from trapetum.progress import Progress

__all__ = ["TRIES", "explained", "http_status", "with_retries"]

R = TypeVar("R")

TRIES = 4
"""How often a step is tried in all, where trying again can help."""

_LONGEST_WAIT = 60.0  # seconds; a Hub that asks for more is asked no more
_TEMPORARY = (429, 500, 502, 503, 504)

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
_BROKEN = {"ConnectionError", "TimeoutError", "TransportError"}
_BY_STATUS = {
    401: ("the Hub refuses the token: it is missing, wrong or expired", _LOGIN),
    403: (
        "the Hub denies access to it with this token",
        f"{_LOGIN} For a push the token needs write access, and the account room in its storage.",
    ),
    404: ("the Hub has no such model or file", "Check the spelling and the revision."),
    413: ("the Hub takes no file of this size", "Quantize again with a smaller --max-shard-size."),
    429: ("the Hub asks to slow down (too many requests)", _LATER),
    507: (
        "the account's storage on the Hub is used up",
        "Free some space there, or push to another account.",
    ),
}


class _Silence(logging.Filter):
    """While any call is under way, the client logs nothing: its warnings hold addresses, which may be signed."""

    def __init__(self) -> None:
        super().__init__()
        self._lock, self._calls = threading.Lock(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        return False

    def __enter__(self) -> None:
        with self._lock:
            self._calls += 1
            for handler in self._handlers():
                handler.addFilter(self)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls:
                for handler in self._handlers():
                    handler.removeFilter(self)

    @staticmethod
    def _handlers() -> list[logging.Handler]:
        return logging.getLogger("huggingface_hub").handlers


_SILENCE = _Silence()


def with_retries(
    call: Callable[[], R], what: str, progress: Progress, *, only_refused: bool = False, dropped: bool = False
) -> R:
    """Call, and call again after a failure that time may cure, at most :data:`TRIES` times.

    Parameters
    ----------
    call : callable
    what : str
        For the note that a wait prints.
    progress : Progress
    only_refused : bool
        Try again only where the Hub surely did nothing (429): for steps that must not happen twice.
    dropped : bool
        Try again where a connection broke, too: for requests that the client itself does not repeat.

    Notes
    -----
    ``Retry-After`` is honoured up to a minute; without it the waits are 1, 2 and 4 s.
    """
    for attempt in range(1, TRIES + 1):
        try:
            with _SILENCE:
                return call()
        except Exception as error:
            status = http_status(error)
            wait = _retry_after(error)
            wait = 2.0 ** (attempt - 1) if wait is None else wait
            curable = (429,) if only_refused else _TEMPORARY
            broken = dropped and status is None and bool(_BROKEN & _ancestry(error))
            if not (status in curable or broken) or attempt == TRIES or wait > _LONGEST_WAIT:
                raise
            said = "the connection broke" if broken else f"the Hub answers with HTTP status {status}"
            progress.note(f"{what}: {said}; trying again in {wait:g} s")
            time.sleep(wait)
    raise AssertionError  # the last try returned or raised


def explained(
    at: str, page: str, error: BaseException, kind: type[TrapetumError], step: str
) -> TrapetumError:
    """The error of the client as one of ours.

    Parameters
    ----------
    at : str
        What was asked for: begins the sentence.
    page : str
        The repository's name, for the address of its page.
    error : BaseException
    kind : type
        Class of the result.
    step : str
        ``"download"`` or ``"upload"``.
    """
    from huggingface_hub import constants, errors

    status = http_status(error)
    if isinstance(error, errors.GatedRepoError):
        return kind(
            f"{at}: the model is gated; its licence must be accepted first",
            hint=f"Accept it on {constants.ENDPOINT}/{page} with the account of the token. {_LOGIN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return kind(f"{at}: the Hub's model has no such revision", hint="Check the revision.")
    if isinstance(error, errors.RepositoryNotFoundError) and status != 401:
        found = "a model on the Hub" if step == "upload" else "a local path nor a model on the Hub"
        return kind(
            f"{at}: {'not' if step == 'upload' else 'neither'} {found} (or it is private)",
            hint=f"Check the spelling. For a private model: {_LOGIN}",
        )
    if isinstance(error, errors.HFValidationError):
        what = "not a valid Hub id" if step == "upload" else "neither a local path nor a valid Hub id"
        return kind(f"{at}: {what}", hint="A Hub id reads org/name.")
    if status is not None:
        text, hint = _BY_STATUS.get(status, (f"the Hub answers with HTTP status {status}", _LATER))
        return kind(f"{at}: {text}", hint=hint)
    if _UNREACHED & _ancestry(error):
        if step == "upload":
            return kind(f"{at}: the Hub cannot be reached", hint=f"Check the network. {_LATER}")
        return kind(
            f"{at}: not a local path, and the Hub cannot be reached",
            hint="Check the path and the network; offline, name a folder that holds the model.",
        )
    number = getattr(error, "errno", None)
    if number:
        full = number in (errno.ENOSPC, errno.EDQUOT)
        where = "Free some space, or set HF_HUB_CACHE to a folder on another disk." if full else None
        verb = "stored" if step == "download" else "read"
        return kind(f"{at}: cannot be {verb}: {os.strerror(number)}", hint=where)
    return kind(f"{at}: the {step} failed ({type(error).__name__})", hint=_LATER)


def _ancestry(error: BaseException) -> set[str]:
    return {c.__name__ for c in type(error).__mro__}


def http_status(error: BaseException | None) -> int | None:
    """HTTP status of an error or its cause: the client wraps a 429 in "not in the local cache"."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__ or error.__context__
    return None


def _retry_after(error: BaseException | None) -> float | None:
    """Seconds that the Hub asks to wait."""
    while error is not None:
        headers = getattr(getattr(error, "response", None), "headers", None)
        if headers is not None:
            text = str(headers.get("Retry-After", ""))
            return float(text) if re.fullmatch(r"\d{1,6}", text) else None
        error = error.__cause__ or error.__context__
    return None
