"""Messages name their file and stay one line, whatever the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import trapetum
from trapetum.errors import CheckpointError, RecipeError, TrapetumError, located


def test_a_path_is_put_before_what_does_not_name_it() -> None:
    with (
        pytest.raises(CheckpointError, match=r"^dir/m: config\.json: bad$") as caught,
        located(Path("dir/m")),
    ):
        raise CheckpointError("config.json: bad", hint="mend it")
    assert caught.value.hint == "mend it"
    with pytest.raises(CheckpointError, match=r"^dir/m/x: bad$"), located("dir/m"):
        raise CheckpointError("dir/m/x: bad")
    with pytest.raises(KeyError), located("dir/m"):
        raise KeyError("x")


@pytest.mark.parametrize(
    "change", [{"model_type": "x", "architectures": ["X"]}, {"hidden_act": "x"}, {"hidden_size": 0}]
)
def test_every_command_says_which_model_is_meant(
    change: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model, folder)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | change))
    calls = [
        lambda: trapetum.quantize_model(folder, tmp_path / "out", dry_run=True),
        lambda: trapetum.load(folder),
        lambda: trapetum.export_artifact(folder, "cbk", tmp_path / "cbk"),
    ]
    for call in calls:
        with pytest.raises(TrapetumError) as caught:
            call()
        assert caught.value.message.startswith(str(folder))


@pytest.mark.parametrize("options", [{"bits": "4"}, {"bits": True}, {"max_shard_size": 0}])
def test_options_of_another_type_are_refused(
    options: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError):
        trapetum.quantize_model(demo_model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
