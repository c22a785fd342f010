"""What our backends are asked to reach, and whether results reach it: `report --bars`.

A figure is a ratio inside one run, a rate, an error or a time. Bars decide the exit status; aims,
rates published for or measured with kernels that can't run beside ours, are shown only.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report import Results, is_peer, markdown


@dataclass(frozen=True)
class Bar:
    """What rows are asked to reach.

    Attributes:
        what: Shown in front.
        mode: Of the rows.
        bound: The figure asked for.
        matches: Whether a record of that mode is meant.
        figure: (results, record) -> the figure, None where it can't be taken.
        at_most: Whether the bound is an upper one.
        aim: Whether it is shown only.
    """

    what: str
    mode: str
    bound: float
    matches: Callable[[dict], bool]
    figure: Callable[[Results, dict], float | None]
    at_most: bool = False
    aim: bool = False

    def met(self, figure):
        """Returns whether a figure is good; None never is."""
        return figure is not None and (
            figure <= self.bound if self.at_most else figure >= self.bound
        )


# --- figures --------------------------------------------------------------------------------------


def over(*peers):
    """Returns a figure: our rate over that of the best of the named peers, all if none is named."""

    def figure(results, record):
        def wanted(r):
            return is_peer(r) and (not peers or r["impl"].split(":")[0] in peers)

        other = results.best(record["case"], record["mode"], wanted)
        return record["tflops"] / other["tflops"] if other else None

    return figure


def over_own(option):
    """Returns a figure: our rate with an option over the rate without it."""

    def figure(results, record):
        other = results.record(record["case"], record["mode"], f"{record['impl']}:{option}")
        return other["tflops"] / record["tflops"] if other else None

    return figure


def over_dense(results, record):
    """Our rate over our dense causal one."""
    other = results.dense(record)
    return record["tflops"] / other["tflops"] if other else None


def over_even(results, record):
    """Our rate at an uneven length over the one at the even length next to it."""
    length = EVEN[record["shape"]["q_len"]]
    batch = max(1, 16384 // length)
    for (_, mode), row in results.rows.items():
        other = row["impls"].get(record["impl"])
        if mode != record["mode"] or other is None or other["failed"]:
            continue
        shape = record["shape"] | {"q_len": length, "kv_len": length, "batch": batch}
        same = other["mask"] == record["mask"] and other["run"] == record["run"]
        if same and other["shape"] == shape:
            return record["tflops"] / other["tflops"]
    return None


def field(name):
    """Returns a figure: a field of the record itself, or the greatest of a dict's."""

    def figure(results, record):
        value = record.get(name)
        return max(value.values()) if isinstance(value, dict) else value

    return figure


def over_impl(option):
    """Returns a figure: our rate over that of our own implementation with an option."""

    def figure(results, record):
        backend = [*record["impl"].split(":"), "default"][1]
        other = results.record(record["case"], record["mode"], f"ours:{backend}:{option}")
        return record["tflops"] / other["tflops"] if other else None

    return figure


def over_copy(results, record):
    """Our rate over the device's at copying as many bytes as are read."""
    other = results.record(record["case"], record["mode"], "copy")
    return record["tb_s"] / other["tb_s"] if other else None


def over_equal(results, record):
    """Our rate at varied lengths over the one at equal lengths of the same mean."""
    other = results.record(EQUAL, record["mode"], record["impl"])
    same = other is not None and other["run"] == record["run"]
    return record["tb_s"] / other["tb_s"] if same else None


def over_forms(results, record):
    """The rate of the form that we choose over that of the better one."""
    backend = [*record["impl"].split(":"), "default"][1]
    forms = [
        results.record(record["case"], record["mode"], f"ours:{backend}:{form}")
        for form in ("fused", "two_stage")
    ]
    best = max((r["tflops"] for r in forms if r), default=None)
    return record["tflops"] / best if best else None


# --- rows -----------------------------------------------------------------------------------------

EVEN = {4000: 4096, 16321: 16384}


def rows(kinds=("full", "causal"), dims=(64, 128, 256), lengths=(4096, 16384), **fields):
    """Returns a test of records: plain self-attention in bfloat16 with these masks and sizes."""

    def matches(record):
        s, m = record["shape"], record["mask"]
        plain = s["head_dim"] == s["v_dim"] and s["q_heads"] == s["kv_heads"]
        sizes = s["head_dim"] in dims and s["q_len"] in lengths and s["dtype"] == "bfloat16"
        asked = all(m.get(key) == value for key, value in fields.items())
        return plain and sizes and m["kind"] in kinds and asked

    return matches


def window(left):
    return rows(("window",), lengths=(32768,), left=left)


def unequal(record):
    s = record["shape"]
    return (s["head_dim"], s["v_dim"], s["q_len"]) == (192, 128, 4096)


def anything(record):
    return True


EQUAL, VARIED = "decode 64x4k page 64", "decode 64 lognormal, mean 4k page 64"
PEERS_ROWS = ("64x8k", "8x32k", "1x128k")


def serves(kind, *titles):
    """Returns a test of records: serving of a kind, with one of these words in its name if any."""

    def matches(record):
        name = record["case"]
        return record["shape"]["kind"] == kind and (not titles or any(t in name for t in titles))

    return matches


PREFILL = Bar("prefill over contiguous", "serve", 0.85, serves("prefill"), over_impl("contiguous"))
SERVING = (
    Bar("decode over FA3's best split", "serve", 0.97, serves("decode", *PEERS_ROWS),
        over("fa3_paged")),
    Bar("decode over jax's paged_attention", "serve", 1.6, serves("decode", *PEERS_ROWS),
        over("jax_paged")),
    Bar("decode over the copy rate", "serve", 0.95, serves("decode", *PEERS_ROWS), over_copy,
        aim=True),
    Bar("varied over equal lengths", "serve", 0.9, lambda r: r["case"] == VARIED, over_equal),
    PREFILL,
    Bar("form chosen over the better", "serve", 0.95, serves("subset"), over_forms),
)  # fmt: skip

