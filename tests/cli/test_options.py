"""Values that options take, and what is refused."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trapetum.cli.options import parse_bits, parse_size, real, utf8_argument


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("512M", 512 << 20),
        ("5GB", 5_000_000_000),
        ("5 GiB", 5 << 30),
        ("0.5K", 512),
        ("7B", 7),
        ("2T", 2 << 40),
        ("9007199254740993", 9007199254740993),  # above 2**53: no float on the way
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", " 8G", "٤", "G", "-1G", "0", "0.0G", "8X", "8GG", "1e9", "inf", "nan", "8 G B", "5iB", "0.1"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|zero"):
        parse_size(text)


@given(st.integers(1, 2**60))
def test_whole_numbers_are_bytes(count: int) -> None:
    assert parse_size(str(count)) == count


@pytest.mark.parametrize(
    ("text", "bits"),
    [("2", 2), ("3", 3), ("4", 4), ("5", 5), ("6", 6), ("8", 8), ("4.0", 4), ("1.58", 1.58), ("3.5", 3.5)],
)
def test_bits(text: str, bits: float) -> None:
    value = parse_bits(text)
    assert value == bits
    assert isinstance(value, type(bits))


@pytest.mark.parametrize(
    "text", ["0", "1", "7", "9", "16", "1.5", "8.5", "-4", "four", "", "nan", "inf", "1e0", "4bit", "٤"]
)
def test_what_is_no_bit_width(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed are 2, 3, 4, 5, 6, 8, 1\.58"):
        parse_bits(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-0.1", "1.1", "0", "x", ""])
def test_top_p_range(text: str) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        real(0, 1, above=True)(text)


def test_temperature_range() -> None:
    assert real(0)("0") == 0
    with pytest.raises(ValueError, match="at least 0"):
        real(0)("-0.5")


def test_text_of_a_c_locale_is_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert utf8_argument("été") == "été"
    # what sys.argv holds where the locale's encoding is ASCII
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    assert utf8_argument("été".encode().decode("ascii", "surrogateescape")) == "été"
    with pytest.raises(ValueError, match="not valid UTF-8"):
        utf8_argument("\udce9")
