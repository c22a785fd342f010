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


def test_measured_figures_are_in_the_results():
    records = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record.get("tflops"):
                records.setdefault((record["case"], record["mode"]), []).append(record["tflops"])
    rows = re.findall(r"^\| (D\d+ .*?) \| (.*) \|$", README, re.MULTILINE)
    assert rows
    for case, cells in rows:
        case = re.sub(r"window (\d+)", r"window(\1,0)", case)
        for cell in cells.split(" | "):
            if cell.startswith("x"):  # the first figure of the row over the best of the others
                first, *peers = (float(x) for x in cells.split(" | ")[:-1] if x != "-")
                assert abs(first / max(peers) - float(cell[1:])) <= 0.01, (case, cell)
                continue
            for mode, figure in zip(("fwd", "bwd"), cell.split(" / "), strict=False):
                if figure != "-":
                    near = [abs(x - float(figure)) for x in records[case, mode]]
                    assert min(near) <= (0.5 if float(figure) >= 100 else 0.05), (
                        case,
                        mode,
                        figure,
                    )
