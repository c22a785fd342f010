"""The engine gives each request what the naive loop gives it, whoever else is in the batch."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from flax import nnx

from models import data
from models.engine import COLUMNS, FROM_DEVICE, Engine, EngineConfig, pack
from models.gpt import GPT, AttentionConfig, GPTConfig
from models.sample import generate
from models.sampling import Draws, Sampling, draw
from models.scheduler import CANCELLED, LENGTH, STOP, Request, Scheduler, Sequence

MODEL = GPTConfig(
    layers=3,
    width=32,
    attention=AttentionConfig(
        q_heads=4, kv_heads=2, head_dim=8, window=9, window_pattern="SLC", soft_cap=4.0, sinks=True
    ),
)
# Half the pages that four sequences of full length would need.
CONFIG = EngineConfig(
    max_batch=4, max_len=128, page_size=4, num_pages=64, decode_rows=(1, 4), mixed_tokens=(8, 32),
    backend="xla",
)  # fmt: skip


@pytest.fixture(scope="module")
def network():
    model = GPT(MODEL, rngs=nnx.Rngs(3))
    # Trained weights make sharper and more varied choices than these: larger ones do too.
    model.embed[...] = 50 * model.embed[...]
    model.head[...] = 50 * model.head[...]
    for index, block in enumerate(model.blocks):
        block.attention.sinks[...] = jnp.linspace(-1.0, 1.0 + index, 4)
    return nnx.split(model, nnx.Param)


@pytest.fixture
def engine(network):
    """A fresh one; the compiled steps are shared. No page may be left in use at the end."""
    engine = Engine(*network, CONFIG)
    yield engine
    assert not engine.busy
    check_all_free(engine.scheduler)


def check_all_free(scheduler):
    allocator = scheduler.allocator
    assert allocator.num_free == allocator.num_pages
    assert not any(allocator.users(page) for page in range(allocator.num_pages))
    assert not scheduler.running
    assert not scheduler.waiting
    assert sorted(scheduler._slots) == list(range(scheduler.max_batch))


def naive(network, request):
    """What the naive loop gives; it stops at a DOC mark in any case."""
    found = generate(
        *network, np.asarray(request.prompt, np.int32), request.max_tokens, temperature=0.0,
        backend="xla",
    )  # fmt: skip
    return found.tolist()


def prompt_of(rng, length):
    return tuple(rng.integers(0, data.DOC, length).tolist())


def greedy(prompt, count):
    return Request(prompt, count, stop_tokens=frozenset({data.DOC}))


# Against the naive loop


def test_greedy_equals_the_naive_loop_whoever_comes_and_goes(engine, network):
    rng = np.random.default_rng(0)
    lengths = [(1, 20), (5, 3), (33, 40), (64, 17), (9, 1), (8, 55), (70, 50), (4, 90), (100, 28)]
    requests = [greedy(prompt_of(rng, n), count) for n, count in lengths]
    engine.warm_up()
    compiled = engine.compilations
    assert compiled == len(CONFIG.sizes) == 4
    texts, left = {}, list(requests)
    while left or engine.busy:
        if (left and engine.steps % 3 == 0) or not engine.busy:
            texts[engine.submit(left.pop(0))] = []
        for event in engine.step():
            texts[event.id] += event.tokens
    for request, text in zip(requests, texts.values(), strict=True):
        assert text == naive(network, request)
    assert len({tuple(text[:3]) for text in texts.values()}) > 3, "the texts say nothing"
    # Members, lengths and pages are data.
    assert engine.compilations == compiled


def test_requests_wait_for_pages_and_are_computed_again(engine, network):
    rng = np.random.default_rng(1)
    requests = [greedy(prompt_of(rng, 20), 108) for _ in range(6)]
    texts = engine.run(requests)
    assert engine.scheduler.preemptions > 0
    for request, text in zip(requests, texts, strict=True):
        assert text == naive(network, request)


def test_a_shared_prefix_is_stored_once(engine, network):
    rng = np.random.default_rng(2)
    begin = prompt_of(rng, 42)
    first, second = greedy(begin, 30), greedy((*begin[:41], 7), 30)
    one = engine.submit(first)
    for _ in range(4):
        engine.step()
    before = engine.scheduler.allocator.num_free
    two = engine.submit(second)
    engine.step()
    allocator = engine.scheduler.allocator
    pages = [sequence.pages for sequence in engine.scheduler.running]
    assert pages[0][:10] == pages[1][:10]
    assert [allocator.users(page) for page in pages[1]] == [2] * 10 + [1]
    assert engine.scheduler.shared_tokens == 40
    assert before - allocator.num_free <= 2  # one of the newcomer's, and perhaps a next one
    texts = {one: [], two: []}
    while engine.busy:
        for event in engine.step():
            texts[event.id] += event.tokens
    assert naive(network, first)[-len(texts[one]) :] == texts[one]
    assert naive(network, second) == texts[two]


def test_tokens_stream_one_by_one_and_cancel_ends_them(engine):
    number = engine.submit(Request((1, 2, 3), 100))
    other = engine.submit(Request((4, 5), 6))
    sizes, reasons = [], {}
    while engine.busy:
        for event in engine.step():
            reasons[event.id] = event.reason
            if event.id == number:
                sizes.append(len(event.tokens))
                if len(sizes) == 9:
                    assert engine.cancel(number).reason == CANCELLED
    assert sizes == [1] * 9
    assert reasons[other] == LENGTH
    assert engine.cancel(number) is None
    assert engine.steps < 20


def test_stops(engine, network):
    prompt = prompt_of(np.random.default_rng(3), 12)
    text = naive(network, Request(prompt, 60))
    token = text[5]
    (found,) = engine.run([Request(prompt, 60, stop_tokens=frozenset({token}))])
    assert found == text[: text.index(token)]
    run = tuple(text[6:9])
    (found,) = engine.run([Request(prompt, 60, stops=((1000,), run, (*run, 1000)))])
    first = next(i for i in range(len(text)) if tuple(text[i : i + 3]) == run)
    assert found == text[:first]


def test_what_cannot_run_is_refused(engine):
    for prompt, count, word in [((1,) * 100, 29, "max_tokens"), ((258,), 3, "prompt")]:
        with pytest.raises(ValueError, match=word):
            engine.submit(Request(prompt, count))
    for wrong in [{"prompt": ()}, {"max_tokens": 0}, {"stops": ((),)}]:
        with pytest.raises(ValueError, match="got"):
            Request(**{"prompt": (1,), **wrong})
    for wrong in [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -1}]:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)
    with pytest.raises(ValueError, match="max_len"):
        Scheduler(num_pages=4, page_size=4, max_batch=2, max_len=10, max_tokens=8)


def test_draws_do_not_depend_on_the_batch(engine):
    rng = np.random.default_rng(4)
    hot = [
        Request(prompt_of(rng, 10), 40, Sampling(1.5, top_k=50, top_p=0.9, seed=2**32 - 1 - i))
        for i in range(5)
    ]
    crowd = engine.run([*hot, *(Request(prompt_of(rng, 30), 50) for _ in range(4))])
    alone = [engine.run([request])[0] for request in hot[::2]]
    assert crowd[:5:2] == alone
    same_prompt = [Request((1, 2, 3), 20, Sampling(1.5, seed=seed)) for seed in range(3)]
    assert len({tuple(text) for text in engine.run(same_prompt)}) == 3


def test_cancels_at_any_time_leave_no_page(engine, network):
    rng = random.Random(5)
    begin = prompt_of(np.random.default_rng(5), 16)
    texts, ended, open_requests, left = {}, {}, {}, 60
    while left or engine.busy:
        if left and rng.random() < 0.4:
            request = greedy((*begin[: rng.choice((1, 9, 16))], left), rng.randint(1, 40))
            number = engine.submit(request)
            texts[number], open_requests[number], left = [], request, left - 1
        if open_requests and rng.random() < 0.1:
            number = rng.choice(list(open_requests))
            ended[number] = (open_requests.pop(number), engine.cancel(number).reason)
        for event in engine.step():
            texts[event.id] += event.tokens
            if event.reason:
                ended[event.id] = (open_requests.pop(event.id), event.reason)
    assert len(ended) == 60
    assert len({reason for _, reason in ended.values()}) >= 2
    for number in list(ended)[::6]:
        request, reason = ended[number]
        whole = naive(network, request)
        assert texts[number] == (whole[: len(texts[number])] if reason == CANCELLED else whole)


# The scheduler alone, on a device that is a few lines of Python


def next_token(tokens):
    return hash(tuple(tokens)) % 40


class Simulated(Engine):
    """An engine whose keys are the tokens themselves: a wrong page gives a wrong text."""

    def __init__(self, config):
        self.config, self.vocab_size = config, 1000
        self.scheduler = Scheduler(
            num_pages=config.pool_pages, page_size=config.page_size, max_batch=config.max_batch,
            max_len=config.max_len, max_tokens=max(config.mixed_tokens),
        )  # fmt: skip
        self._tables = np.zeros((config.max_batch + 1, config.max_pages), np.int32)
        self._pool = np.full((config.pool_pages, config.page_size), -7)
        self._last = np.full(config.max_batch + 1, -7)
        self._in_flight, self.steps = None, 0

    def _dispatch(self, size, rows):
        packed = pack(size, rows, self._tables)
        tokens, rest = np.split(packed, [size.tokens])
        columns, table = np.split(rest, [size.rows * len(COLUMNS)])
        columns, table = columns.reshape(size.rows, -1), table.reshape(size.rows, -1)
        drawn, at = np.zeros(size.rows, np.int32), 0
        for index, (slot, count, start, after) in enumerate(columns[: len(rows), :4].tolist()):
            fed = tokens[at : at + count]
            fed = np.where(fed == FROM_DEVICE, self._last[slot], fed)
            at += count
            place = np.arange(after)
            pages, offsets = (
                table[index, place // self.config.page_size],
                place % self.config.page_size,
            )
            self._pool[pages[start:], offsets[start:]] = fed
            drawn[index] = self._last[slot] = next_token(self._pool[pages, offsets].tolist())
        return drawn


@functools.cache
def expected(request):
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        token = next_token(tokens)
        if token in request.stop_tokens:
            return tokens[len(request.prompt) :], STOP
        tokens.append(token)
    return tokens[len(request.prompt) :], LENGTH


@pytest.mark.parametrize("num_pages", [17, 40, 200])
def test_thousands_of_requests_in_few_pages(num_pages):
    config = EngineConfig(
        max_batch=9, max_len=51, page_size=3, num_pages=num_pages, decode_rows=(1, 4),
        mixed_tokens=(14, 30),
    )  # fmt: skip
    engine, rng = Simulated(config), random.Random(num_pages)
    requests, texts, reasons, open_requests = {}, {}, {}, set()
    while len(requests) < 1500 or engine.busy:
        if len(requests) < 1500 and (not engine.busy or rng.random() < 0.3):
            prompt = tuple(rng.choices((1, 2), k=rng.randint(1, 8)) * rng.randint(1, 3))
            request = Request(prompt, rng.randint(1, 27), stop_tokens=frozenset({11}))
            number = engine.submit(request)
            requests[number], texts[number] = request, []
            open_requests.add(number)
        if open_requests and rng.random() < 0.06:
            number = rng.choice(sorted(open_requests))
            reasons[number] = engine.cancel(number).reason
            open_requests.remove(number)
        for event in engine.step():
            texts[event.id] += event.tokens
            if event.reason is not None:
                reasons[event.id] = event.reason
                open_requests.remove(event.id)
        assert len(engine.scheduler.running) <= 9
        # Who came first goes first, preempted or not.
        order = [s.id for s in (*engine.scheduler.running, *engine.scheduler.waiting)]
        assert order == sorted(order)
    assert reasons.keys() == requests.keys()
    for number, request in requests.items():
        whole, reason = expected(request)
        if reasons[number] == CANCELLED:
            assert texts[number] == whole[: len(texts[number])]
        else:
            assert (texts[number], reasons[number]) == (whole, reason)
    assert engine.scheduler.shared_tokens > 0
    assert (engine.scheduler.preemptions > 0) == (num_pages < 200)
    check_all_free(engine.scheduler)


TOKENS = st.integers(0, 2)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(TOKENS, min_size=1, max_size=30),
    st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
)
def test_stops_are_never_given_out(drawn, stops):
    sequence = Sequence(0, Request((0, 1, 2), len(drawn), stops=stops))
    out, reason = [], None
    for token in drawn:
        sequence.in_flight += 1
        event = sequence.take(token)
        out, reason = out + event.tokens, event.reason
        if reason:
            break
    ends = [  # (where it is complete, where it begins)
        (i + len(s), i) for s in stops for i in range(len(drawn)) if tuple(drawn[i:][: len(s)]) == s
    ]
    assert (out, reason) == ((drawn[: min(ends)[1]], STOP) if ends else (drawn, LENGTH))


# Sampling


def draws_of(count, **how):
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0} | how
    return Draws(
        jnp.full(count, how["temperature"], jnp.float32), jnp.full(count, how["top_k"], jnp.int32),
        jnp.full(count, how["top_p"], jnp.float32), jnp.full(count, how["seed"], jnp.int32),
        jnp.arange(count, dtype=jnp.int32),
    )  # fmt: skip


SHARES = np.asarray([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("how", "weights"),
    [
        ({}, SHARES),
        ({"temperature": 0.5}, SHARES**2),
        ({"temperature": 2.0, "seed": -5}, SHARES**0.5),
        ({"top_k": 2}, SHARES * [0, 1, 0, 1, 0]),
        ({"top_k": 1}, SHARES * [0, 1, 0, 0, 0]),
        ({"top_k": 99}, SHARES),
        ({"top_p": 0.6}, SHARES * [0, 1, 0, 1, 0]),  # 0.4, then 0.65
        ({"top_p": 0.7}, SHARES * [0, 1, 0, 1, 1]),
        ({"top_p": 0.01}, SHARES * [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, SHARES * [0, 1, 0, 1, 0]),  # of 0.85: 0.47, 0.76
        ({"temperature": 0.0, "top_k": 3}, SHARES * [0, 1, 0, 0, 0]),
    ],
)
def test_draws_follow_the_distribution(how, weights):
    count = 20_000
    logits = jnp.log(jnp.asarray([*SHARES, 0.0], jnp.float32))  # the last can never be drawn
    found = jax.jit(draw)(jnp.tile(logits, (count, 1)), draws_of(count, **how))
    share = np.bincount(np.asarray(found), minlength=6) / count
    want = np.append(weights / weights.sum(), 0)
    assert (share[want == 0] == 0).all()
    np.testing.assert_allclose(share, want, atol=4.5 * np.sqrt(0.25 / count))


def test_greedy_and_drawn_rows_side_by_side():
    logits = jnp.tile(jnp.asarray([[0.0, 0.0, -1.0]]), (200, 1))
    how = draws_of(200)
    how = how._replace(temperature=how.temperature.at[::2].set(0))
    found = np.asarray(draw(logits, how))
    assert (found[::2] == 0).all(), "of equals the first"
    assert set(found[1::2]) == {0, 1, 2}
    np.testing.assert_array_equal(found, draw(logits, how))
