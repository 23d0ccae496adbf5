"""Shell completion: what the shell asks is answered with commands and options, and the script can be installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trapetum.cli.app import COMMANDS


def ask(words: str, shell: str = "bash") -> list[str]:
    """What a shell gets when Tab is pressed behind ``words``."""
    count = len(words.split()) - (0 if words.endswith(" ") else 1)
    variables = {"_TRAPETUM_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    if shell in ("zsh", "fish"):
        variables = {
            "_TRAPETUM_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": words,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
    done = subprocess.run(
        [sys.executable, "-c", "from trapetum.cli import main; main()"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.stdout.split()


def test_commands_are_completed() -> None:
    assert ask("trapetum quan") == ["quantize"]
    assert set(ask("trapetum ")) >= {f.__name__ for f in COMMANDS}


def test_options_are_completed() -> None:
    assert "--stream-download" in ask("trapetum quantize --str")
    assert "--quality" in ask("trapetum report x --qu")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    assert any("quantize" in word for word in ask("trapetum quan", shell))


def test_the_script_names_this_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from trapetum.cli import main; main()", "--show-completion", "bash"],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "SHELL": "/bin/bash",
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        },
        check=False,
    )
    assert "_TRAPETUM_COMPLETE=complete_bash" in done.stdout, done.stderr
    assert "complete -o default -F" in done.stdout