DOCUMENTS = rows(("documents",), lengths=(32768,))
HOPPER = ("cudnn", "fa3", "tokamax_mosaic")

# TFLOP/s forward, backward by (head_dim, mask, length): of FlashAttention's CuTe kernels for Hopper
# under PyTorch on the same card, but the backward at 128 and 256 channels, where more is asked.
WANTED = {
    (64, "full", 4096): (508, 550),
    (64, "full", 16384): (529, 525),
    (64, "causal", 4096): (438, 498),
    (64, "causal", 16384): (513, 523),
    (128, "full", 4096): (721, 600),
    (128, "full", 16384): (682, 600),
    (128, "causal", 4096): (581, 600),
    (128, "causal", 16384): (631, 600),
    (256, "full", 4096): (723, 480),
    (256, "full", 16384): (732, 480),
    (256, "causal", 4096): (642, 480),
    (256, "causal", 16384): (681, 480),
}
AIMS = tuple(
    Bar("the aim", mode, rate, rows((kind,), (dim,), (length,)), field("tflops"), aim=True)
    for (dim, kind, length), rates in WANTED.items()
    for mode, rate in zip(("fwd", "bwd"), rates, strict=True)
)

BARS = {
    "": SERVING,
    "triton": (
        *(
            Bar("dense over jax's own Triton kernel", mode, 1.0, rows(dims=(64, 128)),
                over("jax_triton"))
            for mode in ("fwd", "bwd")
        ),
        *(
            Bar(f"{what} over our dense causal", mode, bound, matches, over_dense)
            for mode in ("fwd", "bwd")
            for what, bound, matches in (
                ("window 4096", 0.80, window(4096)),
                ("window 1024", 0.65, window(1024)),
                ("documents", 0.60, DOCUMENTS),
            )
        ),
        Bar("block tables over one forward", "tables", 0.05, anything, field("share_of_forward"),
            at_most=True),
    ),
    "mosaic_gpu": (
        Bar("dense over the best peer", "fwd", 1.0, rows(), over(*HOPPER)),
        Bar("full over cuDNN", "fwd", 1.12, rows(("full",), (64, 256)), over("cudnn")),
        Bar("full over cuDNN", "fwd", 1.08, rows(("full",), (128,)), over("cudnn")),
        Bar("short over the best peer", "fwd", 0.95, rows(lengths=(512, 1024)), over(*HOPPER)),
        Bar("window 4096 over FA3", "fwd", 1.0, window(4096), over("fa3")),
        Bar("window 1024 over tokamax", "fwd", 1.0, window(1024), over("tokamax_mosaic")),
        Bar("documents over FA3", "fwd", 1.15, DOCUMENTS, over("fa3")),
        Bar("192/128, TFLOP/s", "fwd", 600, unequal, field("tflops")),
        Bar("uneven over even", "fwd", 0.95, rows(lengths=tuple(EVEN)), over_even),
        Bar("64k: greatest error", "fwd", 1.5e-3, rows(("full",), lengths=(65536,)),
            field("max_abs"), at_most=True),
        Bar("first call, s", "startup", 10, anything, field("first_s"), at_most=True),
        Bar("compiled for other documents", "startup", 0,
            lambda r: r["mask"]["kind"] == "documents", field("compiled_again"), at_most=True),
        Bar("D64 over cuDNN", "bwd", 1.15, rows(dims=(64,)), over("cudnn")),
        Bar("D128 over FA3", "bwd", 1.0, rows(dims=(128,)), over("fa3")),
        Bar("D256 over cuDNN, tokamax", "bwd", 1.15, rows(dims=(256,)),
            over("cudnn", "tokamax_mosaic")),
        *(
            Bar(f"{what} over FA3", "bwd", 1.0, matches, over("fa3"))
            for what, matches in (
                ("window 4096", window(4096)),
                ("window 1024", window(1024)),
                ("documents", DOCUMENTS),
            )
        ),
        Bar("192/128, TFLOP/s", "bwd", 404, unequal, field("tflops"), aim=True),
        Bar("deterministic over default", "bwd", 0.8, rows(dims=(128,)),
            over_own("deterministic")),
        Bar("block tables over one forward", "tables", 0.05, anything, field("share_of_forward"),
            at_most=True),
        PREFILL,
        *AIMS,
    ),
}  # fmt: skip


def table(results, impl="ours:mosaic_gpu"):
    """Returns the table of bars for one of our implementations, and whether all are met.

    Args:
        results: A report.Results.
        impl: Its name; the backend in it says which bars, "ours" alone those of serving.
    """
    lines, met = [], True
    for bar in BARS.get([*impl.split(":"), ""][1], ()):
        for (case, mode), row in results.rows.items():
            record = row["impls"].get(impl)
            if record is None or mode != bar.mode or not bar.matches(record):
                continue
            figure = None if record["failed"] else bar.figure(results, record)
            good = bar.met(figure)
            met = met and (good or bar.aim)
            shown = "-" if figure is None else f"{figure:.4g}"
            asked = f"{'<=' if bar.at_most else '>='} {bar.bound:g}"
            said = "yes" if good else "no" if bar.aim else "NO"
            lines.append([bar.what, case, mode, shown, asked, said])
    head = ["bar", "case", "mode", "measured", "asked", "met"]
    text = markdown(head, lines) if lines else "no row of these files has a bar"
    return text, met and bool(lines)
