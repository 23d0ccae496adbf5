"""A tokenizer with more tokens than the embedding has rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trapetum.errors import CheckpointError
from trapetum.quantize.vocabulary import check_vocabulary


def _tokenizer(folder: Path, vocab: Any, *added: tuple[int, str, bool]) -> Path:
    tokens = [{"id": i, "content": text, "special": special} for i, text, special in added]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"added_tokens": tokens, "model": {"vocab": vocab}}), encoding="utf-8")
    return path


@pytest.mark.parametrize("vocab", [{"a": 0, "é": 2}, [["a", -1.0], ["b", -2.0], ["é", -3.5]]])
def test_the_largest_id_counts(vocab: Any, tmp_path: Path) -> None:
    path = _tokenizer(tmp_path, vocab)
    assert check_vocabulary(path, 3) == check_vocabulary(path, 64) == []
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has token ids up to 2, .* 2 rows"):
        check_vocabulary(path, 2)


def test_added_tokens_count_unless_they_are_special(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"up to 7, .* 4 rows"):
        check_vocabulary(_tokenizer(tmp_path, {"a": 0}, (7, "<tool>", False)), 4)
    (note,) = check_vocabulary(_tokenizer(tmp_path, {"a": 0}, (4, "<image>", True)), 4)
    assert "4 rows" in note
    assert "'<image>'" in note
    assert check_vocabulary(_tokenizer(tmp_path, {"a": 0}, (3, "<image>", True)), 4) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}, "added_tokens": []}', "\udcff"])
def test_a_file_of_another_kind_is_noted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    (note,) = check_vocabulary(path, 4)
    assert "not checked" in note
