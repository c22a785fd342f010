"""Times pallas_attn beside its peers: `python -m benchmarks.run --suite dense --quick`.

Everything is compiled first, in threads; then, case by case, each implementation is checked against
a float32 reference on the very inputs that it is timed with, and those that are right are timed in
turn. What is absent, refuses a case, fails or is wrong stays in the results as one line. Results
are JSON lines, each complete in itself; `python -m benchmarks.report` makes tables of them.

    python -m benchmarks.run --suite forward --mode fwd
    python -m benchmarks.run --suite backward --mode bwd --impl ours:mosaic_gpu,cudnn,fa3
    python -m benchmarks.run --suite dense,startup --filter "D128|documents" --quick
    python -m benchmarks.run --suite serving
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

# One region of memory, so that a peer that needs most of the card is not refused for fragments.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax

from benchmarks import check, impls, report, serving, startup, suites, timing

RESULTS = Path(__file__).parent / "results"
QUICK_BUDGET_S, BUDGET_S = 170.0, 24 * 3600.0
COMPILE_SHARE = 0.6  # of the budget; what is not compiled by then is not timed


def parse(argv):
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def split(text):
        return [part for part in text.split(",") if part]

    known = [*suites.SUITES, *suites.GROUPS]
    parser.add_argument("--suite", type=split, default=["dense"], help=", ".join(known))
    told = f"default {impls.DEFAULT}, of serving {impls.SERVING}; known are "
    parser.add_argument("--impl", type=split, help=told + ", ".join(impls.FACTORIES))
    parser.add_argument("--mode", type=split, default=["fwd", "bwd"], help="fwd,bwd")
    told = "only cases whose name holds this, or one of several with | between"
    parser.add_argument("--filter", default="", help=told)
    parser.add_argument("--quick", action="store_true", help="fewer, shorter repeats; 3 minutes")
    parser.add_argument("--budget", type=float, help="seconds after which no case is started")
    parser.add_argument("--repeats", type=int, help="rounds in which all take turns")
    parser.add_argument("--seconds", type=float, help="length of one implementation's round")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=RESULTS, help="a .jsonl file, or a folder")
    parser.add_argument("--commit", help="commit hash to record where there is no git")
    parser.add_argument("--list", action="store_true", help="say what could run here, and stop")
    args = parser.parse_args(argv)
    unknown = set(args.mode) - {"fwd", "bwd"}
    if unknown:
        parser.error(f"--mode {','.join(sorted(unknown))}: must be fwd, bwd or both")
    args.repeats = args.repeats or (3 if args.quick else 7)
    args.seconds = args.seconds or (0.03 if args.quick else 0.06)
    if args.budget is None:
        args.budget = QUICK_BUDGET_S if args.quick else BUDGET_S
    return args


def _output(*command):
    """Returns what a command prints, None where it is missing or fails."""
    if not shutil.which(command[0]):
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip().split("\n")[0]
    return None


def header(args):
    """Returns what every result says of its run: card, date, versions, commit, effort."""
    here = str(Path(__file__).parent.parent)
    commit = args.commit or _output("git", "-C", here, "rev-parse", "--short", "HEAD")
    dirty = _output("git", "-C", here, "status", "--porcelain") if commit else None
    return {
        "card": jax.devices()[0].device_kind,
        "started": datetime.datetime.now().isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": commit,
        "dirty": bool(dirty),
        "repeats": args.repeats,
        "seconds": args.seconds,
        "workers": args.workers,
    }


class Writer:
    """Appends results to their suite's file as they come, so that a killed run keeps them."""

    def __init__(self, out, run):
        self.out, self.run, self.records = out, run, []

    def path(self, suite):
        """Returns the file for a suite: --out itself, or <gpu>_<date>_<suite>.jsonl in it."""
        if self.out.suffix == ".jsonl":
            return self.out
        card = re.sub(r"[^a-z0-9]+", "-", self.run["card"].lower()).strip("-")
        return self.out / f"{card}_{self.run['started'][:10]}_{suite}.jsonl"

    def add(self, case, mode, impl, quiet=False, **fields):
        """Writes one result, and prints it unless told not to."""
        record = {
            "suite": case.suite,
            "case": case.name,
            "mode": mode,
            "impl": impl.name,
            "ours": impl.ours,
            "shape": asdict(case.shape),
            "mask": asdict(case.mask),
            "failed": None,
            **fields,
            "run": self.run,
        }
        self.records.append(record)
        path = self.path(case.suite)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if not quiet:
            print(report.line(record), flush=True)


