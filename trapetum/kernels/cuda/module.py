"""CUDA C++ sources of this folder -> kernels of the card at hand, compiled once by NVRTC and kept on disk.

A compiled file is named by a hash of everything that decides its content: the source with its headers, the options,
the compiler's version, the card's architecture and ``LAYOUT_VERSION``, the names of all weight layouts. Kernels that
were compiled for another layout are therefore never found again, and a captured graph, which holds kernels and pointers
of this process only, cannot outlive them.

CuPy is the way to the card (extras ``trapetum[cuda12]`` and ``trapetum[cuda13]``); it is imported when a kernel is
first asked for. A launch that the driver refuses raises; so does one that wants more shared memory than a block may
have, before it is tried.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trapetum.errors import KernelUnavailable
from trapetum.formats import planes, tiles
from trapetum.kernels.cuda import driver

__all__ = [
    "LAYOUT_VERSION",
    "SOURCES",
    "Card",
    "Kernel",
    "Kernels",
    "card",
    "compile_source",
    "counters",
    "import_cupy",
    "kernels",
    "source_text",
]

LAYOUT_VERSION = " ".join([planes.LAYOUT, *tiles.TILES])
FOLDER = Path(__file__).parent
SOURCES: dict[str, tuple[str, ...]] = {
    **{f"additive{count}": ("additive.cu", f"-DBOOKS={count}") for count in (1, 2, 3, 4)},
    "codebook4": ("codebook4.cu",),
    "codebook8": ("codebook8.cu",),
    "decoder_bf16": ("decoder.cu", "-DTRAPETUM_BF16"),
    "decoder_f16": ("decoder.cu",),
    **{f"prefill_f16_{dim}": ("prefill.cu", f"-DHEAD_DIM={dim}") for dim in range(16, 257, 16)},
    "rotate": ("rotate.cu",),
    "ternary": ("ternary.cu",),
    "ternary_gemm": ("ternary_gemm.cu",),
}
"""What can be asked of :func:`kernels`: a file, and the definitions that it is compiled with."""
MINIMUM = 80
EARLY = os.environ.get("TRAPETUM_CUDA_EARLY", "1") != "0"
"""Whether kernels may start before their predecessors end; off for measuring what that is worth."""

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_LOCK = threading.Lock()
counters = {"compiled": 0, "loaded": 0}
"""Compilations and module loads of this process: a benchmark asserts that new batch sizes cause none."""


def import_cupy() -> Any:
    """CuPy with a card that it can use.

    Raises
    ------
    KernelUnavailable
        If CuPy is not installed or finds no CUDA device.
    """
    try:
        import cupy
    except ImportError:
        raise KernelUnavailable(
            "CUDA kernels need CuPy, which is not installed",
            hint="Install trapetum[cuda13] or trapetum[cuda12], whichever your driver supports.",
        ) from None
    try:
        found = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as problem:
        raise KernelUnavailable(f"CuPy {cupy.__version__} finds no CUDA device: {problem}") from None
    if not found:
        raise KernelUnavailable(f"CuPy {cupy.__version__} finds no CUDA device")
    return cupy


@dataclass(frozen=True)
class Card:
    """What launches need to know of a device.

    Attributes
    ----------
    number : int
    name : str
    capability : int
        90 for compute capability 9.0.
    processors : int
        Multiprocessors.
    shared : int
        Most bytes of shared memory that one block may have.
    l2 : int
        Bytes of the second-level cache.
    """

    number: int
    name: str
    capability: int
    processors: int
    shared: int
    l2: int

    @property
    def architecture(self) -> str:
        """What the compiler is told; Hopper's matrix instructions need their own name."""
        return "sm_90a" if self.capability == 90 else f"sm_{self.capability}"


@cache
def _card(number: int) -> Card:
    cupy = import_cupy()
    facts = cupy.cuda.runtime.getDeviceProperties(number)
    found = Card(
        number,
        facts["name"].decode(),
        facts["major"] * 10 + facts["minor"],
        facts["multiProcessorCount"],
        facts["sharedMemPerBlockOptin"],
        facts["l2CacheSize"],
    )
    if found.capability < MINIMUM:
        raise KernelUnavailable(
            f"{found.name} has compute capability {found.capability / 10}; the kernels need {MINIMUM / 10} or newer"
        )
    return found


def card() -> Card:
    """The current device.

    Raises
    ------
    KernelUnavailable
        If there is none, or it is older than compute capability 8.0.
    """
    return _card(import_cupy().cuda.runtime.getDevice())


def source_text(file: str) -> str:
    """A source file with its headers put in place, each once."""
    seen: set[str] = set()

    def expand(file: str) -> str:
        text = (FOLDER / file).read_text("utf-8").replace("#pragma once\n", "")

        def include(match: re.Match[str]) -> str:
            if match[1] in seen:
                return ""
            seen.add(match[1])
            return expand(match[1])

        return _INCLUDE.sub(include, text)

    return expand(file)


