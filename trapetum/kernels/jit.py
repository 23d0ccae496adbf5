"""One way to compile a loop: ``@jit`` is ``numba.njit`` with the settings that every kernel here shares.

Why a wrapper: (1) ``cache=True`` makes numba raise at decoration time when neither the package folder nor a
user cache folder is writable (read-only install, no HOME); such an installation must still work, only slower
at start. (2) Kernels run under ``ThreadPoolExecutor`` over row blocks, so every one releases the GIL. (3) No
``fastmath``: re-association would make results depend on the CPU's vector width, and artifacts must be
byte-identical. (4) numba has no type information; the wrapper keeps the signature visible to mypy.

``@inline`` is for the parts that kernels are made of. To numba each function that a kernel calls is a program of its
own: optimised, translated to machine code, given an entry from Python, kept on disk, and then optimised again in every
caller; that was half of what a first start took.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import register_jitable

__all__ = ["inline", "jit"]

F = TypeVar("F", bound=Callable[..., Any])


def jit(**options: Any) -> Callable[[F], F]:
    """Compile a function with numba: nogil, disk cache where one is writable, IEEE arithmetic.

    Parameters
    ----------
    **options
        Passed on to ``numba.njit``; they override the defaults ``nogil=True, cache=True``.

    Returns
    -------
    Callable
        The decorator.

    Examples
    --------
    >>> @jit()
    ... def twice(x):
    ...     return 2 * x
    >>> twice(21)
    42
    """
    settings = {"nogil": True, "cache": True, "no_cfunc_wrapper": True, **options}

    def decorate(function: F) -> F:
        try:
            return numba.njit(**settings)(function)  # type: ignore[no-any-return]
        except RuntimeError:  # "cannot cache function: no locator available for file ..."
            return numba.njit(**{**settings, "cache": False})(function)  # type: ignore[no-any-return]

    return decorate


class _Nowhere:
    """Of a part there is nothing in memory that numba could tell about its Python environment."""

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing."""


class _Part(JITCodeLibrary):
    """LLVM code that only becomes part of other libraries: not optimised and not translated by itself."""

    codegen = _Nowhere()

    def _optimize_final_module(self) -> None:
        """Left to the kernel that it becomes part of."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _PartCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        part = _Part(target.codegen(), "part")  # type: ignore[no-untyped-call]
        super().__init__(typing, target, part, *rest)  # type: ignore[no-untyped-call]


def inline(function: F) -> F:
    """A part of kernels: compiled into every kernel that calls it, never by itself.

    Parameters
    ----------
    function : callable
        Of the kernel's own module: numba's disk cache sees changes of that file only.

    Returns
    -------
    callable
        The function itself, to Python; ``jit()`` of it is a kernel that Python can call.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    part: F = register_jitable(pipeline_class=_PartCompiler, **options)(function)
    return part