def asked_for(args, cases):
    """Returns the implementations to run: those asked for that take any of the cases."""
    default = {True: impls.SERVING, False: impls.DEFAULT}
    kinds = dict.fromkeys(suites.is_serving(case) for case in cases)
    names = args.impl or [name for kind in kinds for name in default[kind].split(",")]
    made = [impls.make(spec) for spec in dict.fromkeys(names)]
    return [impl for impl in made if any(impl.takes(case) for case in cases)]


def jobs_of(args, cases, impls_present):
    """Returns the (case, mode, impl) that are to be compiled and timed, in that order."""
    jobs = []
    for case in cases:
        present = [impl for impl in impls_present if impl.takes(case)]
        for mode in case.modes:
            if mode == "tables":
                chosen = [i for i in present if i.ours and "unplanned" not in i.name.split(":")]
            elif mode in ("startup", "serve") or mode in args.mode:
                chosen = present
            else:
                chosen = []
            jobs += [(case, mode, impl) for impl in chosen]
    return jobs


def start_up(jobs, refusals, writer):
    """Measures first calls, one after the other, while nothing else runs."""
    for case, mode, impl in jobs:
        reason = refusals[case, impl]
        fields = {"failed": f"unsupported: {reason}"} if reason else {}
        try:
            fields = fields or startup.measure(impl, case)
        except Exception as error:
            fields = {"failed": timing.one_line(error)}
        writer.add(case, mode, impl, **fields)


def compile_all(jobs, refusals, workers, deadline):
    """Compiles all jobs in threads; returns Programs in the order of the jobs."""
    pool = ThreadPoolExecutor(workers)
    futures: list[timing.Programs | Future] = []
    rows: dict[suites.Case, set[str]] = {}
    for case, mode, _ in jobs:
        rows.setdefault(case, set()).add(mode)
    for case, modes in rows.items():
        pool.submit(check.compile_ahead, case, modes)
    for case, mode, impl in jobs:
        reason = refusals[case, impl]
        if reason:
            futures.append(timing.Programs(failed=f"unsupported: {reason}"))
        else:
            futures.append(pool.submit(timing.compile_programs, impl, case, mode))
    programs = []
    for future in futures:
        if isinstance(future, timing.Programs):
            programs.append(future)
            continue
        try:
            programs.append(future.result(max(0.0, deadline - time.perf_counter())))
        except TimeoutError:
            programs.append(timing.Programs(failed="not compiled within the budget"))
    pool.shutdown(wait=False, cancel_futures=True)
    return programs


def device_is_lost():
    """Returns whether the device stopped answering, as it does after an illegal access."""
    try:
        return int(jax.numpy.arange(3).sum()) != 3
    except Exception:
        return True


