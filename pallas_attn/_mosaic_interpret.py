"""What JAX's interpreter of Mosaic GPU kernels leaves out: asynchronous wgmma, TMA stores that add.

While kernels are interpreted, `patched` puts `Races` in the place of JAX's race detector. It ends
the kernel at the first race, which it describes by places in the source, and it models wgmma: a
product reads shared memory through the async proxy until a wait says that it is done. Accesses that
belong to a product are told by the names of `_compat.interpreter_event`. `_store` runs TMA stores
under a predicate and those that add, of which JAX models neither.

It stands on JAX's private modules, so `_compat.interpret_context` imports it when it is needed.
"""

import collections
import contextlib
import pathlib
import re
import threading
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret.race_detection_state import _ranges_overlap
from jax._src.pallas.mosaic_gpu import core as mosaic_gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState

_REGISTERS = shared_memory.get_memory_space_idx(mosaic_gpu_core.MemorySpace.REGS)
_GLOBAL = shared_memory.get_memory_space_idx(mosaic_gpu_core.MemorySpace.GMEM)
_EVENT = re.compile(r"pallas_attn_(wgmma_(?:operand|last_operand|sum|wait))_?(\d*)")

_READ, _WRITE, _ADD = "read", "write", "addition"

# Races of the kernels that run now, in the order found; filled from the interpreter's threads.
_found: list[str] = []


class Races(GPURaceDetectionState):
    """JAX's happens-before detector with other reports, and with wgmma's reads in it.

    Every access carries a vector clock; two that overlap, one of them a write, race unless their
    clocks are ordered.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Of each warpgroup: its products under way, oldest first, and the reads of the next one.
        self.products = collections.defaultdict(collections.deque)
        self.operands = collections.defaultdict(list)

    def check_read(self, thread, clock, buffer_key, rnge, source_info=None):
        """Called by the interpreter at each read of memory."""
        event, count = _event_of(source_info)
        if event == "wgmma_wait":
            self._wait(thread, int(count))
            return
        if event in ("wgmma_operand", "wgmma_last_operand"):
            clock = self._start_read(thread, source_info, last=event == "wgmma_last_operand")
        elif event == "wgmma_sum":
            self.products[thread][-1].accumulator.append(buffer_key)
            return
        self._check(_Access(thread, clock, rnge.range, source_info, _READ), buffer_key)

    def check_write(self, thread, clock, buffer_key, rnge, source_info=None):
        """Called by the interpreter at each write of memory."""
        if _event_of(source_info)[0] == "wgmma_sum":
            return
        kind = _ADD if getattr(_store_now, "adds", False) else _WRITE
        self._check(_Access(thread, clock, rnge.range, source_info, kind), buffer_key)

    def _start_read(self, thread, source_info, *, last: bool):
        """A product reads an operand on its own time, which its warpgroup joins when it waits."""
        memory = gpu_callbacks._get_shared_memory()
        clock = memory.get_clock(thread)
        assert clock is not None, "clocks are kept wherever races are looked for"
        clock.inc(memory.get_next_tma_thread_id())
        self.operands[thread].append(clock)
        if last:
            self.products[thread].append(_Product(self.operands.pop(thread), [], source_info))
        return clock.async_smem_clock.copy()

    def _wait(self, thread, pending: int):
        """The warpgroup waits until at most `pending` of its products are under way."""
        memory = gpu_callbacks._get_shared_memory()
        with memory.lock:
            while len(self.products[thread]) > pending:
                for clock in self.products[thread].popleft().clocks:
                    memory.clocks[thread].update(clock)

    def _check(self, mine, key):
        # Registers are private to a warpgroup, and their buffers' numbers come again.
        if key.memory_space_id == _REGISTERS:
            for product in self.products[mine.thread]:
                if key in product.accumulator:
                    self._report("registers", mine, f"the product {_place(product.source_info)}")
            return
        with self.lock:
            earlier = self.writes[key]
            for other in earlier:
                if mine.races_with(other):
                    space = "global" if key.memory_space_id == _GLOBAL else "shared"
                    self._report(f"{space} memory", mine, other.describe())
            if mine.kind == _WRITE:
                # Whatever comes later and races with these races with this write too.
                earlier[:] = [
                    o for o in earlier if o.where != mine.where or not o.clock.ordered(mine.clock)
                ]
            earlier.append(mine)

    def _report(self, space, mine, other: str):
        self.races_found = True
        text = f"{space}: {mine.describe()}, not ordered with {other}"
        _found.append(text)
        # Going on with what was read too soon may mean to wait for ever.
        raise RuntimeError(text)


class _Product(NamedTuple):
    """A wgmma under way: the clocks of its reads, its accumulator's buffer, where it was called."""

    clocks: list
    accumulator: list
    source_info: Any


