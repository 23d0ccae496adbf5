"""How long a plan will take here: an estimate, and said to be one.

Each scheme carries a rate measured on one reference core. The probe runs a chain of dependent additions, whose speed is
the core's clock and nothing else (no compiler, no SIMD, 0.2 s at most), and scales the rates. What it cannot see: other
programs, slow disks, and shared cores; expect half to twice the figure.
"""

from __future__ import annotations

import time

import numpy as np

from trapetum.quantize.plan import Plan

__all__ = ["predict_seconds", "probe"]

_PROBE_VALUES = 1 << 20
_PROBE_SECONDS = 0.2
# Seconds of the probe on the reference core (Sapphire Rapids, 2.6 GHz), where the schemes' rates were measured.
_REFERENCE_SECONDS = 3.2e-3
# Source bytes a second and core that hashing and the scan pass together: SHA-256 at 1.5 GB/s, scan at 4 GB/s.
_READ_RATE = 1.0e9
# Stored bytes a second that parts and shards are written and hashed with; one thread.
_WRITE_RATE = 0.6e9
# Start of the interpreter and of compiled kernels.
_FIXED_SECONDS = 1.5


def probe() -> float:
    """Speed of this machine's core relative to the reference core; best of the runs that fit into 0.2 s."""
    values = np.ones(_PROBE_VALUES)
    best, end = np.inf, time.perf_counter() + _PROBE_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        np.cumsum(values)
        best = min(best, time.perf_counter() - start)
    return _REFERENCE_SECONDS / best


def predict_seconds(plan: Plan, threads: int, speed: float) -> float:
    """Wall seconds that a job takes from the start.

    Parameters
    ----------
    plan : Plan
    threads : int
        Worker threads.
    speed : float
        Result of :func:`probe`.
    """
    core_seconds: float = sum(r.parameters / r.scheme.rate for r in plan.rows)
    core_seconds += sum(r.source_nbytes for r in plan.rows) / _READ_RATE
    return _FIXED_SECONDS + (core_seconds / threads + plan.nbytes / _WRITE_RATE) / speed
