"""How an operation on vectors becomes LLVM IR: the vector types, and what a code generator of ``simd`` works with.

A vector is a numba type over an LLVM vector; it lives in ordinary variables of a compiled function, LLVM keeps it in a
register. ``simd.fingerprint`` covers this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

__all__ = ["BYTES", "F32", "FLOATS", "I8", "I16", "I32", "INTS", "WORDS", "Emit", "Vector", "operation"]

I8, I16, I32, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


class Vector(types.Type):
    """numba type of a vector; ``element`` and ``lanes`` are LLVM's."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(name=f"trapetum.{name}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.llvm)  # type: ignore[no-untyped-call]


BYTES = Vector("bytes", I8, 32)
WORDS = Vector("words", I16, 16)
INTS = Vector("ints", I32, 8)
FLOATS = Vector("floats", F32, 8)


class Emit:
    """What a code generator needs: numba's context, LLVM's builder, and a few shorthands.

    Attributes
    ----------
    has : frozenset of str
        Features of the target, as LLVM names them.
    is_x86 : bool
    """

    def __init__(self, context: Any, builder: Any, signature: Any) -> None:
        self.context, self.builder, self.signature = context, builder, signature
        features = context.codegen().magic_tuple()[2].split(",")
        self.has = frozenset(f[1:] for f in features if f.startswith("+"))
        self.is_x86 = context.codegen().magic_tuple()[0].startswith(("x86", "i686"))

    def address(self, array: Any, index: Any, position: int = 0) -> Any:
        """Pointer to element ``index`` of the array that is argument ``position``, counted in C order."""
        kind = self.signature.args[position]
        data = self.context.make_array(kind)(self.context, self.builder, array).data
        return self.builder.gep(data, [index])

    def load(self, pointer: Any, kind: ir.Type) -> Any:
        """A value of that type at any address."""
        loaded = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()))
        loaded.align = 1
        return loaded

    def call(self, name: str, result: ir.Type, *values: Any) -> Any:
        """Call a function by name; an LLVM intrinsic, mostly."""
        kind = ir.FunctionType(result, [v.type for v in values])
        function = self.builder.module.globals.get(name) or ir.Function(self.builder.module, kind, name)
        return self.builder.call(function, values)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """The lanes of two vectors by number."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c``; rounded once where the machine can, twice on an x86 without FMA (a call a lane otherwise)."""
        if self.is_x86 and "fma" not in self.has:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def splat(self, value: Any, lanes: int) -> Any:
        """A number in every lane."""
        kind = ir.VectorType(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.shuffle(one, one, [0] * lanes)

    def halves(self, bits: Any) -> Any:
        """float32 of float16 bits, exact: the instruction, or integer steps and one exact multiplication."""
        b, n = self.builder, bits.type.count
        wide, floats = ir.VectorType(I32, n), ir.VectorType(F32, n)
        if not self.is_x86 or "f16c" in self.has:
            return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), n)), floats)

        def const(value: int) -> Any:
            return ir.Constant(wide, [value] * n)

        x = b.zext(bits, wide)
        magnitude = b.shl(b.and_(x, const(0x7FFF)), const(13))
        # the exponent is 112 too small for normal and subnormal numbers alike; 2**112 is exact
        value = b.bitcast(b.fmul(b.bitcast(magnitude, floats), ir.Constant(floats, [2.0**112] * n)), wide)
        special = b.icmp_unsigned(">=", magnitude, const(0x0F800000))
        value = b.select(special, b.or_(magnitude, const(0x7F800000)), value)
        return b.bitcast(b.or_(value, b.shl(b.and_(x, const(0x8000)), const(16))), floats)

    def rounded(self, value: Any) -> Any:
        """float16 bits nearest to float32, ties to even: the instruction, or integer steps."""
        b, n = self.builder, value.type.count
        wide, narrow = ir.VectorType(I32, n), ir.VectorType(I16, n)
        if not self.is_x86 or "f16c" in self.has:
            return b.bitcast(b.fptrunc(value, ir.VectorType(ir.HalfType(), n)), narrow)

        def const(number: int) -> Any:
            return ir.Constant(wide, [number] * n)

        bits = b.bitcast(value, wide)
        size = b.and_(bits, const(0x7FFFFFFF))
        # below the normal numbers: adding 0.5 leaves the bits of the subnormal one at the end of the mantissa
        half = ir.Constant(value.type, [0.5] * n)
        tiny = b.sub(b.bitcast(b.fadd(b.bitcast(size, value.type), half), wide), const(0x3F000000))
        odd = b.and_(b.lshr(size, const(13)), const(1))
        normal = b.lshr(b.add(b.add(size, const(0xC8000FFF)), odd), const(13))  # exponent - 112, rounded
        found = b.select(b.icmp_unsigned("<", size, const(0x38800000)), tiny, normal)
        over = b.select(b.icmp_unsigned(">", size, const(0x7F800000)), const(0x7E00), const(0x7C00))
        found = b.select(b.icmp_unsigned("<", size, const(0x47800000)), found, over)
        return b.trunc(b.or_(found, b.lshr(b.and_(bits, const(-0x80000000)), const(16))), narrow)


Generator = Callable[..., Any]


def operation(result: Any, *arguments: Any) -> Callable[[Generator], Callable[..., Any]]:
    """An operation on vectors and numbers; ``None`` among the arguments takes whatever type comes (an array)."""

    def decorate(generate: Generator) -> Callable[..., Any]:
        def typing(context: Any, *given: Any) -> Any:
            if len(given) != len(arguments):
                return None
            for wanted, found in zip(arguments, given):
                array = wanted is None and isinstance(found, types.Array) and found.layout == "C"
                vector = isinstance(wanted, Vector) and found == wanted
                number = isinstance(wanted, types.Number) and isinstance(found, types.Number)
                if not (array or vector or number):
                    return None
            signature = result(*(f if w is None else w for w, f in zip(arguments, given)))

            def lower(target: Any, builder: Any, sig: Any, values: Any) -> Any:
                return generate(Emit(target, builder, sig), *values)

            return signature, lower

        typing.__name__ = typing.__qualname__ = generate.__name__
        typing.__doc__ = generate.__doc__
        names = ["context", *(f"value{i}" for i in range(len(arguments)))]  # numba counts them
        form = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
        typing.__signature__ = inspect.Signature(form)  # type: ignore[attr-defined]
        operation: Callable[..., Any] = intrinsic(typing)
        return operation

    return decorate
