"""The typer app: its commands, its one way out, and ``main``.

``rich`` is switched off on purpose: plain help costs 0.09 CPU s instead of 0.19, and logs stay free of boxes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import trapetum
from trapetum.cli import output
from trapetum.cli.batch import batch
from trapetum.cli.bench import bench
from trapetum.cli.compare import compare
from trapetum.cli.env import env
from trapetum.cli.export import export
from trapetum.cli.imatrix import imatrix
from trapetum.cli.inspect import inspect
from trapetum.cli.merge import merge
from trapetum.cli.perplexity import perplexity
from trapetum.cli.push import push
from trapetum.cli.quantize import quantize
from trapetum.cli.recipes import recipes
from trapetum.cli.report import report
from trapetum.cli.run import run
from trapetum.cli.verify import verify

__all__ = ["COMMANDS", "app", "main"]

COMMANDS: tuple[Callable[..., None], ...] = (
    quantize,
    merge,
    batch,
    push,
    imatrix,
    export,
    verify,
    inspect,
    report,
    run,
    perplexity,
    compare,
    recipes,
    bench,
    env,
)


class _Group(TyperGroup):
    """The command group; every exception of every command leaves through :func:`output.report_error`."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Parse, run, and exit with the code of the table in :mod:`trapetum.cli.output`."""
        try:
            result = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except (SystemExit, typer.Exit):
            raise
        except typer.Abort:  # what some releases of typer make of Ctrl-C
            code = output.report_error(KeyboardInterrupt())
        except BaseException as error:
            code = output.report_error(error)
        else:
            code = result if isinstance(result, int) else 0
            if code == output.INTERRUPTED:
                output.note("error: interrupted")
        sys.exit(code)


app = typer.Typer(
    name="trapetum",
    cls=_Group,
    help="Offline, torch-free quantization and export of language-model checkpoints.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _command in COMMANDS:
    app.command()(_command)


def _version(value: bool) -> None:
    if value:
        output.emit(None, f"trapetum {trapetum.__version__}", as_json=False)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        output.note(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the command line on ``sys.argv`` and exit the process with a code of :mod:`trapetum.cli.output`."""
    output.standard_streams()
    with output.sigterm_raises():
        try:
            app(prog_name="trapetum")
        finally:
            _quiet_stdout()


def _quiet_stdout() -> None:
    """Flush stdout; where its reader went away, point it at nowhere: the interpreter flushes it once more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
