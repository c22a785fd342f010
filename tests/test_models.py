import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from flax import nnx

import pallas_attn as pa
from models import data, peer
from models.compare import train_curve
from models.gpt import (
    GPT,
    AttentionConfig,
    GPTConfig,
    layer_masks,
    matmul_params,
    plan_masks,
    summed_loss,
    train_flops,
)
from models.runs import BatchConfig, Run, RunConfig
from models.sample import generate, load
from models.train import PRESETS, override, parse, train
from models.trainer import Trainer, make_mesh

TINY = PRESETS["tiny"]
LENGTHS = (1, 5, 40, 63, 64, 65, 130, 7)


def made_up_documents(lengths=LENGTHS, seed=0) -> list[data.Document]:
    rng = np.random.default_rng(seed)
    return [
        data.Document(f"{index}.py", rng.integers(0, 256, length, np.uint8).tobytes())
        for index, length in enumerate(lengths)
    ]


def repetitive_documents() -> list[data.Document]:
    text = b"def f(x):\n    return x + 1\n" * 5
    return [data.Document(f"{index}.py", text[index:]) for index in range(40)]


def one_device():
    return make_mesh({}, jax.devices()[:1])


def assert_same_trees(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Data


def epoch_of(packed: data.PackedRows) -> data.Batch:
    batches = [packed.batch(step) for step in range(packed.epoch_rows)]
    return data.Batch(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))


@pytest.mark.parametrize("row_len", [1, 16, 64, 1000])
def test_packing_keeps_every_document_once_and_apart(row_len):
    documents = made_up_documents()
    packed = data.PackedRows(documents, row_len=row_len, rows=1)
    rows = epoch_of(packed)
    real = rows.segment_ids >= 0
    assert real.sum() == sum(1 + len(document.text) for document in documents)
    assert (rows.tokens[~real] == data.PAD).all()
    assert (rows.targets[~real] == data.NO_TARGET).all()
    assert (rows.positions[~real] == 0).all()
    assert (~real).sum() < row_len
    for tokens, targets, segments, positions in zip(*rows, strict=True):
        for segment in range(segments.max() + 1):
            (index,) = np.nonzero(segments == segment)
            np.testing.assert_array_equal(np.diff(index), 1)
            np.testing.assert_array_equal(positions[index], np.arange(len(index)))
            # The next token of this document, or the mark that ends it where another begins.
            np.testing.assert_array_equal(targets[index[:-1]], tokens[index[1:]])
            assert (tokens[index[1:]] < data.DOC).all()
            if index[-1] + 1 < row_len:
                assert targets[index[-1]] == data.DOC
    starts = int((rows.tokens == data.DOC).sum())
    assert starts == len(documents) == int((rows.targets == data.DOC).sum())


def test_whole_documents_come_back_from_a_long_row():
    documents = made_up_documents()
    batch = data.PackedRows(documents, row_len=1000, rows=1).batch(0)
    found = {
        bytes(batch.tokens[0, batch.segment_ids[0] == segment][1:].astype(np.uint8))
        for segment in range(len(documents))
    }
    assert found == {document.text for document in documents}


def test_targets_of_a_cut_document_go_on_in_the_next_row():
    text = bytes(range(100))
    batch = epoch_of(data.PackedRows([data.Document("a", text)], row_len=30, rows=1))
    order = np.argsort([row[1] for row in batch.tokens])
    targets = batch.targets[order].reshape(-1)
    np.testing.assert_array_equal(targets[:101], [*text, data.DOC])


