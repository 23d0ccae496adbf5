"""The outside catalogue of fault inputs, where it is at hand: the reader's verdicts on its own generated models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import TrapetumError
from trapetum.formats.checkpoint import Checkpoint

GROUPS = ("open_0", "open_10", "open_11", "open_12", "open_23", "open_28", "open_29")


def concerns(case_name: str) -> bool:
    """Whether a case is about the container; root may read a file without permission all the same."""
    return case_name.startswith(GROUPS) and not case_name.endswith("__permission")


@pytest.mark.slow
def test_the_readers_verdict(case_name: str, make_case: Callable[[str], Path]) -> None:
    """The reader alone: what it says of the container, the values that it reads, and what its notes mention."""
    case = make_case(case_name)
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
    verdict, mentions = expected["verdict"], expected.get("must_mention", [])
    try:
        with Checkpoint.open(case / "model") as source:
            said, words = "accept", " ".join(source.notes)
            if (case / "oracle.npz").exists():
                with np.load(case / "oracle.npz") as oracle:
                    for key in oracle.files:
                        assert np.array_equal(source.load(key.replace("|", "/")).dequantize(), oracle[key]), (
                            key
                        )
            if verdict == "either" and mentions and source.notes:
                assert any(m in words for m in mentions)
    except TrapetumError as error:
        said, words = "reject", error.message
        assert [m for m in mentions if m not in words] == []
    assert verdict in (said, "either"), words
