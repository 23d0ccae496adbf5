"""Configs and tensor names as users met them: each small checkpoint is run or refused as its verdict says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trapetum
from trapetum.errors import TrapetumError
from trapetum.models.config import parse_config
from trapetum.runtime.model import Model
from trapetum.tensors import DenseTensor

ACCEPTED = [
    ("open_20_tied_no_head", []),
    ("open_20_tied_no_head", ["--noflag"]),
    ("open_21_fused_qkv", []),
    *[
        ("open_22_config_variants", ["--kind", k])
        for k in ("headdim", "nokv", "nullkv", "dtype", "nested", "utf8bom")
    ],
    *[("open_23_extra_tensors", ["--kind", k]) for k in ("buffers", "bias", "mtp", "noprefix")],
]
REFUSED = [
    ("open_20_tied_no_head", ["--untied"]),
    *[("open_22_config_variants", ["--kind", k]) for k in ("noarch", "noconfig")],
]


def generate(shared: Path, out: Path, script: str, options: list[str]) -> dict[str, object]:
    file = shared / "cases" / f"{script}.py"
    subprocess.run(
        [sys.executable, file.name, str(out), *options],
        cwd=file.parent,
        check=True,
        capture_output=True,
        timeout=300,
    )
    return json.loads((out / "expected.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("script", "options"), ACCEPTED)
def test_accepted(
    shared: Path, tmp_path: Path, script: str, options: list[str], memory_source: object
) -> None:
    assert generate(shared, tmp_path, script, options)["verdict"] in ("accept", "either")
    ids = [1, 5, 90, 33, 2]
    with trapetum.load(tmp_path / "model") as model:
        ours = model.logits(ids)
        config = model.config
    # the same weights, as the generator meant them, under their canonical names
    oracle = np.load(tmp_path / "oracle.npz")
    values = {
        n.removeprefix("language_model."): DenseTensor(oracle[n]) for n in oracle.files if "vision" not in n
    }
    if not any(n.startswith("model.") for n in values):
        values = {n if n.startswith("lm_head") else f"model.{n}": t for n, t in values.items()}
    source = memory_source(**_plain(config))  # type: ignore[operator]
    source.tensors = values
    np.testing.assert_array_equal(Model(source).logits(ids), ours)
    assert ours.shape == (5, 96)
    assert np.isfinite(ours).all()
    assert ours.std() > 0.1


def _plain(config: object) -> dict[str, object]:
    """The config in its most explicit spelling."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    keys += (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    found = {k: getattr(config, k) for k in keys}
    assert parse_config({"model_type": "llama", **found}).head_dim == found["head_dim"]
    return found


@pytest.mark.parametrize(("script", "options"), REFUSED)
def test_refused(shared: Path, tmp_path: Path, script: str, options: list[str]) -> None:
    expected = generate(shared, tmp_path, script, options)
    with pytest.raises(TrapetumError) as caught:
        trapetum.load(tmp_path / "model")
    text = f"{caught.value.message} {caught.value.hint}"
    assert "\n" not in text
    for word in expected.get("must_mention", ["lm_head.weight"]):  # type: ignore[attr-defined]
        assert word in text
