"""What one thread of a warpgroup computes, written with Python's operators.

Code is written once against a `machine` that has these few operations on int32 values:

    machine.thread()                    this thread's number in its warpgroup, 0 .. 127
    machine.pointer(ref, *index)        where an element of an array lies
    machine.load(pointer, at, count)    `count` neighbouring elements, `at` elements further on
    machine.store(pointer, words, flag) writes 32-bit words to device memory where flag is not 0
    machine.row_size(ref)               elements from one entry of the last axis but one to the next
    machine.ones_from(n)                the bits from n up, none from 32 on
    machine.clamp(x, low, high)         x within two Python ints
    machine.equal(a, b)                 a condition
    machine.bit(word, n)                a condition: bit n is set
    machine.word(conditions)            up to 32 of them as bits
    machine.when(flag, values, f)       f(values) where a uniform condition holds
    machine.choose(registers, seen)     -inf where seen(column group, row half, column) is false
    + - & | ^ >> << * < <= > >=         on values, and between values and Python ints

`Emitter` writes instructions. Tests run the same code on NumPy arrays of 128 threads.
"""

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

# The row and column of a [64, n] tile that a thread's registers start at, in wgmma's accumulator
# layout: it also holds the row 8 below, the next column, and both again every 8 columns.


def first_row(thread):
    """The upper of the thread's two rows; the other is 8 below."""
    return ((thread >> 1) & 48) | ((thread >> 2) & 7)


def first_column(thread):
    """The first of the thread's columns; the others are 1, 8, 9, 16, 17, ... further on."""
    return (thread << 1) & 6


def _int32():
    return ir.IntegerType.get_signless(32)


class Value:
    """An int32 or a condition, one a thread, while instructions are being written."""

    def __init__(self, ir_value):
        self.ir_value = ir_value

    def _with(self, op, other):
        return Value(op(self.ir_value, value(other).ir_value))

    def _compared(self, predicate, other):
        return Value(arith.cmpi(predicate, self.ir_value, value(other).ir_value))

    def __add__(self, other):
        return self._with(arith.addi, other)

    def __sub__(self, other):
        return self._with(arith.subi, other)

    def __mul__(self, other):
        return self._with(arith.muli, other)

    def __and__(self, other):
        return self._with(arith.andi, other)

    def __or__(self, other):
        return self._with(arith.ori, other)

    def __xor__(self, other):
        return self._with(arith.xori, other)

    def __rshift__(self, other):
        return self._with(arith.shrsi, other)

    def __lshift__(self, other):
        return self._with(arith.shli, other)

    def __lt__(self, other):
        return self._compared(arith.CmpIPredicate.slt, other)

    def __le__(self, other):
        return self._compared(arith.CmpIPredicate.sle, other)

    def __gt__(self, other):
        return self._compared(arith.CmpIPredicate.sgt, other)

    def __ge__(self, other):
        return self._compared(arith.CmpIPredicate.sge, other)


def value(x) -> Value:
    """A Python int as a constant, a `Value` as it is."""
    if isinstance(x, Value):
        return x
    return Value(arith.constant(_int32(), ir.IntegerAttr.get(_int32(), x)))


def _bit(n: int) -> int:
    """Bit n alone, as an int32."""
    return 1 << n if n < 31 else -(1 << 31)


