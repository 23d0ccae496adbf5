"""Options that several commands share, and the parsers of their values.

Every parser raises ``ValueError`` with what was found and what is allowed; :func:`option` makes that a usage
error (exit code 2) that names the option.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from trapetum.cli.output import enable_debug

__all__ = [
    "Artifact",
    "Context",
    "Debug",
    "Device",
    "DryRun",
    "Experts",
    "Json",
    "MixedCpus",
    "Overwrite",
    "Quality",
    "Revision",
    "ShardSize",
    "TextFile",
    "Threads",
    "Token",
    "choice",
    "only_with",
    "option",
    "parse_bits",
    "parse_size",
    "real",
    "utf8_argument",
    "whole",
]

T = TypeVar("T")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(I?B)?", re.IGNORECASE)

# What --bits may name: whole codebook widths, 1.58 for ternary weights, and any budget between 1.58 and 8.
_WHOLE_BITS = (2, 3, 4, 5, 6, 8)
_TERNARY_BITS = 1.58


def parse_size(text: str) -> int:
    """Bytes of a size such as ``8G``.

    Parameters
    ----------
    text : str
        A number and a unit: none for bytes; K, M, G, T or KiB, MiB, ... are powers of 1024; KB, MB, GB, TB
        are powers of 1000.

    Returns
    -------
    int
        Bytes, at least 1.

    Raises
    ------
    ValueError
        If the text is no size, or is zero.

    Examples
    --------
    >>> parse_size("8G"), parse_size("512M"), parse_size("1.5KiB"), parse_size("5GB")
    (8589934592, 536870912, 1536, 5000000000)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 512M, 8G or 5GB")
    number, unit, suffix = match[1], match[2].upper(), (match[3] or "").upper()
    if suffix == "IB" and not unit:
        raise ValueError(f"{text!r} is not a size; the units are K, M, G, T, KiB ... and KB ...")
    scale = _DECIMAL[unit] if suffix == "B" and unit else _UNITS[unit]
    size = int(float(number) * scale) if "." in number else int(number) * scale
    if size < 1:
        raise ValueError(f"{text!r} is zero bytes; at least 1 byte is needed")
    return size


def parse_bits(text: str) -> int | float:
    """The value of ``--bits``.

    Parameters
    ----------
    text : str
        2, 3, 4, 5, 6 or 8 (bits a code), exactly 1.58 (ternary), or a fraction above 1.58 and below 8 (a
        budget for the mean of the quantized weights).

    Returns
    -------
    int or float
        An int for a width; a float for the rest.

    Raises
    ------
    ValueError
        For everything else, such as 1, 7, 9 or text.

    Examples
    --------
    >>> parse_bits("4"), parse_bits("4.0"), parse_bits("1.58"), parse_bits("3.5")
    (4, 4, 1.58, 3.5)
    """
    allowed = "allowed are 2, 3, 4, 5, 6, 8, 1.58 (ternary) and fractions between 1.58 and 8 such as 3.5"
    value = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else math.nan
    if value.is_integer():
        if int(value) not in _WHOLE_BITS:
            raise ValueError(f"{text!r} is not a supported number of bits; {allowed}")
        return int(value)
    if not _TERNARY_BITS <= value < 8:
        raise ValueError(f"{text!r} is not a supported number of bits; {allowed}")
    return value


def real(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A parser of finite numbers in ``[low, high]``, or ``(low, high]`` with ``above``.

    Examples
    --------
    >>> real(0, 1, above=True)("0.9")
    0.9
    >>> real(0)("-1")
    Traceback (most recent call last):
    ValueError: '-1' is not allowed; give a number of at least 0
    """
    lower = f"above {low:g}" if above else f"of at least {low:g}"
    wanted = lower if math.isinf(high) else f"{lower} and at most {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (value > low if above else value >= low) and value <= high and math.isfinite(value)
        if not inside:
            raise ValueError(f"{text!r} is not allowed; give a number {wanted}")
        return value

    return parse


def whole(low: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` on.

    Examples
    --------
    >>> whole(1)("8")
    8
    >>> whole(1)("0")
    Traceback (most recent call last):
    ValueError: '0' is not allowed; give a whole number of at least 1
    """

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) < low:
            raise ValueError(f"{text!r} is not allowed; give a whole number of at least {low}")
        return int(text)

    return parse


