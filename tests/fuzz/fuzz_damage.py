"""Damages of bytes: a list of steps makes a broken file of a valid one, the same one every time."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

_HEAD = 4096
_NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    63,
    64,
    127,
    128,
    255,
    256,
    65535,
    1 << 31,
    (1 << 32) - 1,
    1 << 53,
    1 << 62,
    (1 << 63) - 1,
)
_TEXTS = (
    b"null",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"9" * 40,
    b'"\\ud800"',
    b"NaN",
    b"[[[[[[[[[[",
    b"../",
    b"\x00",
)

Step = tuple[int, float, int]  # which damage, where (0 to 1), a number


def damage(data: bytes, steps: list[Step]) -> bytes:
    """Apply a list of damages; places are counted in the first 4 KiB two times of three: headers are there."""
    out = bytearray(data)
    for kind, where, number in steps:
        reach = len(out) if number % 3 == 0 else min(len(out), _HEAD)
        at = min(int(where * (reach + 1)), len(out))
        _DAMAGES[kind % len(_DAMAGES)](out, at, number)
    return bytes(out)


def _flip(out: bytearray, at: int, number: int) -> None:
    if at < len(out):
        out[at] ^= 1 << number % 8


def _byte(out: bytearray, at: int, number: int) -> None:
    if at < len(out):
        out[at] = number % 256


def _word(size: int) -> Callable[[bytearray, int, int], None]:
    def write(out: bytearray, at: int, number: int) -> None:
        value = _NUMBERS[number % len(_NUMBERS)] % (1 << 8 * size)
        at -= at % (4 if number % 2 else 1)
        out[at : at + size] = value.to_bytes(size, "little")

    return write


def _cut(out: bytearray, at: int, number: int) -> None:
    del out[at:]


def _delete(out: bytearray, at: int, number: int) -> None:
    del out[at : at + 1 + number % 64]


def _repeat(out: bytearray, at: int, number: int) -> None:
    out[at:at] = out[at : at + 1 + number % 64]


def _insert(out: bytearray, at: int, number: int) -> None:
    out[at:at] = number.to_bytes(8, "little")[: 1 + number % 8]


def _token(out: bytearray, at: int, number: int) -> None:
    """Another number or text where a number stands, as in JSON and TOML."""
    found = re.compile(rb"-?\d+(?:\.\d+)?|true|false|null|\"[^\"]*\"").search(out, at)
    if found is not None:
        choice = number % (len(_TEXTS) + len(_NUMBERS))
        new = _TEXTS[choice] if choice < len(_TEXTS) else str(_NUMBERS[choice - len(_TEXTS)]).encode()
        out[found.start() : found.end()] = new


def _swap(out: bytearray, at: int, number: int) -> None:
    size = 1 + number % 32
    other = (at + number) % (len(out) + 1)
    first, second = bytes(out[at : at + size]), bytes(out[other : other + size])
    out[at : at + size] = second
    out[other : other + size] = first


_DAMAGES = (_flip, _byte, _word(4), _word(8), _cut, _delete, _repeat, _insert, _token, _token, _swap)


def random_steps(rng: random.Random) -> list[Step]:
    """One to four damages."""
    return [
        (rng.randrange(64), rng.random(), rng.getrandbits(60)) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))
    ]
