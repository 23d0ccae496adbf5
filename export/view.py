"""What views of a model share: everything but the tensors is the source's own.

A view presents the tensors of a source in another form (stacks, single experts, halves); it says which names there are,
their shapes and values, and hands the rest on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from trapetum.formats.source import TensorSource

__all__ = ["SourceView"]


class SourceView:
    """The members of a ``TensorSource`` that do not depend on the form of tensors.

    Parameters
    ----------
    source : TensorSource
        Closed with the view.
    """

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.path: Path = source.path
        self.kind, self.config, self.notes = source.kind, source.config, source.notes

    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, where there is one."""
        return self.source.tokenizer_file()

    def side_files(self) -> list[Path]:
        """Config, tokenizer and generation files."""
        return self.source.side_files()

    def close(self) -> None:
        """Close all files."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
