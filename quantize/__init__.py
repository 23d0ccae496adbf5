"""Arrays -> QuantizedTensor: the searches, the recipes, the plan and the job. Knows no file format."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trapetum.quantize.job import quantize_model
    from trapetum.quantize.kmeans import fit_codebooks, needs_wide_codebook, optimal_codebook
    from trapetum.quantize.plan import Plan, PlanRow, make_plan
    from trapetum.quantize.recipe import Recipe, list_recipes, load_recipe, resolve_recipe
    from trapetum.quantize.report import Report
    from trapetum.quantize.schemes import SCHEMES, Scheme

__all__ = [
    "SCHEMES",
    "Plan",
    "PlanRow",
    "Recipe",
    "Report",
    "Scheme",
    "fit_codebooks",
    "list_recipes",
    "load_recipe",
    "make_plan",
    "needs_wide_codebook",
    "optimal_codebook",
    "quantize_model",
    "resolve_recipe",
]

# Loaded with the first use: the searches bring numba, the recipes pydantic.
_HOMES = {
    "job": ("quantize_model",),
    "kmeans": ("fit_codebooks", "needs_wide_codebook", "optimal_codebook"),
    "plan": ("Plan", "PlanRow", "make_plan"),
    "recipe": ("Recipe", "list_recipes", "load_recipe", "resolve_recipe"),
    "report": ("Report",),
    "schemes": ("SCHEMES", "Scheme"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"trapetum.quantize.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
