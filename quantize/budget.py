"""A bit budget: every tensor that a recipe leaves open takes the scheme that is best for the whole.

``target_bpw`` counts all stored bits (codes, codebooks, scales) over all quantized tensors. What a rule fixes (``bits``
or ``scheme``) stays so and is paid first; the other tensors are measured under each candidate (``sensitivity``), tied
ones as one, and ``allocation`` chooses. The result is an ordinary recipe with a rule for every choice, kept in the
artifact as ``recipe.toml``: it leaves nothing open, so a run with it measures nothing and gives the same bytes.

=================  =============================================================================================
candidates         stands for
=================  =============================================================================================
``kmeans``         codebooks of 2, 3, 4, 5, 6 and 8 bits. Sizes between the powers of two cost as many bits a code and
                   save a few bytes of codebook: none was worth it on rows of 512
``additive``       two and three additive codebooks below :data:`ADDITIVE_BELOW` bits, three and four above; by default
                   only below, for they take 20 times as long
``gguf:TYPE``      that type; never by default
=================  =============================================================================================

Gate and up of a layer are tied, and so are its routed experts. Queries, keys and values are not unless the recipe says
``tie = ["qkv", ...]``: values are worth two bits more than queries, and one scheme for all three gives up the
whole gain (measured: 1.03 of the uniform loss instead of 0.89).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trapetum.errors import RecipeError
from trapetum.models.config import parse_config
from trapetum.progress import Progress
from trapetum.quantize.additive import Additive
from trapetum.quantize.allocation import Option, choose
from trapetum.quantize.blocks import ordered_map
from trapetum.quantize.recipe import ADDITIVE_BELOW, Recipe
from trapetum.quantize.rules import Rule
from trapetum.quantize.scheme import Effort
from trapetum.quantize.schemes import BITS, KMeans, Scheme
from trapetum.quantize.sensitivity import measure, prior
from trapetum.quantize.statistics import one_blas_thread

if TYPE_CHECKING:
    from trapetum.quantize.plan import Plan, PlanRow

__all__ = ["allocate", "budgeted"]

_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
_MEASURED = 8  # of the tensors of one role in a tied group, such as 256 experts
_WIDTHS = {KMeans.name: (2, 3, 4, 5, 6, 8)}
_BROKEN = 1e6  # times the most that any other loses: more bits wherever there are any
_NEARLY = 1.001  # a single scheme that is larger by a thousandth is what a budget of its rounded size is held against


@dataclass(frozen=True)
class _Candidate:
    """A scheme as a rule spells it."""

    scheme: str
    bits: int | None

    def rule(self, names: Sequence[str], effort: Effort | None = None) -> Rule:
        """The rule that gives it to these tensors."""
        return Rule(glob=list(names), scheme=self.scheme, bits=self.bits, effort=effort)


def allocate(plan: Plan, threads: int, progress: Progress, text: Path | None = None) -> Plan:
    """Spend the budget of the plan's recipe; the plan itself where there is none, or nothing is open.

    Parameters
    ----------
    plan : Plan
        Its ``statistics`` are used where there are any.
    threads : int
    progress : Progress
    text : Path, optional
        For calibration: what tensors are worth is then measured on the model itself (``influence``).

    Returns
    -------
    Plan
        With schemes, a recipe that spells them out, and a note on what was reached.

    Raises
    ------
    RecipeError
        If the budget is smaller than the smallest choice.
    """
    recipe, found = plan.recipe, _open(plan)
    if recipe.target_bpw is None or found is None:
        return plan
    groups, fitting, schemes = found.groups, found.fitting, found.schemes
    losses = _losses(plan, groups, fitting, schemes, threads, progress)
    if text is not None:
        losses = _weighed(plan, found, losses, text, threads, progress)
    options = [
        [(Option(nbytes, loss), c) for nbytes, loss, c in zip(*triple, strict=True)]
        for triple in zip(found.sizes, losses, fitting, strict=True)
    ]
    chosen = choose([[o for o, _ in group] for group in options], found.spare) or []
    taken = {
        row.name: group[i][1] for rows, group, i in zip(groups, options, chosen, strict=True) for row in rows
    }
    spelled = _spelled(plan, groups, taken)
    rows = tuple(_given(spelled, r) if r.name in taken else r for r in plan.rows)
    loss = sum(group[i][0].loss for group, i in zip(options, chosen, strict=True))
    note = _note(replace(plan, rows=rows), recipe.target_bpw, loss, options, list(schemes), found.spare)
    return replace(plan, rows=rows, recipe=spelled, notes=(*plan.notes, note))


def budgeted(plan: Plan) -> bool:
    """Whether :func:`allocate` has anything to choose; reads no weight.

    Raises
    ------
    RecipeError
        If the budget is smaller than the smallest choice.
    """
    return _open(plan) is not None


@dataclass(frozen=True)
class _Open:
    """What is to be chosen: groups of tied tensors, the candidates that fit each, their bytes, the bytes to spend."""

    groups: list[list[PlanRow]]
    schemes: dict[_Candidate, Scheme]
    fitting: list[list[_Candidate]]
    sizes: list[list[int]]
    spare: int


def _open(plan: Plan) -> _Open | None:
    recipe = plan.recipe
    if recipe.target_bpw is None:
        return None
    tied: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in _open_rows(plan):
        tied.setdefault(_tie(row, recipe.tie), []).append(row)
    if not tied:
        return None
    groups = list(tied.values())
    schemes = {c: recipe.scheme_of(c.rule(["*"])) for c in _candidates(recipe)}
    fitting = [[c for c in schemes if all(_fits(recipe, c, row) for row in rows)] for rows in groups]
    sizes = [
        [sum(_nbytes(schemes[c], row) for row in rows) for c in found]
        for rows, found in zip(groups, fitting, strict=True)
    ]
    opened = {row.name for rows in groups for row in rows}
    counted = [r for r in plan.rows if r.quantized]
    parameters = sum(r.parameters for r in counted)
    fixed = sum(r.nbytes for r in counted if r.name not in opened)
    budget = int(recipe.target_bpw * parameters / 8)
    if (least := fixed + sum(min(group) for group in sizes)) > budget:
        raise RecipeError(
            f"target_bpw is {recipe.target_bpw:g}, but the smallest candidates take {8 * least / parameters:.3f} bits "
            "a weight",
            hint="Ask for more bits, or name smaller candidates.",
        )
    return _Open(groups, schemes, fitting, sizes, budget - fixed)


def _tie(row: PlanRow, tie: Sequence[str]) -> tuple[object, ...]:
    """Tensors with equal keys take one scheme."""
    role = row.role
    if role.layer is None:
        return (row.name,)
    family = next(
        (
            name
            for name, kinds in (("qkv", "q k v"), ("gate_up", "gate up"))
            if name in tie and role.kind in kinds.split()
        ),
        role.kind,
    )
    expert = role.expert if "experts" not in tie else None
    return (role.layer, role.part.removesuffix(role.kind), family, expert)


def _rule(recipe: Recipe, row: PlanRow) -> int | None:
    return recipe.find(row.name, row.role.kind, row.role.layer, row.role.routed)


def _open_rows(plan: Plan) -> list[PlanRow]:
    """Tensors whose rule leaves the scheme open, where a candidate fits."""
    recipe, candidates = plan.recipe, _candidates(plan.recipe)
    open_rules = {i for i, rule in enumerate(recipe.rules) if rule.open}
    return [
        r
        for r in plan.rows
        if r.quantized and _rule(recipe, r) in open_rules and any(_fits(recipe, c, r) for c in candidates)
    ]


def _fits(recipe: Recipe, candidate: _Candidate, row: PlanRow) -> bool:
    return recipe.scheme_of(candidate.rule(["*"])).misfit(row.shape) is None


def _candidates(recipe: Recipe) -> list[_Candidate]:
    target = recipe.target_bpw or 0.0
    names = recipe.candidates
    if names is None:
        names = (KMeans.name, Additive.name) if target < ADDITIVE_BELOW else (KMeans.name,)
    widths = {**_WIDTHS, Additive.name: (2, 3) if target < ADDITIVE_BELOW else (3, 4)}
    return [
        _Candidate(name, bits)
        for name in names
        for bits in (widths.get(name, BITS.get(name, (None,))))  # a scheme without widths is one candidate
    ]


def _losses(
    plan: Plan,
    groups: Sequence[Sequence[PlanRow]],
    fitting: Sequence[Sequence[_Candidate]],
    schemes: Mapping[_Candidate, Scheme],
    threads: int,
    progress: Progress,
) -> list[list[float]]:
    """What each group loses under each candidate that fits it."""
    layers = 1 + max((r.role.layer for r in plan.rows if r.role.layer is not None), default=0)
    work = [(g, row, count) for g, rows in enumerate(groups) for row, count in _sampled(rows)]
    sharing = Counter((r.role.layer, r.role.part) for r in plan.rows)  # routed experts that share the tokens
    tried = {c: _quick(s) for c, s in schemes.items()}

    def look(item: tuple[int, PlanRow, float]) -> list[float]:
        group, row, count = item
        errors = measure(plan, row, [tried[c] for c in fitting[group]])
        experts = sharing[row.role.layer, row.role.part] if row.role.expert is not None else 1
        moments = plan.statistics is not None and plan.statistics.has_moment(row)
        weight = prior(row, layers, experts, moments=moments) * count
        return [weight * e for e in errors]

    progress.begin("measure", len(work), "tensor")
    losses = [np.zeros(len(found)) for found in fitting]
    blas = one_blas_thread() if plan.statistics is not None else None
    try:
        with ThreadPoolExecutor(threads, "trapetum-measure") as executor:
            for (group, _, _), found in ordered_map(executor, look, work, threads + 2):
                losses[group] += found
                progress.advance(1)
    finally:
        if blas is not None:
            blas.restore_original_limits()
    progress.end()
    return [[float(v) for v in found] for found in losses]


def _weighed(
    plan: Plan,
    found: _Open,
    losses: Sequence[Sequence[float]],
    text: Path,
    threads: int,
    progress: Progress,
) -> list[list[float]]:
    """The losses of groups in units of what the model itself loses with one scheme for each.

    Groups of one part of a layer (experts that are chosen one by one) are measured together. What is in no layer, such
    as a head, or too large to be measured, is held to the median of the others, and nothing counts less than a tenth of
    it: a few thousand tokens may leave an expert out. What breaks the model counts more than all others.
    """
    from trapetum.quantize.influence import Change, influence

    layers = parse_config(plan.source.config).num_hidden_layers
    below = [_below(plan, *group) for group in zip(found.groups, found.fitting, found.sizes, strict=True)]
    together: dict[tuple[object, ...], list[int]] = {}
    for g, rows in enumerate(found.groups):
        role = rows[0].role
        if role.layer is not None and role.layer < layers and losses[g][below[g]] > 0:
            together.setdefault((role.layer, role.part, below[g]), []).append(g)
    changes = [
        Change(
            tuple(row for g in groups for row in found.groups[g]),
            _quick(found.schemes[found.fitting[groups[0]][below[groups[0]]]]),
        )
        for groups in together.values()
    ]
    if not changes:
        return [list(one) for one in losses]
    measured = influence(plan, changes, text, threads, progress)
    factors = [np.nan] * len(losses)
    for groups, loss in zip(together.values(), measured, strict=True):
        share = loss / sum(losses[g][below[g]] for g in groups)
        for g in groups:
            factors[g] = share
    known = [f for f in factors if np.isfinite(f)] or [1.0]
    middle, most = float(np.median(known)), _BROKEN * (max(known) or 1.0)
    return [
        [value * (middle if np.isnan(f) else min(max(f, middle / 10), most)) for value in one]
        for one, f in zip(losses, factors, strict=True)
    ]


def _below(plan: Plan, rows: Sequence[PlanRow], fitting: Sequence[_Candidate], sizes: Sequence[int]) -> int:
    """The candidate nearest to one bit less than the budget; additive codebooks only where there is nothing else."""
    wanted = ((plan.recipe.target_bpw or 0) - 1) * sum(r.parameters for r in rows) / 8
    quick = [i for i, c in enumerate(fitting) if c.scheme != Additive.name] or range(len(fitting))
    return min(quick, key=lambda i: (abs(sizes[i] - wanted), i))


def _quick(scheme: Scheme) -> Scheme:
    """What is measured for a scheme: additive codebooks with less effort, which is a few hundredths of their error."""
    return replace(scheme, effort="fast") if isinstance(scheme, Additive) else scheme


def _nbytes(scheme: Scheme, row: PlanRow) -> int:
    return replace(row, scheme=scheme, wide=False).nbytes


def _sampled(rows: Sequence[PlanRow]) -> list[tuple[PlanRow, float]]:
    """The tensors of a group that are measured, each with how many it stands for."""
    found = []
    for part in dict.fromkeys(r.role.part for r in rows):
        mine = [r for r in rows if r.role.part == part]
        step = -(-len(mine) // _MEASURED)
        picked = mine[::step]
        found += [(row, len(mine) / len(picked)) for row in picked]
    return found


def _spelled(
    plan: Plan,
    groups: Sequence[Sequence[PlanRow]],
    taken: dict[str, _Candidate],
) -> Recipe:
    """The recipe with a rule for every choice, in front of the rules that left it open."""
    recipe = plan.recipe
    names: dict[tuple[_Candidate, Effort | None], list[str]] = {}
    for rows in groups:
        index = _rule(recipe, rows[0])
        effort = recipe.rules[index].effort if index is not None else None
        names.setdefault((taken[rows[0].name], effort), []).extend(_patterns(plan, rows))
    rules = tuple(c.rule(patterns, effort) for (c, effort), patterns in names.items())
    return recipe.model_copy(update={"rules": (*rules, *recipe.rules)})


def _patterns(plan: Plan, rows: Sequence[PlanRow]) -> list[str]:
    """Globs that match these tensors and no others of the plan: experts of a layer in one."""
    mine = {r.name for r in rows}
    found: dict[str, None] = {}
    for row in rows:
        exact = escape(row.name)
        wide = (
            re.sub(r"(?<=\.)\d+(?=\.)", "*", exact[::-1], count=1)[::-1]
            if row.role.expert is not None
            else exact
        )
        covered = {r.name for r in plan.rows if fnmatchcase(r.name, wide)}
        found[wide if covered <= mine else exact] = None
    return list(found)


def _given(recipe: Recipe, row: PlanRow) -> PlanRow:
    index = _rule(recipe, row) or 0  # the rules of the choices come first
    rule = recipe.rules[index]
    return replace(row, scheme=recipe.scheme_of(rule), why=f"rules[{index}]: {rule}")


def _note(
    plan: Plan,
    target: float,
    loss: float,
    options: Sequence[Sequence[tuple[Option, _Candidate]]],
    candidates: Sequence[_Candidate],
    nbytes: int,
) -> str:
    """What was reached, beside the best single scheme that fits."""
    text = f"budget: {plan.quantized_bpw:.3f} of {target:g} bits a weight over the quantized tensors"
    uniform = []
    for c in candidates:
        found = [next((o for o, k in group if k == c), None) for group in options]
        if (
            all(o is not None and o.nbytes for o in found)
            and sum(o.nbytes for o in found if o) <= _NEARLY * nbytes
        ):
            uniform.append((sum(o.loss for o in found if o), plan.recipe.scheme_of(c.rule(["*"])).label))
    if uniform and min(uniform)[0] > 0:
        least, label = min(uniform)
        text += f", predicted loss {loss / least:.2f} of that of {label} for all"
    return text
