"""What sizes and floats of a .cbk header must satisfy: constructors of :class:`~trapetum.formats.cbk_records.Rule`."""

from __future__ import annotations

import math

from trapetum.formats.cbk_records import Rule

__all__ = [
    "above_zero",
    "between",
    "even",
    "multiple_of_256",
    "not_negative",
    "positive",
    "power_of_two",
    "small",
]

_MOST = (1 << 20) - 1


def between(size: str, words: str, low: int, high: int) -> Rule:
    """``low .. high``."""
    demand = str(low) if low == high else f"between {low} and {high}"
    return Rule(size, words, demand, lambda n: low <= n <= high)


def positive(size: str, words: str) -> Rule:
    """A count."""
    return between(size, words, 1, _MOST)


def even(size: str, words: str) -> Rule:
    """A positive even number."""
    return Rule(size, words, f"an even number from 2 to {_MOST}", lambda n: 2 <= n <= _MOST and n % 2 == 0)


def multiple_of_256(size: str, words: str) -> Rule:
    """What the matrix kernels ask of output rows."""
    return Rule(size, words, "a multiple of 256", lambda n: n > 0 and n % 256 == 0)


def power_of_two(size: str, words: str) -> Rule:
    """What a reduction with one thread an element asks."""
    return Rule(size, words, "a power of two from 2 to 1024", lambda n: 2 <= n <= 1024 and n & (n - 1) == 0)


def small(field: str, words: str) -> Rule:
    """An epsilon."""
    return Rule(field, words, "from 0 to below 1", lambda x: 0 <= x < 1)


def not_negative(field: str, words: str) -> Rule:
    """A float that 0 switches off."""
    return Rule(field, words, "a finite number >= 0", lambda x: 0 <= x < math.inf)


def above_zero(field: str, words: str) -> Rule:
    """A factor."""
    return Rule(field, words, "a finite number > 0", lambda x: 0 < x < math.inf)
