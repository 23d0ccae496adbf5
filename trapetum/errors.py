"""The one tree of exceptions that this package raises on purpose.

::

    TrapetumError                 base; carries a one-line message and an optional hint (the next step)
    ├── FormatError               bytes of a file break the rules of its format
    ├── CheckpointError           a model folder is incomplete, inconsistent or holds unusable values
    ├── RecipeError               a recipe or an option value is wrong
    ├── UnsupportedModelError     the architecture, tensor form or packing is not one that we know
    ├── OutputError               the output exists, is locked, is the input, or cannot be written
    ├── KernelUnavailable         the machine or the installation lacks what a kernel needs
    └── VerifyError               an artifact was checked and found wrong

A message names the file, the tensor, what was found and what is allowed; the hint says what to do next.
The command line prints ``error: MESSAGE`` and ``hint: HINT`` and exits with ``exit_code``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "CheckpointError",
    "FormatError",
    "KernelUnavailable",
    "OutputError",
    "RecipeError",
    "TrapetumError",
    "UnsupportedModelError",
    "VerifyError",
    "listed",
    "located",
]


class TrapetumError(Exception):
    """Base of every error that is meant for the user.

    Parameters
    ----------
    message : str
        One sentence: file, tensor, what was found, what is allowed.
    hint : str, optional
        The next step, as one sentence.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class FormatError(TrapetumError):
    """The bytes of a file break the rules of its format."""


class CheckpointError(TrapetumError):
    """A model folder is incomplete, inconsistent, or holds values that cannot be quantized."""


class RecipeError(TrapetumError):
    """A recipe, or an option that acts like one, is wrong."""


class UnsupportedModelError(TrapetumError):
    """The architecture, the form of a tensor or its packing is not one that trapetum knows."""


class OutputError(TrapetumError):
    """The output exists, is locked by another process, is the input, or cannot be written."""


class KernelUnavailable(TrapetumError):
    """This machine or installation lacks what a kernel needs."""


class VerifyError(TrapetumError):
    """An artifact was checked and found wrong."""

    exit_code = 3


@contextmanager
def located(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put ``path`` before the message of an error of the block that does not name it yet.

    What reads the *content* of a config cannot know which of several models it belongs to; its caller does.
    """
    try:
        yield
    except TrapetumError as error:
        if os.fspath(path) in error.message:
            raise
        raise type(error)(f"{os.fspath(path)}: {error.message}", hint=error.hint) from error


def listed(items: Iterable[str], most: int = 8) -> str:
    """Items of a message, the first ones spelled out: it stays one line whatever the model's size.

    Examples
    --------
    >>> listed(["a", "b"]), listed("abcd", 2)
    ('a; b', 'a; b; and 2 more')
    """
    every = list(items)
    rest = len(every) - most
    return "; ".join(every[:most]) + (f"; and {rest} more" if rest > 0 else "")