def choice(*allowed: str) -> Callable[[str], str]:
    """A parser of one of a few words.

    Examples
    --------
    >>> choice("cpu")("tpu")
    Traceback (most recent call last):
    ValueError: 'tpu' is not one of: cpu
    """

    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not one of: {', '.join(allowed)}")
        return text

    return parse


def option(*names: str, help: str, parse: Callable[[str], Any] | None = None, **settings: Any) -> Any:
    """``typer.Option`` whose parser's ``ValueError`` becomes a usage error with its own words.

    Parameters
    ----------
    *names : str
        The option's spellings, as for ``typer.Option``.
    help : str
        One line for ``--help``.
    parse : callable, optional
        Turns the text into the value, or raises ``ValueError``.
    **settings
        Passed on to ``typer.Option``.
    """
    if parse is None:
        return typer.Option(*names, help=help, **settings)

    def convert(text: Any) -> Any:
        if not isinstance(text, str):  # a default that is already a value
            return text
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(*names, help=help, parser=convert, **settings)


def only_with(context: typer.Context, holds: bool, what: str, *names: str) -> None:
    """Refuse options that were given and would change nothing.

    Parameters
    ----------
    context : typer.Context
        Of the running command.
    holds : bool
        Whether the options have an effect in this call.
    what : str
        When they have one: completes "goes with ...".
    *names : str
        Parameter names of the command.

    Raises
    ------
    typer.BadParameter
        A usage error that names the first idle option.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if not holds and given and parameter.name in names:
            raise typer.BadParameter(f"{parameter.opts[0]} goes with {what}; here it would change nothing")


def utf8_argument(text: str) -> str:
    """Text of the command line as UTF-8, even where the locale made surrogates of its bytes.

    Parameters
    ----------
    text : str
        An element of ``sys.argv``.

    Raises
    ------
    ValueError
        If its bytes are not UTF-8.
    """
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise ValueError("the text is not valid UTF-8") from None


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=enable_debug, help="Show the traceback of an error.", is_eager=True),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")]
MixedCpus = Annotated[
    bool,
    typer.Option(
        "--mixed-cpus", help="Accept tensors from CPUs with unlike features; bytes may then differ."
    ),
]
Threads = Annotated[
    int | None,
    option("--threads", parse=whole(1), help="Threads; all cores of this process by default.", metavar="N"),
]
Device = Annotated[
    str,
    option("--device", parse=choice("cpu", "cuda"), help="Where to compute: cpu or cuda.", metavar="NAME"),
]
Experts = Annotated[
    str,
    option(
        "--experts",
        parse=choice("card", "cpu"),
        help="With --device cuda, where routed experts run: card, or cpu in host memory.",
        metavar="NAME",
    ),
]
Context = Annotated[int, option("--ctx", parse=whole(2), help="Tokens in a window.", metavar="N")]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit of a Hub id.")
]
Token = Annotated[str | None, typer.Option("--token", metavar="T", help="Hub token; HF_TOKEN by default.")]
Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The folder that quantize wrote.")]
Quality = Annotated[
    list[Path] | None,
    typer.Option(
        "--quality",
        metavar="FILE",
        help="Output of perplexity, compare or verify with --json; again and again.",
    ),
]
TextFile = Annotated[
    Path,
    typer.Option(
        "--text", help="A UTF-8 text file.", metavar="FILE", exists=True, dir_okay=False, readable=True
    ),
]
ShardSize = Annotated[
    int,
    option(
        "--max-shard-size",
        parse=parse_size,
        help="The largest weight file.",
        metavar="SIZE",
        show_default="5G",
    ),
]
