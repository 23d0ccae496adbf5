"""Do tokenizer and embedding belong together? Asked before any work: a token without a row cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trapetum.errors import CheckpointError

__all__ = ["check_vocabulary"]


def check_vocabulary(tokenizer: Path, rows: int) -> list[str]:
    """Compare the ids of a ``tokenizer.json`` with the rows of the embedding.

    Fewer tokens than rows are usual (rows are padded). More are not: text that gives such an id cannot be run. A
    *special* token beyond the rows is only noted: plain text does not give it, and text models are published with the
    image marks of their siblings.

    Parameters
    ----------
    tokenizer : Path
    rows : int
        Rows of the embedding.

    Returns
    -------
    list of str
        Notes.

    Raises
    ------
    CheckpointError
        If other tokens reach beyond the rows; both numbers are named.
    """
    try:
        content = json.loads(tokenizer.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        added = content["added_tokens"]
        special = {token["content"]: token["id"] for token in added if token["special"]}
        plain = _ids(content["model"]["vocab"]) | {token["content"]: token["id"] for token in added}
        last = max((i for token, i in plain.items() if token not in special), default=-1)
        beyond = sorted(token for token, i in special.items() if i >= rows)
    except OSError as error:
        raise CheckpointError(f"{tokenizer}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{tokenizer.name} is not what the tokenizers library writes; copied as it is, not checked"]
    if last >= rows:
        raise CheckpointError(
            f"{tokenizer}: has token ids up to {last}, but the embedding has {rows} rows, for ids up to {rows - 1}",
            hint="Tokenizer and weights belong to different models: take both from one place.",
        )
    if beyond:
        few = ", ".join(map(ascii, beyond[:4])) + (", ..." if len(beyond) > 4 else "")
        return [f"{tokenizer.name} has special tokens beyond the {rows} rows of the embedding: {few}"]
    return []


def _ids(vocab: Any) -> dict[str, int]:
    """Token -> id; Unigram models store a list of (token, score) in the order of the ids."""
    return dict(vocab) if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
