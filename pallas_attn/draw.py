"""`draw`: a mask and its block table as text or as a picture."""

import numpy as np

from pallas_attn import reference
from pallas_attn.block_table import BlockTable
from pallas_attn.mask_core import TileGrid
from pallas_attn.masks import as_mask

SKIPPED, PARTIAL, FULL = 0, 1, 2


def block_kinds(mask, *, q_len: int, kv_len: int, block_q: int, block_kv: int, batch=0, head=0):
    """What a forward kernel does with each block: 0 skipped, 1 partly visible, 2 fully visible.

    Args:
        mask: a mask expression, bool array or None.
        q_len, kv_len: lengths.
        block_q, block_kv: block sizes.
        batch, head: which sequence and query head.

    Returns:
        int array [q blocks, kv blocks].
    """
    expression = as_mask(mask)
    batches, heads = expression.sizes()
    grid = TileGrid(max(batches, batch + 1), max(heads, head + 1), q_len, kv_len, block_q, block_kv)
    some, every = (_one(x, batch, head, grid) for x in expression.tiles(grid))
    first, _ = grid.kv_bounds
    every = every & (first[0, 0] + block_kv <= kv_len)
    return np.where(every, FULL, np.where(some, PARTIAL, SKIPPED))


def _one(x, batch: int, head: int, grid: TileGrid):
    x = np.asarray(x)
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    x = x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]
    return np.broadcast_to(x, (grid.num_q, grid.num_kv))


def draw(
    mask,
    *,
    q_len: int | None = None,
    kv_len: int | None = None,
    block_q: int = 64,
    block_kv: int = 64,
    batch: int = 0,
    head: int = 0,
    path: str | None = None,
):
    """Shows which pairs a mask allows and which blocks a kernel visits.

    Args:
        mask: a mask expression, bool array, None, or a planned `BlockTable` (which brings its
            lengths and the forward kernel's block sizes).
        q_len, kv_len: lengths; kv_len None is q_len.
        block_q, block_kv: block sizes.
        batch, head: which sequence and query head to show.
        path: where to write a PNG (needs matplotlib); None for text only.

    Returns:
        the text: one character a block, `.` skipped, `+` partly visible, `#` fully visible, and
        their counts.

    Raises:
        ValueError: when lengths are missing, or too large for a picture of single pairs.
    """
    if isinstance(mask, BlockTable):
        q_len, kv_len = mask.q_len, mask.kv_len
        block_q, block_kv = mask.tiles.fwd.block_q, mask.tiles.fwd.block_kv
        mask = mask.mask
    if q_len is None:
        raise ValueError("q_len: got None, expected a length (only a BlockTable brings its own)")
    kv_len = q_len if kv_len is None else kv_len
    kinds = block_kinds(
        mask, q_len=q_len, kv_len=kv_len, block_q=block_q, block_kv=block_kv, batch=batch, head=head
    )
    rows: list[str] = ["".join(".+#"[kind] for kind in row) for row in kinds]
    counts = [int((kinds == kind).sum()) for kind in (SKIPPED, PARTIAL, FULL)]
    rows.append(
        f"{as_mask(mask)!r}, {q_len} x {kv_len} in blocks of {block_q} x {block_kv}: "
        f"{counts[0]} skipped, {counts[1]} partial, {counts[2]} full"
    )
    text = "\n".join(rows)
    if path is not None:
        _picture(
            mask,
            kinds,
            text.splitlines()[-1],
            (q_len, kv_len, block_q, block_kv, batch, head),
            path,
        )
    return text


def _picture(mask, kinds, title: str, sizes, path: str) -> None:
    q_len, kv_len, block_q, block_kv, batch, head = sizes
    if q_len * kv_len > 1 << 24:
        raise ValueError(
            f"path: got lengths {q_len} x {kv_len}, expected at most 2^24 pairs to draw"
        )
    import matplotlib
    from matplotlib.figure import Figure

    expression = as_mask(mask)
    batches, heads = expression.sizes()
    shape = (max(batches, batch + 1), max(heads, head + 1), q_len, kv_len)
    pairs = np.asarray(reference.visible(expression, *shape))[batch, head]
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(pairs, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    left.set(title="visible pairs", xlabel="key", ylabel="query")
    colours = matplotlib.colors.ListedColormap(["#f2f2f2", "#f4a259", "#2a6f97"])
    extent = (0, kinds.shape[1] * block_kv, kinds.shape[0] * block_q, 0)
    right.imshow(
        kinds, cmap=colours, vmin=0, vmax=2, aspect="auto", extent=extent, interpolation="nearest"
    )
    right.set(title="blocks: grey skipped, orange partial, blue full", xlabel="key", ylabel="query")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)


__all__ = ["FULL", "PARTIAL", "SKIPPED", "block_kinds", "draw"]
