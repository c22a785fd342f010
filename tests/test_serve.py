"""The completions endpoint, over HTTP on loopback, on a checkpoint."""

import contextlib
import http.client
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

import uvicorn
from flax import nnx

from models import data
from models.gpt import GPT
from models.runs import Run
from models.sample import generate
from models.serve import Server, Worker, make_server, parse_options
from models.train import PRESETS


@contextlib.contextmanager
def serving(server):
    """Runs a server in a thread, on a free port; gives the port."""
    config = uvicorn.Config(server.app(), port=0, log_level="warning", ws="none")
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run)
    thread.start()
    while not web.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield web.servers[0].sockets[0].getsockname()[1]
    finally:
        web.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def network():
    """Weights that give varied texts; trained ones would, and cost minutes."""
    model = GPT(PRESETS["tiny"].model, rngs=nnx.Rngs(1))
    model.embed[...] = 50 * model.embed[...]
    model.head[...] = 50 * model.head[...]
    return nnx.split(model, nnx.Param)


@pytest.fixture(scope="module")
def server(network, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("runs") / "small")
    run.start(PRESETS["tiny"], "text")
    run.save(1, {"params": network[1]})
    run.close()
    arguments = "--max-batch 4 --max-len 512 --page-size 16 --chunk 100 --backend xla"
    return make_server(parse_options([str(run.folder), *arguments.split()]))


@pytest.fixture(scope="module")
def port(server):
    with serving(server) as port:
        yield port
    allocator = server.worker.engine.scheduler.allocator
    assert allocator.num_free == allocator.num_pages


@contextlib.contextmanager
def requested(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body)
        yield connection.getresponse()
    finally:
        connection.close()


def post(port, body):
    """Gives the status and the answer."""
    body = body if isinstance(body, bytes) else json.dumps(body)
    with requested(port, "POST", "/v1/completions", body) as answer:
        return answer.status, json.loads(answer.read())


def streamed(port, body):
    """Gives the parsed events of a stream."""
    body = json.dumps(body | {"stream": True})
    with requested(port, "POST", "/v1/completions", body) as answer:
        assert answer.status == 200
        assert answer.getheader("content-type").startswith("text/event-stream")
        lines = answer.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def naive(network, prompt, count):
    tokens = generate(*network, data.encode(prompt.encode()), count, temperature=0.0, backend="xla")
    return data.decode(tokens), "length" if len(tokens) == count else "stop"


def test_text_comes_back(port, network, server):
    body = {"model": "small", "prompt": "def f(x):", "max_tokens": 40, "temperature": 0}
    status, answer = post(port, body)
    assert status == 200
    text, reason = naive(network, body["prompt"], 40)
    assert len(text) > 3
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    assert answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == 1 + len(body["prompt"])
    assert answer["usage"]["total_tokens"] == 10 + answer["usage"]["completion_tokens"]
    assert server.worker.engine.compilations == len(server.worker.engine.config.sizes)


def test_a_stream_is_the_same_text_in_pieces(port, network):
    body = {"prompt": "import", "max_tokens": 50, "temperature": 0}
    events = streamed(port, body | {"stream_options": {"include_usage": True}})
    *pieces, last = events
    text, reason = naive(network, "import", 50)
    assert "".join(event["choices"][0]["text"] for event in pieces) == text
    reasons = [event["choices"][0]["finish_reason"] for event in pieces]
    assert reasons == [None] * (len(pieces) - 1) + [reason]
    assert len(pieces) > len(text) / 2
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] <= 50
    assert len({event["id"] for event in events}) == 1


