"""kill -9 at fifty random moments: nothing that was whole is lost, and the end has the bytes of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("kill_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kills = int(os.environ.get("TRAPETUM_KILLS", "50"))
    command = [sys.executable, str(WORKER), str(demo_model), str(tmp_path), str(kills), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\nkills: {done.stdout.strip()}")
    assert counts["kills"] >= kills
    assert set(counts["scenarios"]) == {"quantize", "replace", "parts", "gguf", "cbk"}
    assert all(entry["kills"] > 0 for entry in counts["scenarios"].values())
