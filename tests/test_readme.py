"""The README's code runs, its support table is the backends', its figures are in the results."""

import json
import pathlib
import re

import pytest

from pallas_attn import support

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_support_table_is_generated():
    shown = re.search(r"<!-- support.*?-->\n(.*?)\n<!-- /support -->", README, re.DOTALL)
    assert shown.group(1) == support.table()


def test_snippets_run(capsys):
    assert len(SNIPPETS) >= 2
    scope = {}
    for snippet in SNIPPETS:
        if "flax" in snippet:
            pytest.importorskip("flax", reason="the Flax snippet needs flax")
        exec(snippet, scope)
    assert "backend" in capsys.readouterr().out


COLUMNS = {
    "cuDNN": "cudnn",
    "FlashAttention-3": "fa3",
    "tokamax Mosaic": "tokamax_mosaic",
    "tokamax Triton": "tokamax_triton",
    "jax's Triton mha": "jax_triton",
}


def _speed_rows():
    """(backend, modes, column names, case, cells) of every row of the README's speed tables."""
    ours, modes, names = None, (), []
    for line in README.splitlines():
        if heading := re.match(r"(Forward / backward|Forward|Backward), `(\w+)`, \d{4}", line):
            modes = tuple({"f": "fwd", "b": "bwd"}[x[0]] for x in heading[1].lower().split(" / "))
            ours = heading[2]
        elif line.startswith("| work, "):
            names = line.strip("| ").split(" | ")[1:]
        elif row := re.match(r"\| (D\d+ .*?) \| (.*) \|$", line):
            case = re.sub(r"window (\d+)", r"window(\1,0)", row[1])
            yield ours, modes, names, case, row[2].split(" | ")


def test_measured_figures_are_in_the_results():
    records = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            if record.get("tflops"):
                impl = re.sub(r"^jax_triton:.*", "jax_triton", record["impl"])  # of any tile
                key = record["case"], record["mode"], impl
                records.setdefault(key, []).append(record["tflops"])
    rows = list(_speed_rows())
    assert {modes for _, modes, *_ in rows} == {("fwd",), ("bwd",), ("fwd", "bwd")}
    for ours, modes, names, case, cells in rows:
        assert len(names) == len(cells), (case, names, cells)
        for name, cell in zip(names, cells, strict=True):
            if name == "over the best":
                first, *peers = (float(x) for x in cells[:-1] if x != "-")
                if peers:
                    assert abs(first / max(peers) - float(cell[1:])) <= 0.01, (case, cell)
                continue
            impl = f"ours:{ours}" if name == "pallas_attn" else COLUMNS[name]
            figures = cell.split(" / ") if cell != "-" else ["-"] * len(modes)
            for mode, figure in zip(modes, figures, strict=True):
                if figure != "-":
                    near = [abs(x - float(figure)) for x in records[case, mode, impl]]
                    room = 0.5 if float(figure) >= 100 else 0.05
                    assert min(near) <= room, (case, mode, impl, figure)
