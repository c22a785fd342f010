"""The benchmark program, run whole on a CPU with tiny shapes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import bars, check, impls, report, run, startup, suites, timing

FAST = ["--repeats", "2", "--seconds", "0.002", "--workers", "2"]


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def brute_force(shape, mask):
    """The mask of one batch entry, drawn pair by pair."""
    rows, cols = np.indices((shape.q_len, shape.kv_len))
    match mask.kind:
        case "full":
            return np.ones_like(rows, bool)
        case "causal":
            return rows >= cols
        case "window":
            return (cols >= rows - mask.left) & (cols <= rows + mask.right)
        case "documents":
            ids = np.repeat(np.arange(len(mask.lengths)), mask.lengths)
            return (rows >= cols) & (ids[rows] == ids[cols])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """One run of the tiny suite: its exit status, its file, its records."""
    out = tmp_path_factory.mktemp("results")
    names = "ours:xla,ours:xla:unplanned,xla,cudnn"
    status = run.main(["--suite", "tiny", "--impl", names, "--quick", "--out", str(out), *FAST])
    (path,) = out.iterdir()
    return status, path, records_of(path)


def test_visible_pairs_are_counted_exactly():
    masks = [
        suites.FULL,
        suites.CAUSAL,
        suites.MaskSpec("window", left=5),
        suites.MaskSpec("window", left=0, right=3),
        suites.MaskSpec("window", left=100, right=100),
        suites.MaskSpec("documents", lengths=(7, 1, 12, 4)),
    ]
    shape = suites.Shape(3, 24, 24, 2, 1, 16, 8)
    for mask in masks:
        assert suites.visible_pairs(shape, mask) == 3 * brute_force(shape, mask).sum(), mask
    uneven = dataclasses.replace(shape, kv_len=17)
    for mask in masks[:5]:
        assert suites.visible_pairs(uneven, mask) == 3 * brute_force(uneven, mask).sum(), mask


def test_flops_follow_the_papers_convention():
    full, causal = (suites.Case("x", suites.Shape(2, 64, 64, 4, 4, 32, 32), m)
                    for m in (suites.FULL, suites.CAUSAL))  # fmt: skip
    assert suites.flops(full, "fwd") == 4 * 2 * 4 * 64 * 64 * 32
    assert suites.flops(full, "bwd") == 2.5 * suites.flops(full, "fwd")
    assert suites.flops(causal, "fwd") == suites.flops(full, "fwd") * 65 / 128
    split = suites.Case("x", suites.Shape(1, 64, 64, 1, 1, 192, 128), suites.FULL)
    assert suites.flops(split, "fwd") == 64 * 64 * 2 * (192 + 128)
    assert suites.flops(split, "bwd") == 64 * 64 * 2 * (3 * 192 + 2 * 128)


def test_the_documents_are_the_named_forty():
    lengths = suites.document_lengths()
    assert (len(lengths), sum(lengths), max(lengths) <= 8192) == (40, 32768, True)
    assert suites.visible_pairs(suites.documents()[1].shape, suites.DOCUMENTS) == 21_225_244


def test_suites_hold_the_grids_they_name():
    assert len(suites.dense()) == 12
    for case in suites.dense():
        s = case.shape
        assert s.batch * s.q_len == 16384
        assert s.q_heads * s.head_dim == 2048
    masks = [case.mask.label for case in suites.windows()]
    assert masks == ["causal", "window(4096,0)", "window(1024,0)"]
    both = suites.select(["windows", "documents"])
    assert len(both) == len(set(both)) == 4  # the dense causal row is timed once
    names = [case.name for case in suites.select(list(suites.SUITES))]
    # "tables" and "startup" share a row's name with "documents"
    assert len(names) == len(set(names)) + 2
    assert len(suites.select(["forward"])) == 12 + 12 + 3 + 1 + 5 + 4 + 4
    assert len(suites.select(["dense"], "D64|D256")) == 8
    with pytest.raises(ValueError, match="must be one of"):
        suites.select(["nothing"])


def test_a_run_checks_and_times_every_case(tiny):
    status, path, records = tiny
    assert status == 0
    assert path.name.startswith("cpu_")
    assert path.name.endswith("_tiny.jsonl")
    ours = [r for r in records if r["ours"]]
    assert len([r for r in ours if r["mode"] == "fwd"]) == 10
    assert len([r for r in ours if r["mode"] == "bwd"]) == 10
    assert [r["impl"] for r in ours if r["mode"] == "tables"] == ["ours:xla"]
    for record in ours:
        assert record["failed"] is None, record
        assert record["ms"] > 0
        if record["mode"] == "startup":
            continue
        assert max(record["errors"].values()) < 1e-4
        assert {"card", "started", "jax", "driver", "commit"} <= set(record["run"])
    backward = next(r for r in ours if r["mode"] == "bwd")
    assert set(backward["errors"]) == set(backward["max_abs"]) == {"out", "dq", "dk", "dv"}
    assert backward["host_us"] > 0
    assert backward["compile_s"] > 0


def test_what_cannot_run_says_why_in_one_line(tiny):
    _, _, records = tiny
    cudnn = {r["failed"] for r in records if r["impl"] == "cudnn"}
    assert cudnn == {"absent: needs an NVIDIA GPU"}
    refused = [r for r in records if r["impl"] == "xla" and r["failed"]]
    assert {r["case"] for r in refused} == {"D16/8 h4/2 2x40 causal"}
    assert all(r["failed"].startswith("unsupported: takes one dimension") for r in refused)


def fake(forward, **fields):
    return impls.Impl("fake", forward=forward, absent=lambda: None, **fields)


def good(case, q, k, v, mask):
    return impls.make("xla").forward(case, q, k, v, mask)


def test_wrong_and_failing_implementations_are_data(tmp_path, monkeypatch):
    def fails(case, q, k, v, operands):
        raise RuntimeError("no such kernel\nfor this")

    def wrong(case, q, k, v, operands):
        return good(case, q, k, v, operands) * 1.01

    def drops_the_last_head(case, q, k, v, operands):
        return good(case, q, k, v, operands).at[:, :, -1].set(jnp.nan)

    planted = {"fails": fails, "wrong": wrong, "nan": drops_the_last_head}
    for name, forward in planted.items():
        monkeypatch.setitem(impls.FACTORIES, name, lambda spec, f=forward: fake(f))
    out = tmp_path / "x.jsonl"
    names = ",".join([*planted, "xla"])
    asked = ["--suite", "tiny", "--filter", "full", "--impl", names, "--out", str(out)]
    assert run.main([*asked, *FAST]) == 0  # none of them is ours
    records = [r for r in records_of(out) if r["mode"] == "fwd"]
    reasons = [r["failed"] for r in records]
    assert sum(reason is None for reason in reasons) == 1
    reasons = sorted(reason for reason in reasons if reason)
    assert reasons[0] == "RuntimeError: no such kernel for this"
    assert all(reason.startswith("wrong: relative error of out") for reason in reasons[1:])


def test_a_wrong_gradient_is_found():
    case = suites.tiny()[1]
    inputs = check.make_inputs(case.shape)
    expected = check.Reference(case, inputs, {})
    right = {name: np.asarray(x) for name, x in expected.expected.items()}
    assert set(right) == {"out", "dq", "dk", "dv"}
    heads = {n: [x[0] if n in ("out", "dq") else x for x in right[n]] for n in right}
    swapped = {name: np.stack(x[::-1], 1)[None] for name, x in heads.items()}
    errors, _ = expected.errors(**swapped)
    assert {name: errors[name] > 0.1 for name in errors} == dict.fromkeys(right, True)
    whole = {name: np.stack(x, 1)[None] for name, x in heads.items()}
    errors, absolute = expected.errors(**whole)
    assert expected.objection(errors) is None
    assert max(absolute.values()) < 1e-6
    whole["dk"][0, 3, 1, 2] += 1.0
    errors, absolute = expected.errors(**whole)
    assert "dk" in expected.objection(errors)
    assert absolute["dk"] == pytest.approx(1.0)
    whole["dv"][0, 3, 1, 2] = np.nan
    errors, absolute = expected.errors(dv=whole["dv"])
    assert errors == absolute == {"dv": float("inf")}


def test_the_reference_agrees_with_plain_attention():
    for case in suites.tiny():
        raw = impls.raw_operands(case)
        q, k, v, dout = check.make_inputs(case.shape)
        heads = case.shape.q_heads // case.shape.kv_heads
        seen = brute_force(case.shape, case.mask)
        q0, k0, v0 = (np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v))
        s = np.where(seen, q0 @ k0.T / np.sqrt(case.shape.head_dim), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        reference = check.Reference(case, (q, k, v, dout), raw, gradients=False).expected
        assert reference["out"].shape[:2] == (2, heads)
        np.testing.assert_allclose(reference["out"][0, 0], p @ v0, atol=2e-6)


def test_measure_takes_turns_and_keeps_failures():
    order = []

    def breaks():
        raise RuntimeError("lost")

    plain = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": breaks}
    calls = {name: timing.Timed(call) for name, call in plain.items()}
    found = timing.measure(calls, repeats=30, seconds=0.0)
    assert isinstance(found["c"], RuntimeError)
    assert found["a"].calls == 1
    assert len(found["b"].repeats) == 30
    turns = "".join(order)[6:]  # after the warm-up; a loop and a dispatch each turn
    rounds = [turns[i : i + 4] for i in range(0, len(turns), 4)]
    assert len(rounds) == 30
    # By chance all alike: once in 500 million runs.
    assert set(rounds) == {"aabb", "bbaa"}
    assert timing.measure({}, repeats=3, seconds=0.0) == {}


def test_short_calls_are_timed_in_a_loop():
    counts = {"one": 0, "many": 0}

    def call(name):
        counts[name] += 1

    timed = timing.Timed(lambda: call("one"), lambda: call("many"), inner=10)
    found = timing.measure({"x": timed}, repeats=2, seconds=0.0)["x"]
    assert (found.inner, len(found.repeats), found.as_record()["calls"]) == (10, 2, 10)
    assert counts["many"] == 2 + 2  # warm-up and two rounds
    short, long = suites.short()[0], suites.dense()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert timing.inner_calls(short, "fwd") > 1
        assert timing.inner_calls(long, "fwd") == 1


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_a_loop_makes_every_call(mode):
    case, impl = suites.tiny()[1], impls.make("ours:xla")
    programs = timing.compile_programs(impl, case, mode, inner=7)
    assert programs.failed is None
    text = programs.calls["looped"].as_text()
    assert '"known_trip_count":{"n":"7"}' in text
    body = next(line for line in text.splitlines() if " while(" in line).split("body=")[1]
    body = text.split(f"\n{body.split(',')[0]} ")[1].split("\n}")[0]
    assert "dot(" in body or "call(" in body or "fusion(" in body
    q, k, v, dout = check.make_inputs(case.shape)
    given = (q, k, v, programs.calls["prepare"]({}))
    if mode == "bwd":
        given = (dout, programs.calls["vjp"](*given)[1])
    for a, b in zip(
        jax.tree.leaves(programs.calls[mode](*given)),
        jax.tree.leaves(programs.calls["looped"](*given)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_first_calls_and_other_documents(tmp_path):
    packed = dataclasses.replace(suites.tiny()[3], suite="first", modes=("startup",))
    out = tmp_path / "x.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(suites.SUITES, "first", lambda: [packed])
        asked = ["--suite", "first", "--impl", "ours:xla,xla", "--out", str(out)]
        assert run.main([*asked, *FAST]) == 0
    records = records_of(out)
    assert [r["impl"] for r in records] == ["ours:xla", "xla"]
    for record in records:
        assert record["failed"] is None, record
        assert record["compiled_again"] == 0
        assert record["first_s"] > 0
        assert record["host_us"] > 0
        assert "of the host" in report.line(record)
    with startup.Compilations() as seen:
        jax.jit(lambda x: x + 3.25)(jnp.ones(3))
    assert seen.count >= 1
    assert "first calls" in report.tables(records)


def test_budget_ends_a_run_and_says_so(tmp_path):
    out = tmp_path / "x.jsonl"
    asked = ["--suite", "tiny", "--filter", "causal", "--impl", "xla", "--out", str(out)]
    run.main([*asked, *FAST, "--budget", "0"])
    reasons = {r["failed"] for r in records_of(out)}
    assert all("budget" in reason or "unsupported" in reason for reason in reasons)


def test_unknown_names_are_refused():
    for spec in ("nothing", "cudnn:fast", "ours:xla:sometimes", "fa3:1"):
        with pytest.raises(ValueError, match=spec.split(":")[0]):
            impls.make(spec)


def test_tile_sizes_are_read_from_a_name():
    tiles = impls._tiles("128x64x8x3/64x32x4x2")
    assert (tiles.fwd.block_q, tiles.fwd.block_kv, tiles.fwd.num_warps) == (128, 64, 8)
    assert tiles.dq == tiles.dkv
    assert tiles.dkv.num_stages == 2
    assert impls.make("ours:triton:128x64x8x3:unplanned").ours
    assert impls.make("ours:triton:deterministic").ours


def made_up(case, mode, impl, tflops, started="2026-01-01T00:00:00", **fields):
    """A result as a run would write it."""
    return {
        "suite": case.suite, "case": case.name, "mode": mode, "impl": impl,
        "ours": impl.startswith("ours"), "failed": None, "errors": {"out": 1e-3},
        "shape": dataclasses.asdict(case.shape), "mask": dataclasses.asdict(case.mask),
        "ms": suites.flops(case, mode) / tflops / 1e9 if tflops else 0.02, "tflops": tflops,
        "run": {"card": "X", "started": started, "jax": "0", "driver": None, "commit": None,
                "dirty": False},
        **fields,
    }  # fmt: skip


def cells_of(text):
    return [[c.strip() for c in row.split("|")[1:-1]] for row in text.splitlines()[2:]]


def test_bars_are_read_from_results_of_one_run():
    dense = suites.dense()[4]
    causal, wide, narrow = suites.windows()
    packed = suites.documents()[1]
    rates = {dense: 400, causal: 400, wide: 330, narrow: 250, packed: 250}
    records = [made_up(case, "fwd", "ours:triton", rate) for case, rate in rates.items()]
    records.append(made_up(dense, "fwd", "jax_triton", 410))
    records.append(made_up(dense, "fwd", "jax_triton:128x64x64", 380))
    tables = suites.tables()[0]
    records.append(made_up(tables, "tables", "ours:triton", 0, share_of_forward=0.04))
    text, met = bars.table(report.Results(records), "ours:triton")
    assert not met
    assert [(c[3], c[5]) for c in cells_of(text)] == [
        ("0.9756", "NO"),
        ("0.825", "yes"),
        ("0.625", "NO"),
        ("0.625", "yes"),
        ("0.04", "yes"),
    ]
    later = made_up(wide, "fwd", "ours:triton", 399, started="2026-01-02T00:00:00")
    text, met = bars.table(report.Results([*records, later]), "ours:triton")
    row = next(row for row in text.splitlines() if "4096" in row)
    assert "| -" in row  # no dense causal row in that later run to compare with


def test_bars_of_the_hopper_kernels():
    dense = {case.name: case for case in suites.dense()}
    full = dense["D128 h16 4x4k full"]
    uneven = next(c for c in suites.odd() if c.shape.q_len == 4000 and c.mask == suites.FULL)
    long, first = suites.long()[1], suites.startup()
    ours, again = "ours:mosaic_gpu", "ours:mosaic_gpu:deterministic"
    records = [
        made_up(full, "fwd", ours, 700),
        made_up(full, "fwd", "cudnn", 640),
        made_up(full, "fwd", "tokamax_mosaic", 630),
        made_up(full, "fwd", "ours:triton", 800),
        made_up(full, "fwd", "xla", 900),  # not among those that the bar names
        made_up(uneven, "fwd", ours, 660),
        made_up(long, "fwd", ours, 700, max_abs={"out": 2e-3}),
        made_up(full, "bwd", ours, 590),
        made_up(full, "bwd", again, 480),
        made_up(full, "bwd", "fa3", 560),
        made_up(first[1], "startup", ours, 0, first_s=4.5, compiled_again=1),
    ]
    found = {tuple(c[:3]): (c[3], c[5]) for c in cells_of(bars.table(report.Results(records))[0])}
    case = full.name
    assert found == {
        ("dense over the best peer", case, "fwd"): ("1.094", "yes"),
        ("full over cuDNN", case, "fwd"): ("1.094", "yes"),
        ("uneven over even", uneven.name, "fwd"): ("0.9429", "NO"),
        ("64k: greatest error", long.name, "fwd"): ("0.002", "NO"),
        ("D128 over FA3", case, "bwd"): ("1.054", "yes"),
        ("deterministic over default", case, "bwd"): ("0.8136", "yes"),
        ("first call, s", first[1].name, "startup"): ("4.5", "yes"),
        ("compiled for other documents", first[1].name, "startup"): ("1", "NO"),
        ("the aim", case, "fwd"): ("700", "no"),
        ("the aim", case, "bwd"): ("590", "no"),
    }
    good = [r for r in records if r["suite"] == "dense"]
    assert bars.table(report.Results(good))[1]  # an aim that is missed is no bar
    assert not bars.table(report.Results(good), "ours:nothing")[1]


def test_report_prints_plots_and_compares(tiny, tmp_path, capsys):
    _, path, records = tiny
    image = tmp_path / "plot.png"
    assert report.main([str(path), "--plot", str(image)]) == 0
    text = capsys.readouterr().out
    assert "ours/best peer" in text
    assert "absent: needs an NVIDIA GPU" in text
    assert image.stat().st_size > 1000
    assert report.main([str(path), "--compare", str(path)]) == 0
    assert "ours:xla 1.000" in capsys.readouterr().out
    assert report.main([str(path), "--bars"]) == 1  # none of its rows has a bar
    assert len(report.Results(records).impls) == 4


def test_every_record_prints_as_one_line(tiny):
    for record in tiny[2]:
        assert "\n" not in report.line(record)
