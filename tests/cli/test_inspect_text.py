"""What inspect prints for a person: plain columns in a pipe, rich tables on a terminal, and no steering of either."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trapetum.cli import inspect as module

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def found(name: str = "model.layers.0.self_attn.q_proj.weight", count: int = 1) -> dict[str, Any]:
    tensor = {"name": name, "type": "bf16", "shape": [2, 3], "bytes": 12, "bpw": 16.0, "relative_error": 0.25}
    group = {"tensors": count, "weights": 6 * count, "bytes": 12 * count, "bpw": 16.0}
    return {
        "path": "x",
        "kind": "artifact",
        "metadata": {"recipe": {"a": "b" * 300}},
        "totals": group,
        "types": {"bf16": group},
        "notes": ["something to know"],
        "tensors": [tensor] * count,
    }


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_pipe_gets_plain_columns() -> None:
    text = module._text(found())
    assert "\x1b" not in text
    assert "model.layers.0.self_attn.q_proj.weight  bf16  2 x 3     12  16.000   2.500e-01" in text
    assert "note: something to know" in text


def test_a_terminal_gets_tables_that_fold(terminal: None) -> None:
    text = module._text(found())
    assert "\x1b[1m" in text
    bare = ESCAPES.sub("", text)
    assert max(map(len, bare.splitlines())) <= 60
    assert "…" not in bare.replace("...", "")
    cells = [line.split()[0] for line in bare.splitlines() if line.strip()]
    assert "model.layers.0.self_attn.q_proj.weight" in "".join(cells)
    assert "2.500e-01" in bare


def test_a_great_many_tensors_stay_plain(terminal: None) -> None:
    assert "\x1b" not in module._text(found(count=5001))


@pytest.mark.parametrize("tty", [False, True])
def test_names_do_not_steer_the_terminal(tty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty)
    text = module._text(found("evil\x1b]0;owned\x07[red]x\r"))
    for piece in ("\x1b]", "\x07", "\r"):
        assert piece not in text
    assert "[red]" in ESCAPES.sub("", text).replace("\n", "").replace(" ", "")


def test_rich_is_loaded_for_terminals_only(demo_model: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sys; sys.argv = ['trapetum', 'inspect', sys.argv[1]]\n"
        "from trapetum.cli import main\n"
        "try: main()\nfinally: print('rich' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(demo_model)], capture_output=True, text=True)
    assert done.stderr.strip().endswith("False")
