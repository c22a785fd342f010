"""Implementations that can be timed: ours by backend, and the peers, each imported when asked for.

An implementation is a forward function of (case, q, k, v, operands); how its backward is timed
alone is the same for all (see timing.py). What depends on the mask but not on q, k and v (a block
table, a bool mask, offsets) is made by `prepare`, outside the timed call. A peer that is not
there, or can't take a case, says so in one line.
"""

import contextlib
import functools
import importlib
import logging
import math
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import fa3, serving, suites


def _never(case):
    """Has no objection to any case."""


def _nothing(case, raw):
    """Needs no operand beside q, k and v."""


@dataclass(frozen=True)
class Impl:
    """One way to compute attention.

    Attributes:
        name: As asked for on the command line.
        forward: (case, q, k, v, operands) -> out, traceable; None if it serves alone.
        absent: Returns why it can't run on this machine at all, or None.
        unsupported: Returns why it can't take this case, or None.
        prepare: (case, raw) -> operands, traceable; raw as from `raw_operands`.
        ours: Whether it is pallas_attn.
        way: How it attends to a cache; None if it doesn't.
    """

    name: str
    forward: Callable | None
    absent: Callable[[], str | None]
    unsupported: Callable[[Any], str | None] = _never
    prepare: Callable = _nothing
    ours: bool = False
    way: serving.Way | None = None

    def takes(self, case):
        """Returns whether a case is of the kind that this is for."""
        if suites.is_serving(case):
            return self.way is not None and case.shape.kind in self.way.kinds
        return self.forward is not None

    def objection(self, case):
        """Returns why it can't take a case of its kind, or None."""
        way = self.way if suites.is_serving(case) else self
        assert way is not None
        return way.unsupported(case)


def raw_operands(case):
    """Returns the traced part of a case's mask as NumPy arrays, in every form that a peer takes.

    Returns:
        {} or, for documents, segment_ids [batch, len] and cu_seqlens [documents + 1], both int32.
    """
    if case.mask.kind != "documents":
        return {}
    lengths = np.asarray(case.mask.lengths, np.int32)
    ids = np.repeat(np.arange(lengths.size, dtype=np.int32), lengths)
    return {
        "segment_ids": np.broadcast_to(ids, (case.shape.batch, ids.size)).copy(),
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
    }


def _one_line(error):
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}"


def _importable(*names):
    """Returns why one of the modules can't be imported, or None; quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:
                return f"can't import {name}: {_one_line(error)}"
    return None


def _no_gpu():
    return None if jax.default_backend() == "gpu" else "needs an NVIDIA GPU"


def _same_dims(case):
    if case.shape.head_dim != case.shape.v_dim:
        return f"takes one dimension for keys and values, not {case.shape.head_dim} and another"
    return None


def _scale(case):
    return 1.0 / math.sqrt(case.shape.head_dim)


# --- ours -----------------------------------------------------------------------------------------


def mask_of(case, raw):
    """Returns the case's mask as a pallas_attn expression, None for full attention."""
    import pallas_attn as pa

    match case.mask.kind:
        case "full":
            return None
        case "causal":
            return pa.Causal()
        case "window":
            return pa.SlidingWindow(case.mask.left, case.mask.right)
        case "documents":
            return pa.Causal() & pa.Document(raw["segment_ids"])


def plan(case, raw, backend, tiles):
    """Builds the block tables of a case for one backend."""
    import pallas_attn as pa

    s, mask = case.shape, mask_of(case, raw)
    sizes = {"q_len": s.q_len, "kv_len": s.kv_len, "head_dim": s.head_dim, "v_dim": s.v_dim}
    return pa.plan(mask, **sizes, dtype=jnp.dtype(s.dtype), backend=backend, tiles=tiles)


def _tiles(text):
    """Reads "QxKVxWARPSxSTAGES" of the forward, dq and dkv kernels, slashes between them."""
    import pallas_attn as pa

    kernels = [[int(n) for n in part.split("x")] for part in text.split("/")]
    kernels += kernels[-1:] * (3 - len(kernels))  # one left out is like the one before
    return pa.Tiles(*(pa.KernelTiles(*sizes) for sizes in kernels))