def test_batches_depend_on_seed_and_step_alone():
    documents = made_up_documents()
    make = functools.partial(data.PackedRows, documents, row_len=32, rows=3)
    one, other, seeded = make(seed=1), make(seed=1), make(seed=2)
    order = [7, 0, 40, 3, 7]
    assert_same_trees([one.batch(i) for i in range(41)][7], other.batch(order[0]))
    for step in order:
        assert_same_trees(one.batch(step), other.batch(step))
    assert not np.array_equal(one.batch(0).tokens, seeded.batch(0).tokens)
    second_epoch = -(-one.epoch_rows // 3)
    assert not np.array_equal(one.batch(0).tokens, one.batch(second_epoch).tokens)


def test_split_is_by_name_and_disjoint():
    documents = data.read_corpus()
    train_part, held_out = data.split(documents)
    names, held_names = ({d.name for d in part} for part in (train_part, held_out))
    assert not names & held_names
    assert names | held_names == {document.name for document in documents}
    assert 0.02 < len(held_out) / len(documents) < 0.10
    assert data.split(documents[::2])[1] == [d for d in documents[::2] if d in held_out]
    skipped = {"test", "tests", "idlelib", "site-packages"}
    assert all(skipped.isdisjoint(Path(name).parts[:-1]) for name in names | held_names)


def test_read_corpus(tmp_path):
    with pytest.raises(ValueError, match="no Python source"):
        data.read_corpus(tmp_path)
    for name in ("b.py", "a/c.py", "test/d.py", "site-packages/e.py", "f.txt", "empty.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"" if name == "empty.py" else b"x\n")
    documents = data.read_corpus(tmp_path)
    assert [document.name for document in documents] == ["a/c.py", "b.py"]
    assert data.fingerprint(documents) != data.fingerprint(documents[::-1])


def test_encode_and_decode():
    text = "naïve\n"
    tokens = data.encode(text.encode())
    assert tokens[0] == data.DOC
    assert data.decode(np.append(tokens, data.PAD)) == text


# Model

FEATURES = {
    "plain": {},
    "soft_cap_and_sinks": {"soft_cap": 10.0, "sinks": True, "qk_norm": False},
    "all_long": {"window_pattern": "L"},
}


def make_model(seed=0, **attention) -> GPT:
    shape = dataclasses.replace(TINY.model.attention, **attention)
    config = dataclasses.replace(TINY.model, attention=shape)
    model = GPT(config, rngs=nnx.Rngs(seed))
    if config.attention.sinks:
        for block in model.blocks:
            block.attention.sinks[...] = jnp.asarray([0.5, -1.0, 2.0, 0.0], jnp.float32)
    return model


@functools.partial(jax.jit, static_argnames=("graphdef", "plan", "attention", "remat"))
def run_model(graphdef, params, batch, plan, attention, remat):
    model = nnx.merge(graphdef, params)
    masks = plan(model.config, batch.segment_ids)
    return model(batch.tokens, batch.positions, masks, attention=attention, remat=remat)


def logits_of(model: GPT, batch: data.Batch, plan=plan_masks, attention=pa.mha, remat="none"):
    return run_model(*nnx.split(model, nnx.Param), batch, plan, attention, remat)


@pytest.mark.parametrize("name", FEATURES)
def test_packed_documents_equal_each_document_alone(name):
    model = make_model(**FEATURES[name])
    packed = data.PackedRows(made_up_documents((30, 1, 45, 20)), row_len=110, rows=1).batch(0)
    together = np.asarray(logits_of(model, packed))[0]
    assert np.isfinite(together).all()
    for segment in range(packed.segment_ids.max() + 1):
        index = np.flatnonzero(packed.segment_ids[0] == segment)
        alone = data.Batch(*(np.full_like(array, -1) for array in packed))
        alone.tokens[:], alone.positions[:] = data.PAD, 0
        for array, source in zip(alone, packed, strict=True):
            array[0, : len(index)] = source[0, index]
        found = np.asarray(logits_of(model, alone))[0, : len(index)]
        np.testing.assert_allclose(together[index], found, atol=2e-5)


def test_window_layers_see_no_further():
    window = TINY.model.attention.window
    model = make_model(window_pattern="S")
    model.blocks = nnx.List([model.blocks[0]])
    model.config = dataclasses.replace(model.config, layers=1)
    row = data.PackedRows(made_up_documents((63,)), row_len=64, rows=1).batch(0)
    other = row._replace(tokens=row.tokens.copy())
    other.tokens[0, 10] ^= 1
    changed = np.abs(logits_of(model, row) - logits_of(model, other))[0].max(axis=-1) > 0
    np.testing.assert_array_equal(np.flatnonzero(changed), np.arange(10, 10 + window + 1))


def test_plans_equal_expressions_and_jax_nn():
    model = make_model()
    batch = data.PackedRows(made_up_documents((30, 1, 45, 20)), row_len=128, rows=1).batch(0)
    real = batch.segment_ids[0] >= 0
    assert not real.all()
    planned = np.asarray(logits_of(model, batch))[0, real]
    np.testing.assert_allclose(planned, logits_of(model, batch, layer_masks)[0, real], atol=2e-5)
    jax_nn = logits_of(model, batch, peer.dense_masks, attention=peer.attention_fn("jax_xla"))
    np.testing.assert_allclose(planned, jax_nn[0, real], atol=2e-5)
    capped = make_model(soft_cap=5.0)
    with pytest.raises(NotImplementedError, match="soft_cap"):
        logits_of(capped, batch, peer.dense_masks, attention=peer.attention_fn("jax_xla"))


def test_plain_causal_layers_know_no_documents():
    model = make_model(window_pattern="C")
    batch = data.PackedRows(made_up_documents((30, 1, 45)), row_len=100, rows=1).batch(0)
    real = batch.segment_ids[0] >= 0
    ours = logits_of(model, batch)[0, real]
    jax_nn = logits_of(model, batch, peer.dense_masks, attention=peer.attention_fn("jax_xla"))
    np.testing.assert_allclose(ours, jax_nn[0, real], atol=2e-5)
    tokens = int(real.sum())
    heads, head_dim = model.config.attention.q_heads, model.config.attention.head_dim
    pairs = model.config.layers * tokens * (tokens + 1) // 2
    expected = 6 * matmul_params(model.config) * tokens + 12 * heads * head_dim * pairs
    assert train_flops(model.config, batch.positions, batch.segment_ids) == expected


@pytest.mark.parametrize("remat", ["save_attention", "full"])
def test_remat_changes_no_gradient(remat):
    model = make_model()
    graphdef, params = nnx.split(model, nnx.Param)
    batch = data.PackedRows(made_up_documents((30, 30)), row_len=64, rows=1).batch(0)

    def loss(params, remat):
        logits = run_model(graphdef, params, batch, plan_masks, pa.mha, remat)
        return summed_loss(logits, jnp.asarray(batch.targets))[0]

    grads = {
        kind: jax.jit(jax.grad(functools.partial(loss, remat=kind)))(params)
        for kind in ("none", remat)
    }
    for plain, again in zip(*(jax.tree.leaves(g) for g in grads.values()), strict=True):
        np.testing.assert_allclose(plain, again, rtol=1e-4, atol=1e-5)


def test_loss_leaves_out_padding():
    logits = jnp.zeros((1, 3, data.VOCAB_SIZE))
    targets = jnp.asarray([[5, data.NO_TARGET, 7]])
    loss, count = summed_loss(logits, targets)
    np.testing.assert_allclose(loss, 2 * np.log(data.VOCAB_SIZE), rtol=1e-6)
    assert int(count) == 2


def test_flop_count():
    batch = data.PackedRows(made_up_documents((30, 1, 45)), row_len=100, rows=1).batch(0)
    config = TINY.model
    masks = peer.dense_masks(config, jnp.asarray(batch.segment_ids))
    pairs = sum(int(masks[config.letter(layer)].sum()) for layer in range(config.layers))
    heads, head_dim = config.attention.q_heads, config.attention.head_dim
    tokens = int((batch.segment_ids >= 0).sum())
    expected = 6 * matmul_params(config) * tokens + 12 * heads * head_dim * pairs
    assert train_flops(config, batch.positions, batch.segment_ids) == expected
    _, params = nnx.split(make_model(), nnx.Param)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    assert matmul_params(config) == weights - config.vocab_size * config.width


def test_h200_preset_has_over_100m_weights_and_8k_rows():
    config = PRESETS["h200"]
    assert matmul_params(config.model) > 100e6
    assert config.batch.row_len == 8192


def test_wrong_window_pattern():
    with pytest.raises(ValueError, match="window_pattern"):
        AttentionConfig(window_pattern="SX")


# Training


def losses_of(run: Run, key: str) -> list[float]:
    return [record[key] for record in run.read_log() if key in record]


def test_training_learns_logs_and_samples(tmp_path):
    trainer = train(TINY, tmp_path, documents=repetitive_documents(), eval_every=15)
    run = Run(tmp_path)
    losses, held_out = losses_of(run, "loss"), losses_of(run, "held_out_loss")
    assert len(losses) == TINY.optim.steps
    assert losses[0] > 5.4
    assert losses[-1] < losses[0] - 2.0
    assert len(held_out) == 3
    assert held_out[-1] < held_out[0] - 2.0
    assert all(record.get("tokens_per_s", 1) > 0 for record in run.read_log())
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert run.last_step == TINY.optim.steps
    run.close()

    graphdef, params = load(str(tmp_path))
    assert_same_trees(params, trainer.state["params"])
    draw = functools.partial(generate, graphdef, params, data.encode(b"def"), 20)
    one, other = draw(seed=3), draw(seed=3)
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, draw(seed=4))
    # Greedy text equals picking the best token of the whole sequence run again each time.
    greedy = draw(temperature=0.0)
    model, tokens = nnx.merge(graphdef, params), data.encode(b"def")
    for token in greedy[:5]:
        # The buffer's unwritten end must not count, whatever it holds.
        row = np.zeros((1, 64), np.int32)
        row[0, : len(tokens)] = tokens
        positions = np.arange(64, dtype=np.int32)[None]
        batch = data.Batch(row, row, np.zeros_like(row), positions)
        logits = logits_of(model, batch, layer_masks)
        assert int(jnp.argmax(logits[0, len(tokens) - 1])) == token
        tokens = np.append(tokens, token)


def test_resumed_run_is_bit_equal(tmp_path):
    documents = repetitive_documents()
    to = functools.partial(train, TINY, documents=documents, eval_every=3)
    whole = to(tmp_path / "whole", until=6)
    to(tmp_path / "parts", until=3)
    parts = Run(tmp_path / "parts")
    parts.log([{"step": 4, "loss": 0.0}])  # as a run leaves it that died after its checkpoint
    resumed = to(parts.folder, until=6, resume=True)
    assert resumed.step == whole.step == 6
    assert_same_trees(whole.state, resumed.state)
    for key in ("loss", "held_out_loss"):
        assert losses_of(Run(tmp_path / "whole"), key) == losses_of(parts, key)


def test_a_folder_belongs_to_one_run(tmp_path):
    run = Run(tmp_path)
    run.start(TINY, "text")
    assert run.config() == TINY
    with pytest.raises(FileExistsError, match="resume"):
        run.start(TINY, "text")
    with pytest.raises(ValueError, match=r"config\.seed 0 -> 1"):
        run.start(dataclasses.replace(TINY, seed=1), "text", resume=True)
    with pytest.raises(ValueError, match="text"):
        run.start(TINY, "another text", resume=True)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        run.restore({})
    run.close()


def test_accumulation_equals_one_batch():
    documents = repetitive_documents()
    states = []
    for accum in (1, 4):
        batch = dataclasses.replace(TINY.batch, accum=accum)
        trainer = Trainer(dataclasses.replace(TINY, batch=batch), documents, mesh=one_device())
        records = [record for group in trainer.run(2) for record in group]
        states.append((records[-1]["loss"], records[-1]["grad_norm"]))
    np.testing.assert_allclose(states[0], states[1], rtol=1e-4)


def test_train_curve_agrees_with_jax_nn():
    documents = repetitive_documents()
    ours, theirs = (
        train_curve(dataclasses.replace(TINY, attention=name), documents, mesh=one_device())
        for name in ("pallas_attn", "jax_xla")
    )
    losses = [[record["loss"] for record in curve["records"]] for curve in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=2e-3)
    assert ours["tokens_per_s"] > 0


def test_bfloat16_trains_with_every_option():
    attention = dataclasses.replace(TINY.model.attention, soft_cap=20.0, sinks=True)
    config = dataclasses.replace(
        TINY,
        model=dataclasses.replace(TINY.model, attention=attention),
        dtype="bfloat16",
        remat="save_attention",
    )
    trainer = Trainer(config, repetitive_documents(), mesh=one_device())
    losses = [record["loss"] for group in trainer.run(20) for record in group]
    assert losses[-1] < losses[0] - 1.0
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trainer.state["params"]))
    sinks = trainer.state["params"]["blocks"][0]["attention"]["sinks"][...]
    assert (np.asarray(sinks) != 0).all()


