"""kill -9 at fifty random moments: nothing that was whole is lost, and the end has the bytes of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("kill_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(
    demo_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    kills = int(os.environ.get("TRAPETUM_KILLS", "50"))
    command = (sys.executable, WORKER, demo_model, tmp_path, kills, 1)
    worker = start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = worker.communicate(timeout=1700)
    assert worker.returncode == 0, err
    counts = json.loads(out)
    with capsys.disabled():
        print(f"\nkills: {out.strip()}")
    assert counts["kills"] >= kills
    assert kills < 30 or set(counts["scenarios"]) == {
        "quantize",
        "replace",
        "parts",
        "gguf",
        "cbk",
    }  # six kills each
    assert all(entry["kills"] > 0 for entry in counts["scenarios"].values())
