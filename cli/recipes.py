"""``trapetum recipes``: the recipes that come with the package."""

from __future__ import annotations

from trapetum.cli.options import Debug, Json
from trapetum.cli.output import emit, fields

__all__ = ["recipes"]


def recipes(json: Json = False, debug: Debug = False) -> None:
    """List the recipes that --recipe knows by name."""
    from trapetum.quantize.recipe import list_recipes

    found = list_recipes()
    emit(found, lambda: fields(found), as_json=json)