def test_wrong_splits():
    batch = BatchConfig(row_len=64, rows=8, accum=3)
    with pytest.raises(ValueError, match="rows"):
        Trainer(dataclasses.replace(TINY, batch=batch), repetitive_documents(), mesh=one_device())
    with pytest.raises(ValueError, match="mesh"):
        make_mesh({"data": 3, "fsdp": 5})
    with pytest.raises(ValueError, match="mesh"):
        make_mesh({"rows": 1})


def test_command_line():
    options, config = parse(
        ["--preset", "h200", "--layers", "3", "--no-qk-norm", "--mesh", "fsdp=1"]
    )
    assert options.out == "runs/h200"
    assert config.model.layers == 3
    assert config.model.attention.qk_norm is False
    assert config.model.width == PRESETS["h200"].model.width
    assert RunConfig.from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert override(GPTConfig(), options).layers == 3


FOUR_DEVICES = """
import json, sys
import jax
from models.train import PRESETS
from models.trainer import Trainer, make_mesh
from tests.test_models import repetitive_documents
assert len(jax.devices()) == 4
for shape in json.loads(sys.argv[1]):
    trainer = Trainer(PRESETS["tiny"], repetitive_documents(), mesh=make_mesh(shape))
    losses = [record["loss"] for group in trainer.run(3) for record in group]
    gate = trainer.state["params"]["blocks"][0]["mlp"]["gate"]
    shard = gate[...].addressable_shards[0].data.shape
    print(json.dumps({"losses": losses, "shard": shard, "held_out": trainer.held_out_loss(1)}))
"""


def test_four_devices_equal_one():
    shapes = [{"data": 4}, {"data": 1, "fsdp": 2, "heads": 2}]
    flags = "--xla_force_host_platform_device_count=4"
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-c", FOUR_DEVICES, json.dumps(shapes)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    four = [json.loads(line) for line in result.stdout.splitlines()]
    alone = Trainer(TINY, repetitive_documents(), mesh=one_device())
    losses = [record["loss"] for group in alone.run(3) for record in group]
    hidden = TINY.model.hidden
    assert [entry["shard"] for entry in four] == [[32, hidden], [16, hidden // 2]]
    for entry in four:
        np.testing.assert_allclose(entry["losses"], losses, rtol=1e-4)
        np.testing.assert_allclose(entry["held_out"], alone.held_out_loss(1), rtol=1e-4)