def test_several_prompts_and_choices_at_once(port, network):
    prompts = ["a", "class A:", data.encode(b"x = ").tolist(), "ü"]
    body = {"prompt": prompts, "max_tokens": 12, "n": 2, "temperature": 0, "echo": True}
    status, answer = post(port, body)
    assert status == 200
    texts = [choice["text"] for choice in answer["choices"]]
    want = [p + naive(network, p, 12)[0] for p in ("a", "class A:", "x = ", "ü")]
    assert texts == [text for text in want for _ in range(2)]
    events = streamed(port, body)
    for index, text in enumerate(texts):
        pieces = [c["text"] for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(pieces) == text


def test_sampling_and_stops(port, network):
    body = {"prompt": "x", "max_tokens": 30, "temperature": 1.2, "top_p": 0.95, "seed": 7, "n": 3}
    texts = [[c["text"] for c in post(port, body)[1]["choices"]] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    text, _ = naive(network, "x", 30)
    stop = next(c for c in text[4:] if ord(c) < 128)
    body = {"prompt": "x", "max_tokens": 30, "temperature": 0, "stop": ["\0nowhere", stop]}
    (choice,) = post(port, body)[1]["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"\xff", None),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, 258]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a" * 600}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 511}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2.0}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "n": 1000}, "n"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"prompt": "a", "seed": 0.5}, "seed"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stream_options": [1]}, "stream_options"),
        ({"prompt": "a", "logprobs": 3}, "logprobs"),
        ({"prompt": "a", "colour": "red"}, "colour"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b"[" * 200_000, None),
    ],
)
def test_bad_requests_are_told_why(port, body, param):
    status, answer = post(port, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert answer["error"]["message"]


def test_other_models_paths_and_methods(port):
    assert post(port, {"prompt": "a", "model": "other"})[0] == 404
    assert post(port, b" " * (5 * 2**20))[0] == 413
    for method, path, status in [
        ("GET", "/v1/models", 200), ("GET", "/health", 200), ("GET", "/v1/completions", 405),
        ("POST", "/v1/nothing", 404),
    ]:  # fmt: skip
        with requested(port, method, path) as answer:
            assert answer.status == status
            if path == "/v1/models":
                assert json.loads(answer.read())["data"][0]["id"] == "small"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels(port, server, stream):
    scheduler, engine = server.worker.engine.scheduler, server.worker.engine
    body = {"prompt": "a", "max_tokens": 500, "n": 8, "stream": stream, "stop": None}
    slow, before = threading.Event(), engine.step
    engine.step = lambda: slow.wait(0.05) or before()
    try:
        with requested_early(port, body) as connection:
            until(lambda: len(scheduler.running) == 4 and len(scheduler.waiting) == 4)
            if stream:
                assert connection.recv(10)
        until(lambda: not scheduler.busy)
    finally:
        engine.step = before
    assert engine.scheduler.allocator.num_free == engine.scheduler.allocator.num_pages


@contextlib.contextmanager
def requested_early(port, body):
    """Sends a request and gives the socket, without waiting for an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        yield connection.sock
    finally:
        connection.close()


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Broken:
    """An engine whose device fails."""

    vocab_size, busy = 258, False
    scheduler = SimpleNamespace(running=[], waiting=[])

    def check(self, request):
        pass

    def submit(self, request):
        self.busy = True
        return 0

    def step(self):
        raise RuntimeError("the device is gone")


def test_a_fault_of_the_device_is_told():
    with serving(Server(Worker(Broken()), "broken")) as port:
        for _ in range(2):
            status, answer = post(port, {"prompt": "a"})
            assert (status, answer["error"]["message"]) == (500, "the device is gone")
        with requested(port, "GET", "/health") as answer:
            assert answer.status == 503
        body = json.dumps({"prompt": "a", "stream": True})
        with requested(port, "POST", "/v1/completions", body) as answer:
            assert "the device is gone" in answer.read().decode()


def test_prompts_of_tokens_may_hold_marks(port):
    tokens = [data.DOC, *np.frombuffer(b"abc", np.uint8).tolist(), data.DOC, 97]
    status, answer = post(port, {"prompt": tokens, "max_tokens": 3, "temperature": 0})
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 6
