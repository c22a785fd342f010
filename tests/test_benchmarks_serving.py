"""The serving suites of the benchmark program, on a CPU with tiny shapes."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from test_benchmarks import FAST, cells_of, made_up

from benchmarks import bars, check, impls, report, run, serving, suites

OWN = [f"ours:default:{option}" for option in serving.OWN]
NAMES = ",".join(["ours:xla", *OWN, "fa3_paged:4", "copy"])


def test_a_run_checks_and_times_every_kind(tmp_path):
    out = tmp_path / "x.jsonl"
    assert run.main(["--suite", "tiny_serving", "--impl", NAMES, "--out", str(out), *FAST]) == 0
    records = report.load([out])
    timed = {(r["shape"]["kind"], r["impl"]) for r in records if not r["failed"]}
    kinds = suites.SERVING_KINDS
    assert timed == {
        *((kind, "ours:xla") for kind in kinds),
        *((kind, "ours:default:contiguous") for kind in ("decode", "prefill")),
        *(("subset", f"ours:default:{form}") for form in ("fused", "two_stage")),
        ("decode", "copy"),
    }
    for record in records:
        if record["failed"]:
            assert record["failed"] == "absent: needs an NVIDIA GPU"
            assert (record["impl"], record["shape"]["kind"]) == ("fa3_paged:4", "decode")
            continue
        assert record["ms"] > 0
        assert ("tb_s" in record) == (record["shape"]["kind"] in ("decode", "mla"))
        assert max(record["errors"].values(), default=0.0) < 1e-4
        assert bool(record["errors"]) == (record["impl"] != "copy")
    assert "TB/s of keys and values" in report.tables(records)
    assert json.loads(out.read_text().splitlines()[0])["case"].startswith("decode tiny 0")


@pytest.mark.parametrize("case", suites.tiny_serving(), ids=lambda case: case.name)
def test_what_is_wrong_is_seen(case):
    data = serving.make(case)
    expected = serving.expect(case, data)
    out = serving.ours("xla").forward(case, data)
    errors = serving.errors(case, out, expected)
    assert check.objection(case, errors[0]) is None
    for wrong in (out.at[-1, -1].add(1.0), out[::-1], out.at[0, 0].set(jnp.nan)):
        assert "out" in check.objection(case, serving.errors(case, wrong, expected)[0])
    longer = data | {"lens": jnp.maximum(data["lens"] - 1, 1)}
    other = serving.ours("xla").forward(case, longer)
    assert check.objection(case, serving.errors(case, other, expected)[0]) is not None


def test_work_is_counted():
    rows = suites.decode()
    first, equal, varied = rows[0], *rows[-2:]
    assert first.nbytes == 64 * 8192 * 8 * 2 * 128 * 2
    assert suites.flops(first, "serve") == 4 * 128 * 32 * 64 * 8192
    assert (equal.name, varied.name) == (bars.EQUAL, bars.VARIED)
    assert 0.98 < varied.nbytes / equal.nbytes <= 1
    latent = suites.mla()[0]
    assert latent.nbytes == 32 * 8192 * 576 * 2
    assert suites.flops(latent, "serve") == 2 * (576 + 512) * 16 * 32 * 8192
    chunk = suites.prefill()[2]
    pairs = 16 * (512 * 4096 + 512 * 513 // 2)
    assert suites.flops(chunk, "serve") == 4 * 128 * 32 * pairs
    assert chunk.nbytes == 0
    assert {case.suite for case in suites.select(["serving"])} == set(suites.SERVING_KINDS)


def test_pages_are_each_others_only():
    for case in suites.decode()[-2:]:
        table = serving.table_of(case)
        used = table[table >= 0]
        assert len(set(used)) == used.size == serving.sizes(case)["k"][0][0]
        counts = [serving.pages_of(n, 64) for n in case.shape.lens]
        np.testing.assert_array_equal((table >= 0).sum(1), counts)


def served(case, impl, tflops):
    record = made_up(case, "serve", impl, tflops)
    if case.nbytes:
        record["tb_s"] = case.nbytes / record["ms"] / 1e9
    return record


def test_bars_of_serving():
    first, *_, equal, varied = suites.decode()
    chunks, lists = suites.prefill()[0], suites.subset()[0]
    records = [
        served(first, "ours", 4.0),
        served(first, "fa3_paged:1", 3.9),
        served(first, "fa3_paged:16", 4.2),
        served(first, "jax_paged:16", 2.0),
        served(first, "copy", 4.1),
        served(equal, "ours", 4.0),
        served(varied, "ours", 3.7),
        served(chunks, "ours", 500.0),
        served(chunks, "ours:default:contiguous", 550.0),
        served(lists, "ours", 300.0),
        served(lists, "ours:default:two_stage", 400.0),
        served(lists, "ours:default:fused", 300.0),
    ]
    text, met = bars.table(report.Results(records), "ours")
    assert not met
    found = {(c[0], c[1]): (c[3], c[5]) for c in cells_of(text)}
    assert found == {
        ("decode over FA3's best split", first.name): ("0.9524", "NO"),
        ("decode over jax's paged_attention", first.name): ("2", "yes"),
        ("decode over the copy rate", first.name): ("0.9756", "yes"),
        ("varied over equal lengths", varied.name): ("0.925", "yes"),
        ("prefill over contiguous", chunks.name): ("0.9091", "yes"),
        ("form chosen over the better", lists.name): ("0.75", "NO"),
    }
    peer = report.Results(records).best(first.name, "serve", report.is_peer)
    assert peer["impl"] == "fa3_paged:16"


def test_peers_refuse_what_they_cannot_take():
    wide = suites.decode()[0]
    wide = dataclasses.replace(wide, shape=dataclasses.replace(wide.shape, head_dim=64))
    assert "head_dim 128" in impls.make("fa3_paged:4").objection(wide)
    assert "do not divide" in impls.make("jax_paged:48").objection(suites.decode()[0])
    assert not impls.make("jax_paged").takes(suites.mla()[0])
    assert not impls.make("ours:triton:contiguous").takes(suites.dense()[0])