def _ours(name, backend=None, *options):
    backend = None if backend == "default" else backend
    flags = {"unplanned", "deterministic", *serving.OWN}
    planned, given = "unplanned" not in options, {"deterministic": "deterministic" in options}
    sizes = [option for option in options if option not in flags]
    if len(sizes) > 1 or any(not option[:1].isdigit() for option in sizes):
        raise ValueError(
            f"{name}: after the backend come {', '.join(sorted(flags))} and tile sizes, or none"
        )

    def tiles():
        return _tiles(sizes[0]) if sizes else None

    def forward(case, q, k, v, operands):
        import pallas_attn as pa

        mask = operands if planned else mask_of(case, operands)
        return pa.mha(q, k, v, mask, backend=backend, tiles=tiles(), **given)

    def prepare(case, raw):
        return plan(case, raw, backend, tiles()) if planned else raw

    def absent():
        reason = _importable("pallas_attn")
        if reason:
            return reason
        known = importlib.import_module("pallas_attn.backends").ALL
        if backend not in (None, *known):
            return f"pallas_attn has no backend {backend!r}"
        return None if backend in (None, "xla") else _no_gpu()

    def unsupported(case):
        import pallas_attn as pa

        dtype, mask = jnp.dtype(case.shape.dtype), mask_of(case, raw_operands(case))
        q, k, v = (jax.ShapeDtypeStruct(getattr(case.shape, x), dtype) for x in "qkv")
        try:
            pa.explain(q, k, v, mask, backend=backend)
        except NotImplementedError as error:
            return _one_line(error)
        return None

    alone = any(option in serving.OWN for option in options)
    given_to_all = {"absent": absent, "unsupported": unsupported, "prepare": prepare}
    return Impl(
        name,
        forward=None if alone else forward,
        ours=True,
        way=serving.ours(backend, *options),
        **given_to_all,
    )


# --- jax's own ------------------------------------------------------------------------------------


def _same_document(case, raw):
    """Returns the bool mask [batch, 1, q_len, kv_len] of documents, None for other masks."""
    if case.mask.kind != "documents":
        return None
    ids = raw["segment_ids"]
    return ids[:, None, :, None] == ids[:, None, None, :]


def _jax_nn_arguments(case, mask):
    """Returns the keywords of jax.nn.dot_product_attention, which tokamax shares."""
    keywords = {"is_causal": case.mask.kind in ("causal", "documents"), "mask": mask}
    if case.mask.kind == "window":
        keywords["local_window_size"] = (case.mask.left, case.mask.right)
        keywords["is_causal"] = case.mask.right == 0
    return keywords


def _jax_nn(name, implementation):
    def forward(case, q, k, v, mask):
        keywords = _jax_nn_arguments(case, mask)
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **keywords)

    return Impl(
        name,
        forward=forward,
        absent=_no_gpu if implementation == "cudnn" else lambda: None,
        unsupported=_same_dims,
        prepare=_same_document,
    )


JAX_TRITON = "jax.experimental.pallas.ops.gpu.attention"


def _jax_triton(name, blocks=None):
    """Jax's own Triton kernel; `blocks` as "128x64x32": q and kv forward, all four backward."""
    sizes = [int(b) for b in blocks.split("x")] if blocks else None

    def forward(case, q, k, v, segment_ids):
        module = importlib.import_module(JAX_TRITON)
        chosen = module.BlockSizes.get_default()
        if sizes:
            chosen = module.BlockSizes(*sizes[:2], *[sizes[2]] * 4)
        group = case.shape.q_heads // case.shape.kv_heads
        if group > 1:  # it knows no groups: what its users do
            k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        causal = case.mask.kind != "full"
        return module.mha(
            q, k, v, segment_ids, sm_scale=_scale(case), causal=causal, block_sizes=chosen
        )

    def unsupported(case):
        if case.mask.kind == "window":
            return "has no sliding window and takes no mask"
        return _same_dims(case)

    return Impl(
        name,
        forward=forward,
        absent=lambda: _no_gpu() or _importable(JAX_TRITON),
        unsupported=unsupported,
        prepare=lambda case, raw: raw.get("segment_ids"),
    )


JAX_MOSAIC = "jax.experimental.pallas.ops.gpu.attention_mgpu"


def _jax_mosaic(name):
    """Jax's own Hopper kernel, with the blocks of its own benchmark and 64 backward."""

    def forward(case, q, k, v, operands):
        module = importlib.import_module(JAX_MOSAIC)
        backward = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
        block_kv = 64 if case.shape.head_dim > 128 else 128
        causal = case.mask.kind == "causal"
        config = module.TuningConfig(64, block_kv, 2, causal=causal, **backward)
        return module.attention(q, k * _scale(case), v, config)  # it has no scale

    def unsupported(case):
        if case.shape.dtype != "float16":
            return "its shared memory is declared as float16"
        if case.mask.kind not in ("full", "causal"):
            return "takes no mask"
        return _same_dims(case)

    def absent():
        return _no_gpu() or _importable(JAX_MOSAIC)

    return Impl(name, forward=forward, absent=absent, unsupported=unsupported)


# --- other projects -------------------------------------------------------------------------------


