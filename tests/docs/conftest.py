"""The loopback Hub of tests/hub, for pages that name Hub ids."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[1] / "hub" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("trapetum_test_hub_fixtures", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)

hub = _MODULE.hub
