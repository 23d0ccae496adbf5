"""Changes of single layers: their distances are those of whole models with the change, whatever the threads."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trapetum.errors import RecipeError
from trapetum.formats.view import ReplacedTensors
from trapetum.kernels.cpu.pool import Pool
from trapetum.runtime.divergence import divergences
from trapetum.runtime.model import Model
from trapetum.tensors import DenseTensor

IDS = np.random.default_rng(5).integers(0, 60, (3, 24)).astype(np.intp)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def test_distances_are_those_of_whole_models(memory_source: Callable[..., Any]) -> None:
    source = memory_source()
    layers = Model(source, Pool(1)).config.num_hidden_layers
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    changes = [(layer, [f"model.layers.{layer}.{part}.weight"]) for part in parts for layer in range(layers)]
    changes.append((0, [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]))

    def changed(name: str) -> DenseTensor:
        return DenseTensor(np.round(source.load(name).dequantize() * 16) / np.float32(16))

    found = divergences(source, changes, changed, IDS, Pool(2))
    assert found == divergences(source, changes, changed, IDS, Pool(1))
    view = ReplacedTensors(source)
    pool = Pool(1)
    before = [log_softmax(Model(source, pool).logits(ids)) for ids in IDS]
    for (_, names), distance in zip(changes, found, strict=True):
        view.tensors = {name: changed(name) for name in names}
        after = [log_softmax(Model(view, pool).logits(ids)) for ids in IDS]
        exact = np.mean([(np.exp(a) * (a - b)).sum(axis=-1) for a, b in zip(before, after, strict=True)])
        assert exact > 1e-7
        assert abs(distance - exact) < 1e-3 * exact + 1e-8


def test_nothing_changed_is_no_distance(memory_source: Callable[..., Any]) -> None:
    source = memory_source()
    name = "model.layers.0.mlp.down_proj.weight"
    assert divergences(source, [(0, [name])], source.load, IDS, Pool(1)) == [0.0]
    assert divergences(source, [], source.load, IDS, Pool(1)) == []


def test_many_changes_take_few_files(
    memory_source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = memory_source()
    name = "model.layers.0.mlp.down_proj.weight"
    expected = divergences(source, [(0, [name])] * 24, source.load, IDS, Pool(1))
    monkeypatch.setattr("trapetum.runtime.calibrate._IN_MEMORY", 0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(n) for n in os.listdir("/proc/self/fd")}
    most = [n for n in range(len(taken) + 16) if n not in taken][12]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        found = divergences(source, [(0, [name])] * 24, source.load, IDS, Pool(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_change_that_breaks_the_model_is_infinitely_far(
    memory_source: Callable[..., Any], value: float
) -> None:
    source = memory_source()
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "up")]

    def changed(name: str) -> DenseTensor:
        weight = source.load(name).dequantize().copy()
        if name == names[0]:
            weight[0, 0] = value
        return DenseTensor(weight)

    assert divergences(source, [(0, [name]) for name in names], changed, IDS, Pool(1)) == [np.inf, 0.0]


def test_a_model_that_is_broken_itself_is_refused(memory_source: Callable[..., Any]) -> None:
    view = ReplacedTensors(memory_source())
    name = "model.layers.0.mlp.down_proj.weight"
    weight = view.load(name).dequantize().copy()
    weight[0, 0] = np.nan
    view.tensors = {name: DenseTensor(weight)}
    with pytest.raises(RecipeError, match="logits that are not finite"):
        divergences(view, [(1, [name.replace("0", "1")])], view.load, IDS, Pool(1))
