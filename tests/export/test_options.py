"""Options of an export that its format does not know are refused, never passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trapetum
from trapetum.errors import RecipeError
from trapetum.export import FORMATS, shard_size_for

GIVEN: dict[str, Any] = {
    "source": "SOURCE",
    "dtype": "f16",
    "gguf_type": "Q8_0",
    "max_shard_size": 1_000_000,
    "fuse": True,
    "magic": "CBK3",
}
IDLE = [(format, option) for format, row in FORMATS.items() for option in GIVEN if option not in row.takes]


@pytest.mark.parametrize(("format", "option"), IDLE)
def test_what_a_format_does_not_take_is_refused(
    format: str, option: str, demo_model: Path, tmp_path: Path
) -> None:
    value = demo_model if option == "source" else GIVEN[option]
    with pytest.raises(RecipeError, match=f"^{option} changes nothing in the {format} export") as caught:
        trapetum.export_artifact(demo_model, format, tmp_path / "out", **{option: value})
    wanted = "--gguf-type F16" if (format, option) == ("gguf", "dtype") else f"--{option.replace('_', '-')} "
    assert wanted in f"{caught.value.hint} "
    assert list(tmp_path.iterdir()) == []


def test_the_shard_size_of_an_artifact_reaches_formats_of_several_files() -> None:
    assert {f for f in FORMATS if shard_size_for(f, 7) == 7} == {"hf", "gguf"}
