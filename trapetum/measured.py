"""What was measured of a model, as rows for people: from what ``perplexity``, ``compare``, ``verify --json`` print.

An artifact holds no quality figures: they depend on a text, a machine and a day, and its bytes must not. So whoever
wants them shown (``push``, ``report``) names the files into which the commands' stdout went.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trapetum.errors import FormatError

__all__ = ["measured_rows"]

_MOST_BYTES = 64 << 20  # compare --json lists every changed argmax
_SHOWN = {  # key -> how a table calls it
    "ppl": "perplexity",
    "ppl_a": "perplexity of the first model",
    "ppl_b": "perplexity of the second model",
    "kl_mean": "KL divergence, mean (nats)",
    "kl_max": "KL divergence, largest (nats)",
    "top1_agreement": "top-1 agreement",
    "tv_mean": "total variation, mean",
    "tokens": "tokens",
    "ctx": "context",
}
_STATES = {True: "passed", False: "FAILED", None: "not asked"}


def measured_rows(files: Iterable[str | Path]) -> list[tuple[str, str]]:
    """Rows of a quality table.

    Parameters
    ----------
    files : iterable of path
        Each holds what ``perplexity --json``, ``compare --json`` or ``verify --json`` printed.

    Returns
    -------
    list of (str, str)
        What was measured, and its value.

    Raises
    ------
    FormatError
        If a file cannot be read or holds no such result.
    """
    return [row for file in files for row in _rows(Path(file))]


def _rows(file: Path) -> list[tuple[str, str]]:
    try:
        with open(file, "rb") as stream:
            data = json.loads(stream.read(_MOST_BYTES))
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        data = None
    rows = [*_figures(data), *_checks(data)] if isinstance(data, dict) else []
    if not rows:
        raise FormatError(
            f"{file}: is no result of `trapetum perplexity --json`, `compare --json` or `verify --json`",
            hint="Redirect their stdout into a file.",
        )
    return rows


def _figures(data: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(text, data[key]) for key, text in _SHOWN.items() if isinstance(data.get(key), int | float)]
    return [(text, f"{value:,}" if isinstance(value, int) else f"{value:.5g}") for text, value in found]


def _checks(data: dict[str, Any]) -> list[tuple[str, str]]:
    checks = data.get("checks")
    if not isinstance(checks, list) or not all(isinstance(c, dict) for c in checks):
        return []
    return [
        (f"verify: {c['name']}", f"{_STATES.get(c.get('ok'), '')}: {c['detail']}")
        for c in checks
        if isinstance(c.get("name"), str)
        and isinstance(c.get("detail"), str)
        and isinstance(c.get("ok"), bool | None)
    ]
