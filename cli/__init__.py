"""The command line: a typer app, one thin module a command.

A command module parses options, calls one function of the library and hands the result to
:mod:`trapetum.cli.output`, the only place that prints. Nothing heavy is imported before a command runs:
``trapetum --help`` loads typer and nothing of numpy, numba, scipy, tokenizers or huggingface_hub.

Adding a command is one module with one function, and one line in :data:`trapetum.cli.app.COMMANDS`; adding
an option is one line in that function's signature.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; a Ctrl-C while its modules are loaded ends as a later one does."""
    try:
        from trapetum.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    run()
