"""One way to compile a loop: ``@jit`` is ``numba.njit`` with the settings that every kernel here shares.

Why a wrapper: (1) ``cache=True`` makes numba raise at decoration time when neither the package folder nor a
user cache folder is writable (read-only install, no HOME); such an installation must still work, only slower
at start. (2) Kernels run under ``ThreadPoolExecutor`` over row blocks, so every one releases the GIL. (3) No
``fastmath``: re-association would make results depend on the CPU's vector width, and artifacts must be
byte-identical. (4) numba has no type information; the wrapper keeps the signature visible to mypy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["jit"]

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
    settings = {"nogil": True, "cache": True, **options}

    def decorate(function: F) -> F:
        try:
            return numba.njit(**settings)(function)  # type: ignore[no-any-return]
        except RuntimeError:  # "cannot cache function: no locator available for file ..."
            return numba.njit(**{**settings, "cache": False})(function)  # type: ignore[no-any-return]

    return decorate