class _Access(NamedTuple):
    """One access to a buffer: by whom, when, to which ranges, from which equation."""

    thread: Any
    clock: Any
    where: tuple
    source_info: Any
    kind: str

    def races_with(self, other) -> bool:
        # Reads do not race, nor do additions, which are atomic.
        if self.kind == other.kind != _WRITE or self.clock.ordered(other.clock):
            return False
        return _ranges_overlap(self.where, other.where)

    def describe(self) -> str:
        ranges = ", ".join(
            f"{i.start}:{i.stop}" if isinstance(i, slice) else str(i) for i in self.where
        )
        wg = getattr(self.thread, "warpgroup_id", "?")
        return f"{self.kind} of [{ranges}] by warpgroup {wg} {_place(self.source_info)}"


def _place(source_info) -> str:
    """Where an equation comes from: the innermost lines of its call stack."""
    frames = source_info_util.user_frames(source_info.traceback) if source_info else ()
    paths = [(pathlib.Path(f.file_name), f.start_line) for f in frames]
    names = [f"{path.name}:{line}" for path, line in paths if path.parent.name != "jaxtyping"]
    return f"at {' < '.join(names[:4])}"


def _event_of(source_info):
    """(name, number) of the last event in an equation's name stack, or ("", "")."""
    names = _EVENT.findall(str(source_info.name_stack)) if source_info is not None else []
    return names[-1] if names else ("", "")


def _deallocate_unobserved(barrier):
    """`Barrier.deallocate` without a check that JAX 0.12 dropped.

    A producer need not wait for the last time that its slots are released.
    """
    with barrier.cv:
        barrier.ref_count -= 1
        if barrier.ref_count == 0 and barrier.arrivals_count != 0:
            raise ValueError(f"barrier freed with {barrier.arrivals_count} arrivals pending")


# Whether the TMA store that this thread runs adds to what is in global memory.
_store_now = threading.local()
_adding = threading.Lock()
_plain_store = gpu_callbacks.copy_smem_to_gmem
_StoreTask = gpu_callbacks.AsyncCopySmemToGmemTask


def _store(*, predicate, reduction_op, **arguments):
    """`gpu_callbacks.copy_smem_to_gmem` with a predicate and with reduction_op="add"."""
    if predicate is not None and not bool(predicate):
        # The card still counts the store, as an empty group, among those to be waited for.
        memory, thread = gpu_callbacks._get_shared_memory(), arguments["thread"]
        clock = memory.get_clock(thread)
        if clock is not None:
            memory.add_copy_smem_to_gmem_clocks(thread, clock, clock)
        return arguments["token"]
    _store_now.adds = reduction_op == "add"
    try:
        unknown = None if _store_now.adds else reduction_op
        return _plain_store(predicate=None, reduction_op=unknown, **arguments)
    finally:
        _store_now.adds = False


class _AnyStoreTask(_StoreTask):
    """A TMA store, or one that adds: element by element atomic, in no order."""

    def __call__(self, tma_thread_id: int):
        if not _store_now.adds:
            return super().__call__(tma_thread_id)
        memory = gpu_callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, memory)
        value, _, _ = memory.get_buffer_content(
            self.src_allocation_key, self.src_access, self.thread
        )
        self.post_read(tma_thread_id, memory)
        shape = memory.buffer_shape_and_dtype(self.dst_allocation_key).shape
        assert value is not None
        inside = gpu_callbacks._clip_store_to_shape(self.dst_access, value, tuple(shape))
        if inside is not None:
            access, value = inside
            with _adding:
                old, _, _ = memory.get_buffer_content(self.dst_allocation_key, access, self.thread)
                memory.store_buffer_content(
                    self.dst_allocation_key, access, old + value, self.thread
                )
        return self.post_write(tma_thread_id, memory)


@contextlib.contextmanager
def patched():
    """While inside, interpreted kernels report races to the list that this gives."""
    release = jax.__version_info__[:2]
    if release not in ((0, 11), (0, 12)):
        raise NotImplementedError(
            f"the interpreter of Mosaic GPU kernels is known for JAX 0.11 and 0.12, "
            f"got {jax.__version__}"
        )
    changes: list[tuple[Any, str, Any]] = [
        (gpu_callbacks, "GPURaceDetectionState", Races),
        (gpu_callbacks, "copy_smem_to_gmem", _store),
        (gpu_callbacks, "AsyncCopySmemToGmemTask", _AnyStoreTask),
    ]
    if release == (0, 11):
        changes.append((shared_memory.Barrier, "deallocate", _deallocate_unobserved))
    before = [getattr(owner, name) for owner, name, _ in changes]
    _found.clear()
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield _found
    finally:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)
        # After a failure JAX keeps its shared memory, and the next kernel would find it.
        gpu_callbacks.reset_gpu_interpret_mode_state()