def cache_folder() -> Path:
    """Where compiled kernels are kept: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trapetum" / "cuda"


def compile_source(name: str, architecture: str) -> bytes:
    """Machine code of one source for one architecture, from the disk where it is there.

    Parameters
    ----------
    name : str
        One of ``SOURCES``.
    architecture : str
        ``sm_90a``, for example.

    Raises
    ------
    KernelUnavailable
        If the compiler is missing or refuses the source.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc

        version = nvrtc.getVersion()
    except (ImportError, RuntimeError) as problem:  # CuPy looks for the library at the first call
        raise KernelUnavailable(
            f"CuPy cannot load NVRTC, which compiles the kernels: {str(problem).splitlines()[0]}",
            hint="Install trapetum[cuda13] or trapetum[cuda12], which bring it.",
        ) from None
    file, *definitions = SOURCES[name]
    text = source_text(file)
    options = (f"-arch={architecture}", "-std=c++17", "-default-device", *definitions)
    identity = "\0".join([LAYOUT_VERSION, *options, str(version), text])
    path = (
        cache_folder() / f"{name}-{architecture}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.cubin"
    )
    try:
        return path.read_bytes()
    except OSError:
        pass  # not there, or not readable: compile
    program = nvrtc.createProgram(text, file, (), ())
    try:
        nvrtc.compileProgram(program, options)
        code: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as problem:
        log = nvrtc.getProgramLog(program).splitlines()
        first = next((line for line in log if "error" in line), "no message")
        raise KernelUnavailable(
            f"NVRTC cannot compile {name} for {architecture}: {problem}; {first}"
        ) from None
    finally:
        nvrtc.destroyProgram(program)
    counters["compiled"] += 1
    _keep(path, code)
    return code


def _keep(path: Path, code: bytes) -> None:
    """Into the cache, whole or not at all; an unwritable cache only costs the next start its time."""
    from trapetum.errors import TrapetumError
    from trapetum.formats.atomic import write_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, code)
    except (OSError, TrapetumError):
        return


class Kernel:
    """One kernel; made by :class:`Kernels`.

    Attributes
    ----------
    name : str
    registers, local, static_shared : int
        Of a thread, of a thread, of a block, in words and bytes as the compiler says.
    """

    def __init__(self, name: str, raw: Any, device: Card) -> None:
        self.name = name
        self._raw = raw
        self._device = device
        attributes = raw.attributes
        self.registers = attributes["num_regs"]
        self.local = attributes["local_size_bytes"]
        self.static_shared = attributes["shared_size_bytes"]
        self.max_threads = attributes["max_threads_per_block"]

    def reserve(self, shared: int) -> None:
        """Allow launches with this much dynamic shared memory.

        Raises
        ------
        KernelUnavailable
            If a block of this card cannot have it.
        """
        if shared + self.static_shared > self._device.shared:
            raise KernelUnavailable(
                f"{self.name} needs {shared + self.static_shared} bytes of shared memory; a block of "
                f"{self._device.name} has at most {self._device.shared}"
            )
        if shared > self._raw.max_dynamic_shared_size_bytes:
            self._raw.max_dynamic_shared_size_bytes = shared

    def resident(self, threads: int, shared: int) -> int:
        """Blocks of this size that a multiprocessor holds at once."""
        from cupy_backends.cuda.api import driver as api

        self.reserve(shared)
        pointer = self._raw.kernel.ptr
        return int(api.occupancyMaxActiveBlocksPerMultiprocessor(pointer, threads, shared))

    def launch(
        self,
        grid: tuple[int, ...],
        threads: int,
        arguments: Sequence[Any],
        shared: int = 0,
        stream: Any = None,
        *,
        early: bool = False,
    ) -> None:
        """Put the kernel on a stream (the current one by default).

        ``early``: it may start before its predecessors end, because it calls ``wait_for_inputs()`` (``common.cuh``)
        before it touches anything that a kernel writes.

        Raises
        ------
        KernelUnavailable
            If the launch asks for what the kernel or the card has not, or the driver refuses it.
        """
        if threads > self.max_threads:
            raise KernelUnavailable(
                f"{self.name} runs at most {self.max_threads} threads a block, not {threads}"
            )
        self.reserve(shared)
        if stream is None:
            stream = import_cupy().cuda.get_current_stream()
        early = early and EARLY and self._device.capability >= 90
        driver.launch(self._raw.kernel.ptr, grid, threads, arguments, shared, stream.ptr, early)


class Kernels:
    """The kernels of one source on one card: ``kernels("codebook4")["codebook4_gemv_f16_2"]``."""

    def __init__(self, name: str, device: Card) -> None:
        import tempfile

        cupy = import_cupy()
        code = compile_source(name, device.architecture)
        # CuPy loads machine code from files only.
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            self._module = cupy.RawModule(path=file.name)
            self._module.compile()
        self._device = device
        self._found: dict[str, Kernel] = {}
        counters["loaded"] += 1

    def __getitem__(self, name: str) -> Kernel:
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = Kernel(name, self._module.get_function(name), self._device)
        return found


@cache
def _kernels(name: str, device: Card) -> Kernels:
    return Kernels(name, device)


def kernels(name: str) -> Kernels:
    """The kernels of a source for the current device, compiled at the first call.

    Raises
    ------
    KernelUnavailable
        If there is no card, no CuPy or no compiler.
    """
    with _LOCK:
        return _kernels(name, card())
