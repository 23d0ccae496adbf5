"""What a verification says: one question and its answer, and the report that collects them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trapetum.errors import VerifyError
from trapetum.tensors import matrix_shape

__all__ = ["Check", "VerifyReport", "blocks"]

_BLOCK_WEIGHTS = 2 << 20


@dataclass(frozen=True)
class Check:
    """One question and its answer.

    Parameters
    ----------
    name : str
        ``integrity``, ``decoder``, ``reconstruction`` or ``logits``, see ``runtime.verify``.
    ok : bool or None
        None: not asked, ``detail`` says why.
    figure : float or None
        The number behind the answer, named in ``detail``.
    detail : str
    """

    name: str
    ok: bool | None
    figure: float | None
    detail: str


@dataclass
class VerifyReport:
    """What was checked.

    Attributes
    ----------
    path : Path
    kind : str
        ``artifact``, ``cbk``, ``checkpoint``; empty if it could not be opened.
    checks : list of Check
    """

    path: Path
    kind: str
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong and something was checked."""
        return any(c.ok for c in self.checks) and not any(c.ok is False for c in self.checks)

    def raise_if_wrong(self) -> None:
        """Raise ``VerifyError`` with the first finding."""
        for check in self.checks:
            if check.ok is False:
                raise VerifyError(f"{self.path}: {check.name}: {check.detail}")

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        checks = [asdict(check) for check in self.checks]
        return {"path": str(self.path), "kind": self.kind, "ok": self.ok, "checks": checks}


def blocks(shape: tuple[int, ...]) -> list[slice]:
    """Row blocks of a tensor, 8 MiB as float32."""
    rows, width = matrix_shape(shape)
    step = max(1, _BLOCK_WEIGHTS // max(width, 1))
    return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]
