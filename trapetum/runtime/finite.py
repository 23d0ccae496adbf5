"""What is said where a model's logits are not finite: no figure and no text is made of them.

Weights that are NaN or infinite, or so large that products overflow float32, make every later value NaN. It is looked
for where logits are used, once a token (the largest of 150,000 logits: 20 us beside a step of 10 ms) or a batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError

__all__ = ["check_logits", "check_losses", "unwarned"]


def unwarned() -> np.errstate:
    """Context, or decorator, of a forward pass: nothing is warned of at every product that is said once, here."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def _error(path: Path, position: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: after token {position} of the text (counted from 0) the logits are not finite: weights are "
        "damaged, or so large that the model overflows float32",
        hint=f"`trapetum verify {path}` names tensors whose values are not finite.",
    )


def check_logits(logits: NDArray[np.float32], path: Path, position: int) -> None:
    """Raise ``CheckpointError`` if the next token cannot be chosen.

    Parameters
    ----------
    logits : ndarray of float32, shape (vocab_size,)
    path : Path
        Of the model.
    position : int
        Of the token that they follow.

    Raises
    ------
    CheckpointError
        If the largest is NaN or infinite.
    """
    if not np.isfinite(logits.max()):
        raise _error(path, position)


def check_losses(losses: NDArray[np.float64], path: Path, positions: NDArray[np.intp]) -> None:
    """Raise ``CheckpointError`` if a loss is not finite, which it is where any logit is not.

    Parameters
    ----------
    losses : ndarray of float64, shape (tokens,)
    path : Path
        Of the model.
    positions : ndarray of intp, shape (tokens,)
        In the text, of the tokens that predict.

    Raises
    ------
    CheckpointError
        If any is NaN or infinite.
    """
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
        raise _error(path, int(positions[bad[0]]))
