"""An OpenAI-style completions server: `python -m models.serve runs/cpu`.

    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "def ", "max_tokens": 60}'

`POST /v1/completions` with or without `"stream": true`, `GET /v1/models`, `GET /health`. The
engine runs in a thread of its own; requests and cancels go to it through a queue, and tokens come
back to the event loop of the web server (Starlette on uvicorn). A client that goes away cancels
its requests.
"""

import argparse
import asyncio
import codecs
import contextlib
import functools
import json
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from . import data
from .completions import BadRequestError, Completion, parse
from .engine import Engine, EngineConfig
from .sample import load
from .scheduler import Event, Request

MAX_BODY = 4 * 2**20  # bytes

Sink = Callable[[int, Event | Exception], None]  # takes a choice's index and its news


class Worker:
    """Runs an engine in a thread; `submit` and `cancel` may be called from any other."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.error: Exception | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[int, Callable[[Event | Exception], None]] = {}
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; requests that have not ended are dropped."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, requests: list[Request], sink: Sink) -> list[int]:
        """Queues requests; `sink` is called in the engine's thread.

        Returns:
            Their numbers, to which the engine's thread adds: filled once it takes them.
        """
        numbers: list[int] = []

        def add() -> None:
            for index, request in enumerate(requests):
                if self.error is not None:
                    sink(index, self.error)
                    continue
                try:
                    number = self.engine.submit(request)
                except ValueError as error:
                    sink(index, error)
                else:
                    self._sinks[number] = functools.partial(sink, index)
                    numbers.append(number)

        self._inbox.put(add)
        return numbers

    def cancel(self, numbers: list[int]) -> None:
        """Ends requests that have not ended."""

        def drop() -> None:
            for number in numbers:
                if self._sinks.pop(number, None) is not None:
                    self.engine.cancel(number)

        self._inbox.put(drop)

    def _work(self) -> None:
        while (commands := self._commands()) is not None:
            try:
                for command in commands:
                    command()
                if self.error is None:
                    self._step()
            except Exception as error:  # a fault of the device must reach those who wait
                self.error = error
                for sink in self._sinks.values():
                    sink(error)
                self._sinks.clear()

    def _commands(self) -> list[Callable[[], None]] | None:
        """All that has come, waiting for it where there is nothing else to do; None to end."""
        found: list[Callable[[], None]] = []
        block = self.error is not None or not self.engine.busy
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get(block=block and not found)
                if command is None:
                    return None
                found.append(command)
        return found

    def _step(self) -> None:
        for event in self.engine.step():
            sink = self._sinks.get(event.id)
            if event.reason is not None:
                self._sinks.pop(event.id, None)
            if sink is not None:
                sink(event)


class Choices:
    """The texts of one HTTP request, as they come."""

    def __init__(self, worker: Worker, requests: list[Request]):
        self._worker, self._requests = worker, requests
        self._news: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def _sink(self, index: int, news: Event | Exception) -> None:
        # The loop is closed where the server was stopped in the middle.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, news))

    async def texts(self) -> AsyncGenerator[tuple[int, str, int, str | None]]:
        """Submits, and gives (choice, text, how many tokens, reason) until all have ended."""
        make = codecs.getincrementaldecoder("utf-8")
        decoders = [make(errors="replace") for _ in self._requests]
        open_choices = set(range(len(self._requests)))
        numbers = self._worker.submit(self._requests, self._sink)
        try:
            while open_choices:
                index, news = await self._news.get()
                if isinstance(news, Exception):
                    raise news
                # A character is given out once all its bytes are there.
                text = decoders[index].decode(
                    bytes(token for token in news.tokens if token < data.DOC),
                    final=news.reason is not None,
                )
                if news.reason is not None:
                    open_choices.remove(index)
                yield index, text, len(news.tokens), news.reason
        finally:
            if open_choices:
                self._worker.cancel(numbers)


class Server:
    """The endpoints of one model."""

    def __init__(self, worker: Worker, name: str):
        self.worker, self.name = worker, name

    def app(self) -> Starlette:
        """The ASGI application; the worker runs while it does."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None]:
            self.worker.start()
            yield
            self.worker.stop()

        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def health(self, _: HTTPRequest) -> Response:
        """200 while the engine runs."""
        error = self.worker.error
        if error is not None:
            return failure(503, f"the engine stopped: {error}", "server_error")
        scheduler = self.worker.engine.scheduler
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    async def models(self, _: HTTPRequest) -> Response:
        """The one model that is served."""
        model = {"id": self.name, "object": "model", "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, http: HTTPRequest) -> Response:
        """Goes on from prompts."""
        try:
            body = await read_body(http)
            completion = parse(body, self.worker.engine, self.name)
        except BadRequestError as error:
            return failure(error.status, str(error), "invalid_request_error", error.param)
        choices = Choices(self.worker, completion.requests)
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        if completion.stream:
            parts = stream(choices, completion, head)
            return StreamingResponse(parts, media_type="text/event-stream")
        gone = asyncio.ensure_future(disconnected(http))
        whole = asyncio.ensure_future(collect(choices, completion, head))
        try:
            await asyncio.wait({gone, whole}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                return Response(status_code=499)  # nobody is there to read it
        finally:
            gone.cancel()
            whole.cancel()
        if whole.exception() is not None:
            return failure(500, str(whole.exception()), "server_error")
        return JSONResponse(whole.result())


async def collect(choices: Choices, completion: Completion, head: dict) -> dict[str, Any]:
    """The whole answer at once."""
    texts, reasons, tokens = list(completion.echoes), [""] * len(completion.echoes), 0
    async with contextlib.aclosing(choices.texts()) as parts:
        async for index, text, count, reason in parts:
            texts[index] += text
            tokens += count
            reasons[index] = reason or ""
    found = [
        {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
    ]
    return head | {"choices": found, "usage": completion.usage(tokens)}


async def stream(choices: Choices, completion: Completion, head: dict) -> AsyncIterator[str]:
    """The answer in server-sent events, one for each piece of text."""

    def event(content: dict[str, Any]) -> str:
        return f"data: {json.dumps(content)}\n\n"

    def piece(index: int, text: str, reason: str | None) -> str:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        return event(head | {"choices": [choice]})

    tokens = 0
    for index, text in enumerate(completion.echoes):
        if text:
            yield piece(index, text, None)
    try:
        async with contextlib.aclosing(choices.texts()) as parts:
            async for index, text, count, reason in parts:
                tokens += count
                if text or reason is not None:
                    yield piece(index, text, reason)
    except Exception as error:  # the status is sent already
        yield event({"error": {"message": str(error), "type": "server_error"}})
        return
    if completion.include_usage:
        yield event(head | {"choices": [], "usage": completion.usage(tokens)})
    yield "data: [DONE]\n\n"


async def read_body(http: HTTPRequest) -> bytes:
    """The request's body, up to a limit."""
    body = b""
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise BadRequestError(f"got more than {MAX_BODY} bytes", status=413)
    return body


async def disconnected(http: HTTPRequest) -> None:
    """Ends when the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def failure(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    """An error as OpenAI's clients expect it."""
    error = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": error}, status_code=status)


def make_server(options: argparse.Namespace) -> Server:
    """The server that the command line asks for, with all that it runs compiled."""
    config = EngineConfig(
        max_batch=options.max_batch,
        max_len=options.max_len,
        page_size=options.page_size,
        num_pages=options.pages,
        decode_rows=tuple(4**power for power in range(8)),
        mixed_tokens=(options.max_batch + 64, options.max_batch + options.chunk),
        backend=options.backend,
    )
    engine = Engine(*load(options.folder, options.dtype), config)
    engine.warm_up()
    return Server(Worker(engine), Path(options.folder).absolute().name)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="of a run of models.train")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=16, help="requests that run at once")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens, prompt included")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of prompts in a step")
    parser.add_argument("--page-size", type=int, default=32, help="tokens of a page")
    parser.add_argument("--pages", type=int, default=0, help="0 for as many as may be needed")
    parser.add_argument("--dtype", help="to compute in; as trained by default")
    parser.add_argument("--backend", help="of pallas_attn")
    return parser.parse_args(arguments)


def main() -> None:
    """The command line."""
    options = parse_options()
    app = make_server(options).app()
    uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
