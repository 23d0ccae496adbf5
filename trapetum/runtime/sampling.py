"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError

__all__ = ["Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How to choose.

    Parameters
    ----------
    temperature : float
        0 takes the largest logit (the first of equals).
    top_k : int
        Only the k most likely tokens; 0 for all. Tokens as likely as the k-th stay.
    top_p : float
        Only the most likely tokens that together reach this probability.

    Raises
    ------
    RecipeError
        If a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise RecipeError(f"temperature is {self.temperature}; a finite number >= 0 is expected")
        if self.top_k < 0:
            raise RecipeError(f"top_k is {self.top_k}; 0 (all) or more is expected")
        if not 0 < self.top_p <= 1:
            raise RecipeError(f"top_p is {self.top_p}; more than 0 and at most 1 is expected")

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Distribution that the next token is drawn from (temperature > 0).

        Parameters
        ----------
        logits : ndarray of float32, shape (vocab,)

        Returns
        -------
        ndarray of float64, shape (vocab,)
            Sums to 1.

        Examples
        --------
        >>> Sampling(temperature=1.0, top_k=1).probabilities(np.array([0, 2, 1], np.float32)).tolist()
        [0.0, 1.0, 0.0]
        """
        scaled = (logits.astype(np.float64) - float(logits.max())) / self.temperature
        if 0 < self.top_k < scaled.size:
            scaled[scaled < np.partition(scaled, -self.top_k)[-self.top_k]] = -np.inf
        p = np.exp(scaled)
        p /= p.sum()
        if self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            # a token stays while those before it have not reached top_p: the first one always does
            p[order[np.cumsum(p[order]) - p[order] >= self.top_p]] = 0.0
            p /= p.sum()
        return p

    def choose(self, logits: NDArray[np.float32], rng: np.random.Generator) -> int:
        """One token id."""
        if self.temperature == 0:
            return int(logits.argmax())
        cumulative = np.cumsum(self.probabilities(logits))
        # the top 2**-53 of the range could round up to the total; the last token with any mass is then meant
        last = np.searchsorted(cumulative, cumulative[-1], side="left")
        return int(min(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"), last))
