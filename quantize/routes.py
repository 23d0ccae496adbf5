"""Where the work of a job is done, and which of these choices exclude each other."""

from __future__ import annotations

from pathlib import Path

from trapetum.errors import RecipeError
from trapetum.quantize.share import Share

__all__ = ["check_routes", "check_stream"]


def check_routes(share: Share | None, workers: int | None, scheduler: str | None, resume: bool) -> None:
    """Ways to spread a job exclude each other.

    Raises
    ------
    RecipeError
    """
    routes = {"part": share, "workers": workers, "scheduler": scheduler}
    given = [name for name, value in routes.items() if value is not None]
    if len(given) > 1:
        raise RecipeError(f"{' and '.join(given)} exclude each other: each says where the whole work is done")
    if share is not None and not resume:
        raise RecipeError(
            "a part cannot begin anew: it would discard the work of the other parts",
            hint="Remove the output folder first, or leave --no-resume out.",
        )


def check_stream(
    model: str | Path, share: Share | None, workers: int | None, scheduler: str | None, calibrate: object
) -> None:
    """Files that come and go can be read by one process only, and by no forward pass.

    Raises
    ------
    RecipeError
    """
    given = {"part": share, "workers": workers, "scheduler": scheduler, "calibrate": calibrate}
    clash = [name for name, value in given.items() if value is not None]
    if clash:
        raise RecipeError(
            f"stream_download and {clash[0]} exclude each other: the model is never here whole",
            hint="Leave one of them out.",
        )
    if Path(model).exists():
        raise RecipeError(f"{model}: is here already; stream_download is for models of the Hub")