class Row:
    """One case and mode: checks every implementation, times the right ones, writes all."""

    def __init__(self, case, inputs, raw, expected):
        self.case, self.inputs, self.raw, self.expected = case, inputs, raw, expected

    def calls(self, mode, programs, impl):
        """Checks one implementation and returns what to time and its errors.

        Returns:
            {label: timing.Timed} and the two of check.Reference.errors.

        Raises:
            RuntimeError: With one line, if it is too large or wrong.
        """
        run = programs.calls
        q, k, v, dout = self.inputs
        reason = timing.too_large(run)
        if reason:
            raise RuntimeError(reason)
        operands = run["prepare"](self.raw)
        if mode == "bwd":
            out, pullback = run["vjp"](q, k, v, operands)
            given = (dout, pullback)
            results = dict(zip(("dq", "dk", "dv"), run["bwd"](*given), strict=True)) | {"out": out}
        else:
            given = (q, k, v, operands)
            results = {"out": run["fwd"](*given)}
        one = run["bwd" if mode == "bwd" else "fwd"]
        many = functools.partial(run["looped"], *given) if "looped" in run else None
        timed = timing.Timed(functools.partial(one, *given), many, programs.inner)
        calls = {"bwd" if mode == "bwd" else "fwd": timed}
        if mode == "tables":
            raws = jax.tree.map(lambda x: jax.numpy.stack([x] * timing.PLANS_IN_ONE_CALL), self.raw)
            calls["plan_many"] = timing.Timed(lambda: run["plan_many"](raws))
            both = run["plan_and_forward"]
            calls["plan_and_forward"] = timing.Timed(lambda: both(q, k, v, self.raw))
        errors = self.expected.errors(**results)
        reason = self.expected.objection(errors[0])
        if reason:
            raise RuntimeError(reason)
        return calls, errors

    def time(self, mode, pairs, args, writer):
        """Runs one mode for all implementations.

        Args:
            mode: "fwd", "bwd", "tables" or "serve".
            pairs: (impl, Programs) in the order to run them.
            args: The command line's repeats and seconds.
            writer: Where the results go.
        """
        errors, calls = {}, {}
        for impl, programs in pairs:
            failed = programs.failed
            if not failed:
                try:
                    made, errors[impl] = self.calls(mode, programs, impl)
                    calls.update({(impl, label): call for label, call in made.items()})
                except Exception as error:
                    failed = str(error) if type(error) is RuntimeError else timing.one_line(error)
            if failed:
                writer.add(self.case, mode, impl, failed=failed)
        timings = timing.measure(calls, args.repeats, args.seconds)
        for impl, programs in pairs:
            if impl in errors:
                mine = {label: t for (i, label), t in timings.items() if i is impl}
                writer.add(self.case, mode, impl, **self.fields(mode, mine, programs, errors[impl]))

    def fields(self, mode, timings, programs, errors):
        """Returns what a result says beyond who and what."""
        broken = [t for t in timings.values() if isinstance(t, Exception)]
        if broken:
            return {"failed": timing.one_line(broken[0])}
        relative, absolute = ({n: float(f"{e:.3g}") for n, e in of.items()} for of in errors)
        fields = {
            "errors": relative,
            "max_abs": absolute,
            "lower_s": round(programs.lower_s, 3),
            "compile_s": round(programs.compile_s, 3),
        }
        if mode == "tables":
            ms = {label: t.as_record()["ms"] for label, t in timings.items()}
            plan = ms["plan_many"] / timing.PLANS_IN_ONE_CALL
            fields["forward_ms"] = ms["fwd"]
            fields["plan_and_forward_ms"] = ms["plan_and_forward"]
            fields["share_of_forward"] = round(plan / ms["fwd"], 4)
            return fields | {"ms": round(plan, 5)}
        record = timings[mode].as_record()
        work = suites.flops(self.case, mode)
        fields |= {"gflop": work / 1e9, "tflops": float(f"{work / record['ms'] / 1e9:.5g}")}
        if suites.is_serving(self.case) and self.case.nbytes:
            fields["tb_s"] = float(f"{self.case.nbytes / record['ms'] / 1e9:.5g}")
        return fields | record


