"""What a job is asked for: where its work is done, what is known of its inputs, which choices exclude each other."""

from __future__ import annotations

from pathlib import Path

from trapetum.errors import RecipeError
from trapetum.quantize.share import Share
from trapetum.quantize.statistics import Calibration
from trapetum.runtime.calibrate import TOKENS

__all__ = ["check_routes", "check_stream", "job_calibration"]


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


def job_calibration(
    calibrate: str | Path | None, tokens: int | None, imatrix: str | Path | None, sequential: bool
) -> Calibration | None:
    """What is known of the inputs; None if nothing is.

    Raises
    ------
    RecipeError
        If the choices exclude each other.
    """
    if calibrate is not None and imatrix is not None:
        raise RecipeError("calibrate and imatrix exclude each other: each says what is known of the inputs")
    if tokens is not None and (calibrate is None or tokens < 1):
        raise RecipeError(f"calib_tokens is {tokens}; it takes a positive number, and goes with calibrate")
    if sequential and calibrate is None:
        raise RecipeError("sequential goes with calibrate: it says how the text is used")
    if calibrate is not None:
        return Calibration(Path(calibrate), tokens or TOKENS, sequential)
    return None if imatrix is None else Calibration(Path(imatrix))
