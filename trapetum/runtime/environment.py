"""What this machine and installation are: the facts that a bug report or a benchmark must state.

Read from the system's files and from package metadata; a package is imported only where nothing else
can tell (the BLAS that NumPy and SciPy load).
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import trapetum

__all__ = ["available_memory", "describe_environment"]

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "numba",
    "llvmlite",
    "scipy",
    "scikit-learn",
    "threadpoolctl",
    "tokenizers",
    "huggingface-hub",
    "typer",
    "pydantic",
    "tqdm",
    "rich",
)
# The vector and matrix extensions that decide which kernel is fast here, x86 first.
_FEATURES = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    *(
        "avx512_vnni",
        "avx512vbmi",
        "avx512_vbmi2",
        "avx512_bf16",
        "avx512_fp16",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
    ),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def describe_environment() -> dict[str, Any]:
    """Versions, processor, memory, BLAS, optional packages and cache folders.

    Returns
    -------
    dict
        JSON values, with the keys ``trapetum``, ``location``, ``python``, ``executable``, ``platform``,
        ``packages`` (name -> version or None), ``blas`` (list), ``cpu`` (model, machine, features, cores,
        usable, quota), ``memory`` (bytes: total, available, limit), ``extras`` (name -> bool), ``caches``
        (name -> path or None).
    """
    return {
        "trapetum": trapetum.__version__,
        "location": str(Path(trapetum.__file__).parent),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "blas": _blas(),
        "cpu": _cpu(),
        "memory": _memory(),
        "extras": {
            "cupy": _importable("cupy"),
            "dask": _importable("dask"),
            "matplotlib": _importable("matplotlib"),
        },
        "caches": _caches(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> bool:
    return util.find_spec(module) is not None


def _blas() -> list[dict[str, Any]]:
    """The BLAS libraries that NumPy and SciPy load, as threadpoolctl sees them."""
    import numpy as np
    import scipy.linalg
    from threadpoolctl import threadpool_info

    del np, scipy
    return [
        {"library": info["internal_api"], "version": info.get("version"), "threads": info["num_threads"]}
        for info in threadpool_info()
        if info.get("user_api") == "blas"
    ]


def _cpu() -> dict[str, Any]:
    model, flags = platform.processor() or platform.machine(), set[str]()
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return {
        "model": model,
        "machine": platform.machine(),
        "features": [name for name in _FEATURES if name in flags],
        "cores": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "quota": _cpu_quota(),
    }


def _cpu_quota() -> float | None:
    """Cores that a control group (a container) allows, where one limits them."""
    for line in _lines("/sys/fs/cgroup/cpu.max"):
        quota, _, period = line.partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            return int(quota) / int(period)
    return None


def _memory() -> dict[str, int | None]:
    found: dict[str, int] = {}
    for line in _lines("/proc/meminfo"):
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            found[key] = int(words[0]) * 1024
    limit = next((line.strip() for line in _lines("/sys/fs/cgroup/memory.max")), "")
    return {
        "total": found.get("MemTotal"),
        "available": found.get("MemAvailable"),
        "limit": int(limit) if limit.isdigit() else None,
    }


def available_memory(threads: int = 0) -> int:
    """Bytes that this process may still take; 0 where the system does not say.

    Parameters
    ----------
    threads : int
        Threads that are still to start. Each reserves 72 MiB of addresses (stack and allocator arena, measured), which
        count where ``ulimit -v`` is set.
    """
    memory = _memory()
    known = [size for size in (memory["available"], memory["limit"]) if size is not None]
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        pages = next(iter(_lines("/proc/self/statm")), "0").split()[0]
        known.append(max(addresses - int(pages) * resource.getpagesize() - threads * (72 << 20), 1))
    return min(known, default=0)


def _caches() -> dict[str, str | None]:
    """Where compiled kernels and downloads are kept; None where no folder is writable."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home / "huggingface") / "hub"
    return {"kernels": _kernel_cache(), "hub": str(hub)}


def _kernel_cache() -> str | None:
    """The folder in which numba keeps the compiled kernels of this installation."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return chosen
    beside = Path(trapetum.__file__).parent / "kernels"
    if os.access(beside, os.W_OK):
        return str(beside / "__pycache__")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    parent = next((p for p in (home, *home.parents) if p.exists()), None)
    return str(home) if parent is not None and os.access(parent, os.W_OK) else None


def _lines(path: str) -> list[str]:
    """Lines of a small system file; none where it cannot be read (another system, a sandbox)."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
