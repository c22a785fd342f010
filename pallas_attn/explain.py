"""`explain`: which backend and tiles a call would run, and why the others would not."""

import dataclasses

import jax

from pallas_attn import backends
from pallas_attn import gpu as gpus
from pallas_attn.block_table import BlockTable
from pallas_attn.masks import as_mask
from pallas_attn.spec import Spec
from pallas_attn.tiles import Tiles


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run; prints as a short report.

    Attributes:
        backend: the backend that runs.
        tiles: its schedules.
        reasons: for each other backend why it does not run.
        spec: the call's static facts.
        mask: the mask, as text.
        gpu: the device's name; None on a CPU.
    """

    backend: str
    tiles: Tiles
    reasons: dict[str, str]
    spec: Spec
    mask: str
    gpu: str | None

    def __str__(self):
        spec = self.spec
        heads = f"{spec.q_heads} query heads on {spec.kv_heads} KV heads"
        dims = f"head_dim {spec.head_dim}, v_dim {spec.v_dim}, {spec.dtype}"
        lines = [
            f"attention of {spec.q_len} queries to {spec.kv_len} keys, batch {spec.batch}, "
            f"{heads}, {dims}",
            f"mask     {self.mask}",
            f"device   {self.gpu or 'no NVIDIA GPU'}",
            f"backend  {self.backend}",
            f"tiles    {self.tiles}",
        ]
        lines += [f"not      {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def explain(
    q,
    k,
    v,
    mask=None,
    *,
    bias=None,
    scale=None,
    soft_cap=None,
    sinks=None,
    backend=None,
    tiles=None,
) -> Explanation:
    """Tells what `mha` with the same arguments would run, without running it.

    Args:
        q, k, v: arrays or `jax.ShapeDtypeStruct`s, as in `mha`.
        mask, bias, scale, soft_cap, sinks, backend, tiles: as in `mha`; bias and sinks may be
            structs.

    Raises:
        ValueError, TypeError, NotImplementedError: as `mha`.
    """
    if len(q.shape) == 3:
        q, k, v = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in (q, k, v))
    if bias is not None:
        shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
        bias = jax.ShapeDtypeStruct(shape, bias.dtype)
    spec = Spec.of(q, k, v, bias=bias, scale=scale, soft_cap=soft_cap, sinks=sinks)
    expression = mask.mask if isinstance(mask, BlockTable) else as_mask(mask)
    sizes = (spec.batch, spec.q_heads, spec.q_len, spec.kv_len)
    (mask if isinstance(mask, BlockTable) else expression).check(*sizes)
    planned = mask if isinstance(mask, BlockTable) else None
    name = backends.choose(spec, expression, backend or (planned.backend if planned else None))
    gpu = gpus.detect()
    if planned is not None:
        if tiles is not None and tiles != planned.tiles:
            raise ValueError(
                f"tiles: got {tiles}, expected those of the BlockTable passed as mask: "
                f"{planned.tiles}"
            )
        tiles = planned.tiles
    tiles = tiles or backends.load(name).candidate_tiles(spec, expression, gpu)[0]
    reasons = {}
    for other, reason in backends.reasons(spec, expression, gpu).items():
        if other != name:
            reasons[other] = reason or (
                f"it could, but {name!r} was asked for"
                if backend
                else f"it could, but {name!r} is preferred"
            )
    return Explanation(name, tiles, reasons, spec, repr(expression), gpu.name if gpu else None)


__all__ = ["Explanation", "explain"]
