"""Tables, bars and plots from result files: `python -m benchmarks.report FILE... [--bars]`.

Ratios are taken inside one run only. Where files hold several runs of a row, the last one counts.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

# The mask whose rate our masked rates are compared with.
DENSE = "causal"


def load(paths):
    """Returns the records of JSON-lines files, in order."""
    records = []
    for path in paths:
        text = Path(path).read_text()
        records += [json.loads(row) for row in text.splitlines() if row.strip()]
    return records


def line(record):
    """Returns one result as one line of text."""
    start = f"{record['case']:34s} {record['mode']:7s} {record['impl']:24s} "
    if record["failed"]:
        return start + record["failed"]
    if record["mode"] == "tables":
        share = record["share_of_forward"]
        forward = record["forward_ms"]
        return f"{start}{record['ms'] * 1e3:9.1f} us, {share:.1%} of a {forward:.3f} ms forward"
    if record["mode"] == "startup":
        again = record["compiled_again"]
        other = "" if again is None else f", other documents compile {again} programs"
        return (
            f"{start}first call {record['first_s']:.2f} s, first gradients "
            f"{record['first_grad_s']:.2f} s, then {record['host_us']:.0f} us of the host{other}"
        )
    worst = max(record["errors"].values(), default=0.0)
    bytes_read = f" {record['tb_s']:5.3f} TB/s" if "tb_s" in record else ""
    note = "  HOST-BOUND" if record["host_bound"] else ""
    return (
        f"{start}{record['ms']:9.3f} ms {record['tflops']:8.1f} TFLOP/s{bytes_read}  "
        f"+-{record['spread'] / 2:.1%}  host {record['host_us']:.0f} us  error {worst:.1e}  "
        f"compile {record['lower_s'] + record['compile_s']:.1f} s{note}"
    )


class Results:
    """Records by row and implementation, each row from the last run that has it."""

    def __init__(self, records):
        self.rows = {}
        for record in records:
            key = (record["case"], record["mode"])
            started = record["run"]["started"]
            row = self.rows.get(key)
            if row is None or row["started"] != started:
                row = self.rows[key] = {"started": started, "impls": {}}
            row["impls"][record["impl"]] = record
        names = dict.fromkeys(r["impl"] for r in records)
        self.impls = sorted(names, key=lambda name: not name.startswith("ours"))

    def record(self, case, mode, impl):
        """Returns a result that was timed, or None."""
        found = self.rows.get((case, mode), {"impls": {}})["impls"].get(impl)
        return found if found and not found["failed"] else None

    def best(self, case, mode, wanted):
        """Returns the fastest timed result among implementations for which wanted(record)."""
        row = self.rows.get((case, mode), {"impls": {}})["impls"].values()
        timed = [r for r in row if not r["failed"] and wanted(r)]
        return max(timed, key=lambda r: r.get("tflops", 0.0), default=None)

    def dense(self, record):
        """Returns the same implementation's dense causal result that a masked one compares with.

        The one of the same shape and run; else, of the same run, the longest of the same heads'
        dimensions.
        """
        fit = []
        for (_, mode), row in self.rows.items():
            other = row["impls"].get(record["impl"])
            if mode != record["mode"] or other is None or other["failed"]:
                continue
            if other["mask"]["kind"] != DENSE or other["run"] != record["run"]:
                continue
            if all(other["shape"][d] == record["shape"][d] for d in ("head_dim", "v_dim", "dtype")):
                fit.append((other["shape"] == record["shape"], other["shape"]["q_len"], other))
        return max(fit, key=lambda x: x[:2])[2] if fit else None


def is_ours(record):
    return record["ours"]


def is_peer(record):
    return not record["ours"] and record["impl"] != "copy"


def _ratio(a, b):
    return f"{a['tflops'] / b['tflops']:.2f}" if a and b else "-"


def _cells(results, case, mode):
    """Returns the cells of one row of the table of rates."""
    cells = []
    for name in results.impls:
        record = results.rows[case, mode]["impls"].get(name)
        if record is None:
            cells.append("")
        elif record["failed"]:
            cells.append(record["failed"].split(":")[0].split()[0])
        else:
            cells.append(f"{record.get('tb_s', record['tflops']):.3g}")
    mine, peer = (results.best(case, mode, w) for w in (is_ours, is_peer))
    masked = mine and mine["mask"]["kind"] in ("window", "documents")
    dense = results.dense(mine) if masked else None
    return [case, mode, *cells, _ratio(mine, peer), peer["impl"] if peer else "-",
            _ratio(mine, dense)]  # fmt: skip


def markdown(head, rows):
    """Returns a Markdown table, its columns padded so that it reads as text too."""
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]

    def pad(row):
        return " | ".join(str(x).ljust(w) for x, w in zip(row, widths, strict=True))

    rule = " | ".join("-" * w for w in widths)
    return "\n".join(f"| {text} |" for text in [pad(head), rule, *map(pad, rows)])


def tables(records):
    """Returns everything worth showing of the records, as Markdown."""
    results = Results(records)
    parts = []
    for run in {json.dumps(r["run"]): r["run"] for r in records}.values():
        parts.append(
            f"{run['card']}, {run['started']}, JAX {run['jax']}, driver {run['driver']}, "
            f"commit {run['commit']}{' with changes' if run['dirty'] else ''}"
        )
    rated = [key for key in results.rows if key[1] in ("fwd", "bwd")]
    if rated:
        head = ["case", "mode", *results.impls, "ours/best peer", "best peer", "ours/our causal"]
        rows = [_cells(results, *key) for key in rated]
        parts.append("TFLOP/s on visible pairs\n\n" + markdown(head, rows))
    served = [key for key in results.rows if key[1] == "serve"]
    if served:
        head = ["serving", *results.impls, "ours/best peer", "best peer"]
        rows = [[case, *_cells(results, case, mode)[2:-1]] for case, mode in served]
        text = "TB/s of keys and values read in decode and mla, TFLOP/s on visible pairs elsewhere"
        parts.append(f"{text}\n\n{markdown(head, rows)}")
    planned = [r for r in records if r["mode"] == "tables" and not r["failed"]]
    if planned:
        head = ["block tables", "impl", "us", "forward ms", "share", "plan + forward ms"]
        rows = [
            [r["case"], r["impl"], f"{r['ms'] * 1e3:.1f}", f"{r['forward_ms']:.3f}",
             f"{r['share_of_forward']:.1%}", f"{r['plan_and_forward_ms']:.3f}"]
            for r in planned
        ]  # fmt: skip
        parts.append(markdown(head, rows))
    started = [r for r in records if r["mode"] == "startup" and not r["failed"]]
    if started:
        head = ["first calls", "impl", "forward s", "gradients s", "host us", "compiled again"]
        keys = ("case", "impl", "first_s", "first_grad_s", "host_us", "compiled_again")
        rows = [["-" if r[key] is None else r[key] for key in keys] for r in started]
        parts.append(markdown(head, rows))
    reasons = {(r["impl"], r["failed"]): r["case"] for r in reversed(records) if r["failed"]}
    if reasons:
        notes = [f"- {impl}: {why} ({case})" for (impl, why), case in reasons.items()]
        parts.append("Not timed, first case of each:\n" + "\n".join(reversed(notes)))
    return "\n\n".join(parts)


def compare(old, new):
    """Returns how rates changed from one set of records to another, as Markdown."""
    before, after = Results(old), Results(new)
    rows, ratios = [], {}
    for (case, mode), row in after.rows.items():
        for name in row["impls"]:
            a, b = before.record(case, mode, name), after.record(case, mode, name)
            if a and b:
                ratio = a["ms"] / b["ms"]
                ratios.setdefault(name, []).append(ratio)
                rows.append([case, mode, name, f"{a['ms']:.4f}", f"{b['ms']:.4f}", f"{ratio:.3f}"])
    text = markdown(["case", "mode", "impl", "ms before", "ms after", "speed-up"], rows)
    means = [f"{name} {statistics.geometric_mean(r):.3f}" for name, r in ratios.items()]
    return f"{text}\n\ngeometric means: {', '.join(means) or 'nothing in common'}"


def plot(records, path):
    """Draws the rates of every row as bars, forward above backward, into an image file."""
    import matplotlib.pyplot as plt

    results = Results(records)
    modes = [m for m in ("fwd", "bwd") if any(key[1] == m for key in results.rows)]
    if not modes:
        raise ValueError("no forward or backward row to plot")
    longest = max(sum(m == mode for _, m in results.rows) for mode in modes)
    figure, axes = plt.subplots(len(modes), 1, squeeze=False, layout="constrained")
    for axis, mode in zip(axes[:, 0], modes, strict=True):
        cases = [case for case, m in results.rows if m == mode]
        width = 0.8 / len(results.impls)
        for i, name in enumerate(results.impls):
            found = [results.record(case, mode, name) for case in cases]
            heights = [r["tflops"] if r else 0.0 for r in found]
            places = [x + (i + 0.5) * width - 0.4 for x in range(len(cases))]
            axis.bar(places, heights, width, label=name)
        axis.set_xticks(range(len(cases)), cases, rotation=30, ha="right", fontsize=7)
        axis.set_ylabel(f"{mode}, TFLOP/s")
    run = records[0]["run"]
    axes[0, 0].set_title(f"{run['card']}, {run['started'][:10]}, JAX {run['jax']}", fontsize=9)
    axes[0, 0].legend(fontsize=7, ncols=4)
    figure.set_size_inches(max(7, 0.9 * longest + 2), 3.6 * len(modes))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv=None):
    """Prints what was asked for; with --bars, returns 1 unless all are met."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", type=Path, help="an older file: speed-ups from it to FILES")
    parser.add_argument("--plot", type=Path, help="image to write")
    parser.add_argument("--bars", action="store_true", help="check the rates asked for")
    parser.add_argument("--impl", default="ours:mosaic_gpu", help="whose bars")
    args = parser.parse_args(argv)
    records = load(args.files)
    print(compare(load([args.compare]), records) if args.compare else tables(records))
    if args.plot:
        plot(records, args.plot)
    if args.bars:
        from benchmarks import bars

        text, met = bars.table(Results(records), args.impl)
        print("\n" + text)
        return int(not met)
    return 0


if __name__ == "__main__":
    sys.exit(main())
