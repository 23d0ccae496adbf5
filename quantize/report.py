"""What a job did, or would do: figures for a person, for JSON and for the model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trapetum.quantize.plan import Plan, PlanRow

__all__ = ["Report", "RoleSummary"]


@dataclass(frozen=True)
class RoleSummary:
    """Tensors of one role under one scheme, added up.

    Parameters
    ----------
    role, scheme : str
    tensors, parameters, nbytes : int
    relative_error : float or None
        Mean over the tensors, weighted by their parameters; None for what is kept.
    blocks : str
        Numbers of their blocks, such as ``0-2,5``.
    """

    role: str
    scheme: str
    tensors: int
    parameters: int
    nbytes: int
    relative_error: float | None
    blocks: str = ""

    @property
    def bpw(self) -> float:
        """Stored bits a weight."""
        return 8.0 * self.nbytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class Report:
    """Result of ``quantize_model``.

    Parameters
    ----------
    out : Path
        The artifact folder.
    plan : Plan
        With one row a tensor.
    weight_files : dict of str to int
        Weight file -> exact bytes.
    dry_run : bool
        Whether nothing was written.
    errors : dict of str to float
        Quantized tensor -> ``sum (w - decoded)^2 / sum w^2``, in float64 over the stored values.
    seconds : float or None
        Wall time of this run; None for a dry run.
    predicted_seconds : float
        An estimate from measured rates.
    predicted_memory : int
        Bound on the resident bytes of the process.
    resumed : int
        Tensors that an earlier, unfinished run had done.
    share : str or None
        ``I/N`` where this run made only that share of the tensors, and nothing is assembled yet.
    notes : tuple of str
    """

    out: Path
    plan: Plan
    weight_files: Mapping[str, int]
    dry_run: bool = False
    errors: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    predicted_seconds: float = 0.0
    predicted_memory: int = 0
    resumed: int = 0
    share: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """One row a tensor."""
        return self.plan.rows

    @property
    def parameters(self) -> int:
        """Values in all tensors."""
        return self.plan.parameters

    @property
    def nbytes(self) -> int:
        """Exact bytes of the weight files, headers included."""
        return sum(self.weight_files.values())

    @property
    def bpw(self) -> float:
        """Stored bits a weight over all tensors, file headers not counted."""
        return self.plan.bpw

    @property
    def quantized_bpw(self) -> float:
        """The same over quantized tensors only."""
        return self.plan.quantized_bpw

    @property
    def mean_relative_error(self) -> float | None:
        """Mean of the tensors' errors, weighted by their parameters; None before there are any."""
        return _mean([r for r in self.rows if r.name in self.errors], self.errors)

    @property
    def max_relative_error(self) -> float | None:
        """Largest error of any tensor."""
        return max(self.errors.values(), default=None)

    def worst(self, count: int = 5) -> list[tuple[str, float]]:
        """Tensors with the largest errors, largest first."""
        return sorted(self.errors.items(), key=lambda item: (-item[1], item[0]))[:count]

    def roles(self) -> list[RoleSummary]:
        """Tensors added up by role and scheme, in order of first appearance."""
        groups: dict[tuple[str, str], list[PlanRow]] = {}
        for row in self.rows:
            groups.setdefault((row.role.kind, row.scheme.label), []).append(row)
        return [
            RoleSummary(
                role,
                scheme,
                len(rows),
                sum(r.parameters for r in rows),
                sum(r.nbytes for r in rows),
                _mean([r for r in rows if r.name in self.errors], self.errors),
                _ranges(sorted({r.role.layer for r in rows if r.role.layer is not None})),
            )
            for (role, scheme), rows in groups.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "out": str(self.out),
            "dry_run": self.dry_run,
            "architecture": self.plan.architecture.model_type,
            "recipe": self.plan.recipe.resolved(),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "files": dict(self.weight_files),
            "bpw": round(self.bpw, 6),
            "quantized_bpw": round(self.quantized_bpw, 6),
            "mean_relative_error": self.mean_relative_error,
            "max_relative_error": self.max_relative_error,
            "worst": [{"name": n, "relative_error": e} for n, e in self.worst()],
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "predicted_seconds": round(self.predicted_seconds, 1),
            "predicted_memory": self.predicted_memory,
            "resumed": self.resumed,
            "part": self.share,
            "tensors": [{**r.to_dict(), "relative_error": self.errors.get(r.name)} for r in self.rows],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """A short summary, a line each."""
        files = len(self.weight_files)
        of = "" if self.share is None else f"part {self.share} of "
        out = [
            f"{'would write' if self.dry_run else 'wrote'} {of}{self.out}: {self.nbytes:,} bytes of weights in "
            f"{files} file{'' if files == 1 else 's'}",
            f"{self.parameters:,} parameters at {self.bpw:.3f} bits each "
            f"({self.quantized_bpw:.3f} where quantized)",
        ]
        if self.errors:
            name, error = self.worst(1)[0]
            out.append(f"relative error: mean {self.mean_relative_error:.3e}, largest {error:.3e} ({name})")
        if self.seconds is None:
            out.append(
                f"estimate: {self.predicted_seconds:.0f} s, at most {self.predicted_memory / 2**20:.0f} MiB of memory"
            )
        else:
            again = f", {self.resumed} tensors taken over from an earlier run" if self.resumed else ""
            out.append(f"{self.seconds:.1f} s{again}")
        if self.share is not None:
            out.append(f"when all parts are done: trapetum merge {self.out}")
        return out


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2,5`` of 0, 1, 2, 5."""
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _mean(rows: list[PlanRow], errors: Mapping[str, float]) -> float | None:
    count = sum(r.parameters for r in rows)
    return sum(errors[r.name] * r.parameters for r in rows) / count if count else None
