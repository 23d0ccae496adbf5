"""Every example in a docstring is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import trapetum
from trapetum.errors import KernelUnavailable

MODULES = sorted(
    m.name for m in pkgutil.walk_packages(trapetum.__path__, "trapetum.") if not m.name.endswith("__main__")
)


def test_the_walk_finds_the_packages() -> None:
    assert {"trapetum.tensors", "trapetum.quantize.kmeans", "trapetum.formats.safetensors"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except KernelUnavailable as reason:  # kernels of an extra that is not installed
        pytest.skip(str(reason))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