@functools.cache
def _stand_in_for_xprof():
    """Puts empty modules where tokamax imports xprof: only its benchmark reader uses them."""
    with contextlib.suppress(ImportError):
        importlib.import_module("xprof.cli.tools.get_kernel_stats_tool")
        return
    name = parent = None
    for part in ("xprof", "cli", "tools", "get_kernel_stats_tool"):
        name = f"{name}.{part}" if name else part
        module = types.ModuleType(name)
        module.__dict__["__path__"] = []
        sys.modules[name] = module
        if parent is not None:
            setattr(parent, part, module)
        parent = module


def _tokamax(name, implementation):
    def absent():
        reason = _no_gpu()
        if reason:
            return reason
        _stand_in_for_xprof()
        logging.getLogger("absl").setLevel(logging.ERROR)
        return _importable("tokamax")

    def forward(case, q, k, v, mask):
        tokamax = importlib.import_module("tokamax")
        keywords = _jax_nn_arguments(case, mask)
        return tokamax.dot_product_attention(q, k, v, implementation=implementation, **keywords)

    return Impl(name, forward=forward, absent=absent, prepare=_same_document)


def _no_fa3():
    reason = _no_gpu()
    if reason is None and getattr(jax.devices()[0], "compute_capability", "") != "9.0":
        reason = "needs compute capability 9.0"
    return reason or _importable("flash_attn3_jax")


def _fa3(name):
    """FlashAttention-3 through flash-attn3-jax, whose published wheel has head_dim 128 alone."""

    def unsupported(case):
        if case.shape.head_dim != 128:
            return "its wheel is built for head_dim 128 alone"
        if case.shape.dtype not in ("bfloat16", "float16"):
            return f"takes no {case.shape.dtype}"
        if case.mask.kind == "documents" and case.shape.batch > 1:
            return "packed rows come one at a time"
        return _same_dims(case)

    def forward(case, q, k, v, cu_seqlens):
        if cu_seqlens is None:
            window = (case.mask.left, case.mask.right) if case.mask.kind == "window" else (-1, -1)
            return fa3.attend(q, k, v, case.mask.kind == "causal", window)
        package = importlib.import_module("flash_attn3_jax")
        longest = max(case.mask.lengths)
        flat = (x[0] for x in (q, k, v))
        return package.flash_mha_varlen(
            *flat, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest, is_causal=True
        )[None]

    return Impl(
        name,
        forward=forward,
        absent=_no_fa3,
        unsupported=unsupported,
        prepare=lambda case, raw: raw.get("cu_seqlens"),
    )


def _serves(name, *options, way, absent=_no_gpu):
    return Impl(name, forward=None, absent=absent, way=way(*options))


FACTORIES = {
    "ours": _ours,
    "xla": functools.partial(_jax_nn, implementation="xla"),
    "cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "jax_mosaic": _jax_mosaic,
    "jax_triton": _jax_triton,
    "tokamax_triton": functools.partial(_tokamax, implementation="triton"),
    "tokamax_mosaic": functools.partial(_tokamax, implementation="mosaic"),
    "fa3": _fa3,
    "fa3_paged": functools.partial(_serves, way=serving.fa3, absent=_no_fa3),
    "jax_paged": functools.partial(
        _serves,
        way=serving.jax_paged,
        absent=lambda: _no_gpu() or _importable(serving.JAX_PAGED),
    ),
    "copy": functools.partial(_serves, way=serving.copy, absent=lambda: None),
}
# Those that may be the fastest; the others cost minutes under masks that they do not skip by.
DEFAULT = "ours:mosaic_gpu,ours:triton,cudnn,fa3,tokamax_mosaic"
# For suites that serve.
SERVING = (
    "ours,ours:default:contiguous,ours:default:fused,ours:default:two_stage,"
    "fa3_paged:1,fa3_paged:4,fa3_paged:16,fa3_paged:32,jax_paged:16,copy"
)


def make(spec):
    """Returns the implementation that a command line asks for.

    Args:
        spec: A name of FACTORIES, with options after colons. "ours:BACKEND:unplanned" gives the
            mask to every call instead of a planned table, "ours:BACKEND:deterministic" asks for
            bit-equal gradients, "ours:BACKEND:128x64x8x3/64x64x4x2" sets block_q, block_kv, warps
            and stages of the forward, the dq and the dkv kernel; "jax_triton:128x64x32" sets its
            blocks: q and kv forward, and all four backward. Of serving, see benchmarks/serving.py:
            "ours:BACKEND:contiguous", "fused" or "two_stage" (BACKEND "default" is our choice),
            "fa3_paged:SPLITS", "jax_paged:SPLITS", and "copy", the device's rate.

    Raises:
        ValueError: For an unknown name or option.
    """
    name, *options = spec.split(":")
    if name not in FACTORIES:
        raise ValueError(f"implementation {spec!r} must be one of {', '.join(FACTORIES)}")
    try:
        return FACTORIES[name](spec, *options)
    except TypeError as error:
        raise ValueError(f"implementation {spec!r}: unknown option") from error
