"""Runs the tests that need a GPU in several processes at once: `python tests/gpu_tier.py`.

Most of a test's time is spent by the host, compiling, so one process leaves a card and a machine's
cores idle. The tests are dealt out to processes that share the card; those with arrays of many GiB
have one of their own. A process that says nothing for a while is ended, the test that it was at
counts as hanging, and another process takes the rest.

    python tests/gpu_tier.py --out results.txt               everything
    python tests/gpu_tier.py -k "mosaic_gpu and not window"  pytest's selection
    python tests/gpu_tier.py -k serving                      attention to a cache alone
    python tests/gpu_tier.py --limit 300 --processes 6 tests/test_gpu.py

The summary names what failed, hung or was not reached; the exit status is 0 where nothing did.
"""

import argparse
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGE = ("past_32_bits", "past_16_bits")  # in the names of tests with arrays of many GiB
PYTEST = ("-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=", "--color=no")
# A test that takes longer tells where it is, in what its process printed.
PYTEST += ("-o", "faulthandler_timeout=50")
BACKEND = re.compile(r"mosaic_gpu|triton|-deterministic")
OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
# As tests end, and once more when all have: a line of another program may tear the first kind.
DONE = re.compile(rf"^(\S+::\S+) ({OUTCOMES})\b", re.MULTILINE)
LISTED = re.compile(rf"^({OUTCOMES}) (\S+::\S+)", re.MULTILINE)
SHARE = re.compile(r"^(\w+ \w+): (\d+), error at most ([\d.]+) of allowed \((.+)\)$", re.MULTILINE)
COUNT = re.compile(r"^(.+), (\d+) cases right$", re.MULTILINE)
REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+) - (.+)$", re.MULTILINE)
REPORT = re.compile(r"^(?:mosaic_gpu|triton), .+$", re.MULTILINE)


def parse(argv):
    """Reads the command line."""
    lines = __doc__.split("\n")
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = ["tests/test_gpu.py", "tests/test_gpu_serving.py"]
    parser.add_argument("tests", nargs="*", default=files, help="files or node ids")
    parser.add_argument("-k", default="", help="pytest's selection by name")
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--limit", type=float, default=540, help="seconds for all")
    parser.add_argument("--stall", type=float, default=150, help="seconds without a result")
    parser.add_argument("--out", type=Path, help="file for the summary")
    parser.add_argument("--logs", type=Path, help="folder for what each process printed")
    return parser.parse_args(argv)