class ServingRow(Row):
    """One case of serving."""

    def __init__(self, case):
        self.case, self.inputs = case, jax.block_until_ready(serving.make(case))
        self.expected = serving.expect(case, self.inputs)

    def calls(self, mode, programs, impl):
        """As Row's."""
        run = programs.calls
        reason = timing.too_large(run)
        if reason:
            raise RuntimeError(reason)
        data = run["prepare"](self.inputs)
        many = functools.partial(run["looped"], data) if "looped" in run else None
        timed = timing.Timed(functools.partial(run["fwd"], data), many, programs.inner)
        out = run["fwd"](data)
        if not impl.way.checked:
            return {mode: timed}, ({}, {})
        errors = serving.errors(self.case, out, self.expected)
        reason = check.objection(self.case, errors[0])
        if reason:
            raise RuntimeError(reason)
        return {mode: timed}, errors


def run_case(case, rows, args, writer):
    """Makes the inputs and the reference of one case, then runs its modes."""
    try:
        if suites.is_serving(case):
            row = ServingRow(case)
        else:
            raw = impls.raw_operands(case)
            inputs = jax.block_until_ready(check.make_inputs(case.shape))
            expected = check.Reference(case, inputs, raw, gradients="bwd" in rows)
            row = Row(case, inputs, raw, expected)
    except Exception as error:
        for mode, pairs in rows.items():
            for impl, _ in pairs:
                writer.add(case, mode, impl, failed=f"no reference: {timing.one_line(error)}")
        return
    for mode, pairs in rows.items():
        row.time(mode, pairs, args, writer)


def time_all(cases, jobs, programs, args, writer, start):
    """Runs the cases one after the other, until the budget is spent or the device lost."""
    for case in cases:
        rows = {}
        for (c, mode, impl), compiled in zip(jobs, programs, strict=True):
            if c is case:
                rows.setdefault(mode, []).append((impl, compiled))
        if time.perf_counter() - start > args.budget or (rows and device_is_lost()):
            late = time.perf_counter() - start > args.budget
            why = "not run: the budget was spent" if late else "not run: the device was lost"
            for mode, pairs in rows.items():
                for impl, _ in pairs:
                    writer.add(case, mode, impl, failed=why)
            continue
        if rows:
            run_case(case, rows, args, writer)


def main(argv=None):
    """Runs the benchmarks; returns the exit status: 1 if one of ours failed, was wrong or lost."""
    start = time.perf_counter()
    warnings.filterwarnings("ignore", message=".*Triton backend is deprecated")
    args = parse(argv)
    cases = suites.select(args.suite, args.filter)
    wanted = asked_for(args, cases)
    reasons = {impl: impl.absent() for impl in wanted}
    run = header(args)
    print(json.dumps(run), flush=True)
    for impl, reason in reasons.items():
        print(f"{impl.name:24s} {'absent: ' + reason if reason else 'here'}", flush=True)
    if args.list:
        for case in cases:
            print(f"{case.suite:10s} {case.name:32s} {suites.flops(case, 'fwd') / 1e9:.1f} GFLOP")
        return 0
    writer = Writer(args.out, run)
    for case, mode, impl in jobs_of(args, cases, [i for i in wanted if reasons[i]]):
        writer.add(case, mode, impl, quiet=True, failed=f"absent: {reasons[impl]}")
    jobs = jobs_of(args, cases, [i for i in wanted if not reasons[i]])
    refusals = {(case, impl): impl.objection(case) for case, _, impl in jobs}
    start_up([job for job in jobs if job[1] == "startup"], refusals, writer)
    jobs = [job for job in jobs if job[1] != "startup"]
    programs = compile_all(jobs, refusals, args.workers, start + args.budget * COMPILE_SHARE)
    print(f"{len(jobs)} programs compiled at {time.perf_counter() - start:.0f} s", flush=True)
    time_all(cases, jobs, programs, args, writer, start)
    print("\n" + report.tables(writer.records), flush=True)
    written = sorted({str(writer.path(case.suite)) for case in cases})
    print(f"\nat {time.perf_counter() - start:.0f} s wrote {' '.join(written)}", flush=True)
    bad = [r for r in writer.records if r["ours"] and r["failed"]]
    return int(any(not r["failed"].startswith(("absent", "unsupported")) for r in bad))


if __name__ == "__main__":
    sys.exit(main())
