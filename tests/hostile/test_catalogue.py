"""The outside catalogue of fault inputs, where it is at hand: the reader's verdicts on its own generated models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import TrapetumError
from trapetum.formats.checkpoint import Checkpoint

GROUPS = ("open_0", "open_10", "open_11", "open_12", "open_23", "open_28", "open_29")


@pytest.mark.slow
def test_verdicts_and_values(catalogue: Path) -> None:
    seen = {"accept": 0, "reject": 0, "either": 0}
    wrong = []
    for case in sorted(p for p in catalogue.iterdir() if p.name.startswith(GROUPS)):
        expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
        verdict, mentions = expected["verdict"], expected.get("must_mention", [])
        seen[verdict] += 1
        try:
            with Checkpoint.open(case / "model") as source:
                said, words = "accept", " ".join(source.notes)
                if (case / "oracle.npz").exists():
                    with np.load(case / "oracle.npz") as oracle:
                        for key in oracle.files:
                            name = key.replace("|", "/")
                            if not np.array_equal(source.load(name).dequantize(), oracle[key]):
                                wrong.append(f"{case.name}: {name} has other values")
                if (
                    verdict == "either"
                    and mentions
                    and source.notes
                    and not any(m in words for m in mentions)
                ):
                    wrong.append(f"{case.name}: accepted, but the notes do not mention {mentions}")
        except TrapetumError as error:
            said, words = "reject", error.message
            if missing := [m for m in mentions if m not in words]:
                wrong.append(f"{case.name}: {missing} not in {words}")
        if case.name.endswith("__permission"):
            continue  # root may read a file of mode 000; the message has a test of its own
        if verdict not in (said, "either"):
            wrong.append(f"{case.name}: {said}, expected {verdict}: {words}")
    assert wrong == []
    assert seen["reject"] >= 13
    assert seen["accept"] >= 5