def environment(processes):
    """Returns the environment of a process that shares the card with others."""
    threads = str(max(2, (os.cpu_count() or 1) // processes))
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "GPU_TIER_THREADS": threads}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **shared, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def collect(tests, selection):
    """Returns the node ids of the selected tests.

    Raises:
        RuntimeError: With what pytest printed, if it finds none.
    """
    chosen = ("-k", selection) if selection else ()
    command = [sys.executable, *PYTEST, "--collect-only", "-q", *chosen, *tests]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}  # quicker, and finds the same
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    ids = [line for line in done.stdout.splitlines() if "::" in line and " - " not in line]
    if not ids:
        raise RuntimeError(f"no tests found:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return ids


def deal(ids, processes):
    """Returns the ids in as many lists as there are processes.

    Large tests share the first; what backends are judged by is computed once in a process, so that
    tests that differ by the backend share one too.
    """
    large = [i for i in ids if any(name in i for name in LARGE)]
    groups: dict[str, list[str]] = {}
    for i in ids:
        if i not in large:
            groups.setdefault(BACKEND.sub("", i), []).append(i)
    hands = max(1, processes - bool(large))
    dealt = [[i for group in [*groups.values()][n::hands] for i in group] for n in range(hands)]
    return [hand for hand in (large, *dealt) if hand]


@dataclass
class Worker:
    """A process with its tests.

    Attributes:
        ids: What it was given.
        log: Where it prints.
        env: Its environment.
        hung: Tests that said nothing for too long.
        texts: What processes before it printed.
    """

    ids: list[str]
    log: Path
    env: dict[str, str]
    hung: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def start(self):
        """Starts a process for what is left."""
        self.size, self.seen = 0, time.monotonic()
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *PYTEST, "-v", "--tb=short", "-rpfE", *self.left()],
                cwd=ROOT,
                env=self.env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self):
        """Returns all that was printed so far."""
        return "\n".join([*self.texts, self.log.read_text(errors="replace")])

    def outcomes(self):
        """Returns {id: outcome} of the tests that ended."""
        text = self.text()
        return dict(DONE.findall(text)) | {i: outcome for outcome, i in LISTED.findall(text)}

    def left(self):
        """Returns the ids without an outcome."""
        done = {*self.outcomes(), *self.hung} if self.log.exists() else set()
        return [i for i in self.ids if i not in done]

    def stop(self):
        """Ends the process and its children, and keeps what it printed."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def watch(self, stall):
        """Returns whether there is nothing more to wait for; ends and replaces what hangs."""
        size = self.log.stat().st_size
        if size != self.size:
            self.size, self.seen = size, time.monotonic()
        ended = self.process.poll() is not None
        if not ended and time.monotonic() - self.seen < stall:
            return False
        left = self.left()
        if not left or (ended and self.process.returncode in (0, 1, 5)):
            return ended
        self.stop()  # it hangs, or it died
        self.hung.append(left[0])
        if len(left) == 1:
            return True
        self.texts.append(self.log.read_text(errors="replace"))
        self.start()
        return False


def run(hands, args, logs):
    """Runs all; returns the Workers when they are done or the limit is reached."""
    end = time.monotonic() + args.limit
    env = environment(len(hands))
    workers = [Worker(hand, logs / f"{i}.log", env) for i, hand in enumerate(hands)]
    for worker in workers:
        worker.start()
    busy = list(workers)
    try:
        while busy and time.monotonic() < end:
            time.sleep(0.5)
            busy = [worker for worker in busy if not worker.watch(args.stall)]
    finally:
        for worker in workers:
            worker.stop()
    return workers


def _output(*command):
    """Returns what a command prints, None where it is missing or fails."""
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else None


def where():
    """Returns a line about the card, the driver and the commit."""
    ask = "--query-gpu=name,driver_version"
    card = _output("nvidia-smi", ask, "--format=csv,noheader") or "no NVIDIA GPU"
    name, _, driver = card.partition(", ")
    parts = [name, *([f"driver {driver}"] if driver else [])]
    commit = _output("git", "rev-parse", "--short", "HEAD")
    parts += [f"commit {commit}"] if commit else []
    return ", ".join([*parts, datetime.date.today().isoformat()])


def _shares(text):
    """Returns lines on the errors of all processes: how many cases, and the worst share."""
    worst, counts = {}, Counter()
    for kind, count, share, name in SHARE.findall(text):
        counts[kind] += int(count)
        worst[kind] = max(worst.get(kind, (0.0, "")), (float(share), name))
    return [
        f"{kind}: {counts[kind]} cases, error at most {share:.2f} of what the rule allows ({name})"
        for kind, (share, name) in sorted(worst.items())
    ]


def summary(workers, seconds, selection):
    """Returns the summary as text, and whether nothing failed, hung or was left."""
    text = "\n".join(worker.text() for worker in workers)
    outcomes = {i: o for worker in workers for i, o in worker.outcomes().items()}
    hung = [i for worker in workers for i in worker.hung]
    left = [i for worker in workers for i in worker.left()]
    bad = [i for i, outcome in outcomes.items() if outcome in ("FAILED", "ERROR", "XPASS")]
    counts = Counter(outcome.lower() for outcome in outcomes.values())
    counts.update({"hung or died": len(hung), "not reached": len(left)})
    shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    versions = {line.rsplit(", ", 1)[1] for line, _ in COUNT.findall(text)}
    command = f"python tests/gpu_tier.py{f' -k {selection!r}' if selection else ''}"
    lines = [
        ", ".join([where(), *sorted(versions)]) + f": {command}",
        f"{len(workers)} processes, {seconds:.0f} s: {shown or 'nothing ran'}",
        "",
        *_shares(text),
        *sorted(set(REPORT.findall(text)) - {line for line, *_ in SHARE.findall(text)}),
    ]
    reasons = dict(REASON.findall(text))
    for title, ids in (("Failed", bad), ("Hung or died", hung), ("Not reached", left)):
        if ids:
            lines += ["", f"{title}:"]
            lines += [f"- {i}{': ' + reasons[i][:400] if i in reasons else ''}" for i in ids]
    return "\n".join(lines) + "\n", not (bad or hung or left) and bool(outcomes)


def main(argv=None):
    """Runs the tests, prints and writes the summary; returns the exit status."""
    args = parse(argv)
    start = time.monotonic()
    hands = deal(collect(args.tests, args.k), args.processes)
    print(f"{sum(map(len, hands))} tests in {len(hands)} processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        args.limit -= time.monotonic() - start
        workers = run(hands, args, logs)
        text, good = summary(workers, time.monotonic() - start, args.k)
        if not good:
            for worker in workers:
                print("\n".join(worker.text().splitlines()[-40:]), flush=True)
    print("\n" + text, flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
