"""What a compiled program of kernels needs beside arithmetic: arrays at addresses, calls by address, waiting.

Like ``simd``, these are operations inside compiled code only, and ``simd.fingerprint`` covers this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

__all__ = [
    "array",
    "call",
    "cond_broadcast",
    "cond_init",
    "cond_wait",
    "fetch_add",
    "load_atomic",
    "mutex_init",
    "mutex_lock",
    "mutex_unlock",
    "pause",
    "row_product",
    "scratch",
    "yield_cpu",
]

_I64 = ir.IntType(64)


def _operation(define: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.extending.intrinsic``, with a type that says nothing of the definition's arguments."""
    made: Callable[..., Any] = intrinsic(define)
    return made


@_operation
def array(context: Any, address: Any, kind: Any, shape: Any) -> Any:
    """The C-contiguous array of a NumPy scalar type at an address; ``shape`` is a tuple."""
    count = len(shape)
    made = types.Array(kind.dtype, count, "C")
    signature = made(types.intp, kind, types.UniTuple(types.intp, count))  # type: ignore[no-untyped-call]

    def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
        sizes: Any = cgutils.unpack_tuple(builder, values[2], count)  # type: ignore[no-untyped-call]
        return _array(target, builder, made, values[0], sizes)

    return signature, lower


@_operation
def scratch(context: Any, count: Any) -> Any:
    """float32 [1, count] on the stack until the function returns; not to be called in a loop."""
    made = types.Array(types.float32, 2, "C")

    def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
        room = builder.alloca(ir.FloatType(), size=values[0])
        room.align = 32
        return _array(target, builder, made, builder.ptrtoint(room, _I64), [_I64(1), values[0]])

    return made(types.intp), lower


def _array(target: Any, builder: Any, kind: Any, address: Any, sizes: Any) -> Any:
    made: Any = target.make_array(kind)(target, builder)
    each = target.get_abi_sizeof(target.get_data_type(kind.dtype))
    strides = [_I64(each)]
    for size in sizes[:0:-1]:
        strides.insert(0, builder.mul(strides[0], size))
    data = builder.inttoptr(address, made.data.type)
    populate_array(made, data, sizes, strides, each, None)  # type: ignore[no-untyped-call]
    return made._getvalue()


@_operation
def call(context: Any, function: Any, arguments: Any, begin: Any, end: Any) -> Any:
    """Call ``void f(int64 *arguments, int64 begin, int64 end)`` by its address."""
    signature = types.void(types.intp, types.intp, types.intp, types.intp)

    def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64.as_pointer(), _I64, _I64])
        function = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(values[1], _I64.as_pointer()), values[2], values[3]])
        return target.get_dummy_value()

    return signature, lower


@_operation
def row_product(context: Any, function: Any, count: Any, out: Any, weights: Any, x: Any) -> Any:
    """Call a row product of ggml by its address: ``vec_dot(count, out, 0, weights, 0, x, 0, 1)``."""
    signature = types.void(types.intp, types.intp, types.intp, types.intp, types.intp)
    i32, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [i32, byte, _I64, byte, _I64, byte, _I64, i32])

    def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
        zero = _I64(0)
        out, weights, x = (builder.inttoptr(value, byte) for value in values[2:])
        given = [builder.trunc(values[1], i32), out, zero, weights, zero, x, zero, i32(1)]
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)
        return target.get_dummy_value()

    return signature, lower


def _cell(target: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = target.make_array(kind)(target, builder, array).data
    return builder.gep(data, [index])


@_operation
def fetch_add(context: Any, array: Any, index: Any, amount: Any) -> Any:
    """Add to ``array[index]`` (int64) atomically; the value before."""
    signature = types.int64(array, types.intp, types.int64)

    def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
        cell = _cell(target, builder, sig.args[0], values[0], values[1])
        return builder.atomic_rmw("add", cell, values[2], "seq_cst")

    return signature, lower


@_operation
def load_atomic(context: Any, array: Any, index: Any) -> Any:
    """``array[index]`` (int64) as other threads left it."""
    signature = types.int64(array, types.intp)

    def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
        cell = _cell(target, builder, sig.args[0], values[0], values[1])
        return builder.load_atomic(cell, "seq_cst", 8)

    return signature, lower


@_operation
def pause(context: Any) -> Any:
    """Tell the core that this is a waiting loop."""
    signature = types.void()

    def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
        if target.codegen().magic_tuple()[0].startswith(("x86", "i686")):
            name = "llvm.x86.sse2.pause"
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])
        return target.get_dummy_value()

    return signature, lower


def _system(target: Any, builder: Any, name: str, values: Any) -> Any:
    """Call a function of the C library whose arguments are pointers, given as addresses."""
    kind = ir.FunctionType(ir.IntType(32), [_I64.as_pointer()] * len(values))
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, [builder.inttoptr(value, _I64.as_pointer()) for value in values])
    return target.get_dummy_value()


@_operation
def yield_cpu(context: Any) -> Any:
    """POSIX ``sched_yield``: let another thread have this core."""
    return types.void(), lambda target, builder, sig, values: _system(target, builder, "sched_yield", values)


def _on_addresses(name: str, count: int) -> Any:
    """A POSIX function of ``count`` addresses, its result ignored."""
    signature = types.void(*[types.intp] * count)

    def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
        return _system(target, builder, name, values)

    if count == 1:
        return _operation(lambda context, a: (signature, lower))
    return _operation(lambda context, a, b: (signature, lower))


# Addresses of memory that does not move, 128 bytes each: more than any system's pthread_mutex_t or pthread_cond_t.
mutex_init = _on_addresses("pthread_mutex_init", 2)
mutex_lock = _on_addresses("pthread_mutex_lock", 1)
mutex_unlock = _on_addresses("pthread_mutex_unlock", 1)
cond_init = _on_addresses("pthread_cond_init", 2)
cond_wait = _on_addresses("pthread_cond_wait", 2)
cond_broadcast = _on_addresses("pthread_cond_broadcast", 1)