class Emitter:
    """Writes instructions at the current insertion point."""

    def thread(self) -> Value:
        """The thread's number in its warpgroup."""
        return self._thread_of_block() & 127

    def _thread_of_block(self) -> Value:
        # Read anew wherever it is asked for: otherwise it, and all that follows from it, is kept in
        # registers across the loop.
        text = "mov.u32 $0, %tid.x;"
        tid = llvm.inline_asm(_int32(), [], text, "=r", has_side_effects=True)
        return Value(tid)

    def sync(self, threads: int = 128) -> None:
        """Waits for the warpgroup's other threads, at the hardware barrier that Mosaic uses.

        Args:
            threads: 128, or 32 to wait for the warp's only.
        """
        if threads == 32:
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, [], "bar.warp.sync -1;", "~{memory}", has_side_effects=True)
            return
        barrier = (self._thread_of_block() >> 7) + 1
        text = "bar.sync $0, 128;"
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [barrier.ir_value], text, "r", has_side_effects=True)

    def fence(self) -> None:
        """Shows what this thread wrote to shared memory to wgmma and TMA."""
        text = "fence.proxy.async.shared::cta;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)

    def fresh(self, scalar) -> Value:
        """A scalar of the surrounding code, hidden from the compiler's loop optimisations."""
        text = "mov.b32 $0, $1;"
        return Value(llvm.inline_asm(_int32(), [scalar], text, "=r,r", has_side_effects=True))

    def pointer(self, ref, *index):
        """Address of an element; 64-bit, since arrays of bits may be longer than int32 counts.

        Args:
            ref: a reference to device memory.
            index: one int or `Value` for each axis.
        """
        long = ir.IntegerType.get_signless(64)
        kind = ir.MemRefType(ref.type)
        strides, _ = kind.get_strides_and_offset()
        address = mgpu_utils.memref_ptr(ref)
        for i, stride in zip(index, strides, strict=True):
            if isinstance(i, int) and i == 0:
                continue
            step = arith.constant(long, ir.IntegerAttr.get(long, stride))
            offset = arith.muli(arith.extsi(long, value(i).ir_value), step)
            address = mgpu_utils.getelementptr(address, [offset], kind.element_type)
        return address

    def load(self, pointer, at: int = 0, count: int = 1) -> list[Value]:
        """Reads data that no kernel writes meanwhile.

        Args:
            pointer: from `pointer`; with `at` aligned to `count` elements.
            at: elements further on.
            count: 1, 2 or 4 elements.
        """
        address = mgpu_utils.getelementptr(pointer, [at], _int32()) if at else pointer
        outs = ", ".join(f"${n}" for n in range(count))
        vector, outs = ("", outs) if count == 1 else (f".v{count}", f"{{{outs}}}")
        text = f"ld.global.nc{vector}.b32 {outs}, [${count}];"
        kind = _int32()
        if count > 1:
            kind = llvm.StructType.get_literal([kind] * count)
        got = llvm.inline_asm(
            kind, [address], text, ",".join(["=r"] * count + ["l"]), has_side_effects=True
        )
        if count == 1:
            return [Value(got)]
        assert isinstance(got, ir.Value)
        return [Value(llvm.extractvalue(_int32(), got, [n])) for n in range(count)]

    def load_shared(self, ref, index: Value) -> Value:
        """Reads an int32 of shared memory."""
        address = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [index.ir_value], _int32())
        pointer = llvm.ptrtoint(_int32(), address)
        text = "ld.shared.b32 $0, [$1];"
        return Value(llvm.inline_asm(_int32(), [pointer], text, "=r,r", has_side_effects=True))

    def store(self, pointer, words: dict, flag: Value) -> None:
        """Where `flag` is not 0, writes words to device memory; in one piece, as `store_zeros`.

        Args:
            pointer: from `pointer`.
            words: 32-bit register by its distance in bytes, a Python int.
            flag: one a thread.
        """
        void = ir.Type.parse("!llvm.void")
        lines = [f"@p st.global.b32 [$1 + {at}], ${n};" for n, at in enumerate(words, start=2)]
        text = " ".join(["{ .reg .pred p; setp.ne.b32 p, $0, 0;", *lines, "}"])
        args = [flag.ir_value, pointer, *words.values()]
        kinds = ",".join(["r", "l", *"r" * len(words)])
        llvm.inline_asm(void, args, text, kinds, has_side_effects=True)

    def ones_from(self, n: Value) -> Value:
        """The bits from n up; none from 32 on."""
        # PTX shifts by 32 and more to 0, which LLVM leaves undefined.
        args = [value(-1).ir_value, n.ir_value]
        return Value(llvm.inline_asm(_int32(), args, "shl.b32 $0, $1, $2;", "=r,r,r"))

    def clamp(self, x: Value, low: int, high: int) -> Value:
        """A value moved into bounds."""
        at_least = arith.maxsi(x.ir_value, value(low).ir_value)
        return Value(arith.minsi(at_least, value(high).ir_value))

    def equal(self, a, b) -> Value:
        """A condition."""
        return value(a)._compared(arith.CmpIPredicate.eq, b)

    def differs(self, a, b) -> Value:
        """A condition; also of values of the surrounding code."""
        a = Value(a) if isinstance(a, ir.Value) else value(a)
        return a._compared(arith.CmpIPredicate.ne, b)

    def store_zeros(self, ref, offsets: list[Value], count: int, flag: Value) -> None:
        """Where `flag` is not 0, zeroes `count` bytes of shared memory at each of the offsets.

        Predicated and in one piece: a branch that threads take singly costs registers around it.

        Args:
            ref: a reference; offsets are bytes from its start.
            offsets: multiples of 16.
            count: a multiple of 16.
            flag: one a thread.
        """
        byte, void = ir.IntegerType.get_signless(8), ir.Type.parse("!llvm.void")
        lines = ["{ .reg .pred p; setp.ne.b32 p, $0, 0;"]
        args = [flag.ir_value, value(0).ir_value]
        base = mgpu_utils.memref_ptr(ref)
        for offset in offsets:
            address = mgpu_utils.getelementptr(base, [offset.ir_value], byte)
            args.append(llvm.ptrtoint(_int32(), address))
            lines += [
                f"@p st.shared.v4.b32 [${len(args) - 1} + {at}], {{$1, $1, $1, $1}};"
                for at in range(0, count, 16)
            ]
        text = " ".join([*lines, "}"])
        llvm.inline_asm(void, args, text, ",".join("r" * len(args)), has_side_effects=True)

    def bit(self, word: Value, n: int) -> Value:
        """Whether bit n is set."""
        return (word & _bit(n))._compared(arith.CmpIPredicate.ne, 0)

    def row_size(self, ref) -> int:
        """Elements from one entry of the last axis but one to the next."""
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        return strides[-2]

    def when(self, flag: Value, values: list, change) -> list:
        """`change(values)` where a uniform condition holds; registers of any kind, or `Value`s."""
        raw = [x.ir_value if isinstance(x, Value) else x for x in values]
        branch = scf.IfOp(flag.ir_value, [x.type for x in raw], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            changed = change(values)
            scf.yield_([x.ir_value if isinstance(x, Value) else x for x in changed])
        otherwise = branch.else_block
        assert otherwise is not None
        with ir.InsertionPoint(otherwise):
            scf.yield_(raw)
        pairs = zip(values, branch.results, strict=True)
        return [Value(new) if isinstance(old, Value) else new for old, new in pairs]

    def word(self, conditions: list[Value]) -> Value:
        """Up to 32 conditions as bits, the first one lowest."""
        out = value(0)
        for n, condition in enumerate(conditions):
            out = out | Value(
                arith.select(condition.ir_value, value(_bit(n)).ir_value, value(0).ir_value)
            )
        return out

    def choose(self, registers: list, seen) -> list:
        """-inf where `seen(column group, row half, column)` is false."""
        f32 = ir.F32Type.get()
        hidden = arith.constant(f32, ir.FloatAttr.get(f32, -float("inf")))
        out = list(registers)
        # Row by row: consecutive bits of one word become several conditions in one instruction.
        for half in (0, 1):
            for n in range(half, len(registers), 2):
                for e in (0, 1):
                    place = ir.DenseI64ArrayAttr.get([e])
                    x = vector.extract(out[n], dynamic_position=[], static_position=place)
                    x = arith.select(seen(n // 2, half, e).ir_value, x, hidden)
                    out[n] = vector.insert(x, out[n], dynamic_position=[], static_position=place)
        return out


__all__ = ["Emitter", "Value", "first_column", "first_row"]
