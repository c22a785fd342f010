"""What a body of `POST /v1/completions` asks for: checks it and makes the engine's requests."""

import dataclasses
import json
import secrets
from typing import Any

import numpy as np

from . import data
from .engine import Engine
from .sampling import Sampling
from .scheduler import Request

MAX_CHOICES = 128
MAX_STOPS = 16
# What may be sent at the value that changes nothing, since clients send it unasked.
NEUTRAL = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}
KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed"),
    *("stream", "stream_options", "echo", "user"),
}


class BadRequestError(ValueError):
    """A request that cannot be served as it is: with the field at fault."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.status = param, status


@dataclasses.dataclass(frozen=True)
class Completion:
    """One HTTP request: its choices in order, prompt by prompt.

    Attributes:
        requests: One a choice.
        echoes: What each choice's text begins with.
        prompt_tokens: Of all prompts, each counted once.
        stream: Whether the answer comes in pieces.
        include_usage: Whether its last piece counts tokens.
    """

    requests: list[Request]
    echoes: list[str]
    prompt_tokens: int
    stream: bool
    include_usage: bool

    def usage(self, tokens: int) -> dict[str, int]:
        """Counts of tokens, as the answer gives them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }


def parse(body: bytes, engine: Engine, model: str) -> Completion:
    """Reads a body.

    Args:
        body: JSON.
        engine: That is to run it; says what fits.
        model: The name of the model served.

    Returns:
        What is asked for.

    Raises:
        BadRequestError: It is no such thing, or cannot be served.
    """
    fields = _fields(body)
    if fields.get("model", model) not in (model, None):
        raise BadRequestError(f"got {fields['model']!r}, expected {model!r}", "model", status=404)
    prompts = _prompts(fields.get("prompt"), engine.vocab_size)
    copies = _integer(fields, "n", 1, 1, MAX_CHOICES)
    if copies * len(prompts) > MAX_CHOICES:
        raise BadRequestError(f"expected {MAX_CHOICES} choices in all at most", "n")
    seed = _integer(fields, "seed", secrets.randbits(32), -(2**63), 2**63 - 1) % 2**32
    how = {
        "temperature": _number(fields, "temperature", 1.0, 0, 100),
        "top_p": _number(fields, "top_p", 1.0, 0, 1),
        "top_k": max(0, _integer(fields, "top_k", 0, -1, 2**31 - 1)),  # some clients mean all by -1
    }
    if how["top_p"] == 0:
        raise BadRequestError("got 0, expected above 0", "top_p")
    common = {
        "max_tokens": _integer(fields, "max_tokens", 16, 1, 2**31 - 1),
        "stop_tokens": frozenset({data.DOC}),
        "stops": _stops(fields.get("stop")),
    }
    requests = [
        Request(prompt, sampling=Sampling(**how, seed=(seed + copy) % 2**32), **common)
        for prompt in prompts
        for copy in range(copies)
    ]
    for request in requests:
        try:
            engine.check(request)
        except ValueError as error:
            raise BadRequestError(str(error), str(error).split(":")[0]) from error
    echo = _flag(fields, "echo")
    echoes = [data.decode(np.asarray(r.prompt)) if echo else "" for r in requests]
    stream, usage = _flag(fields, "stream"), _stream_options(fields)
    return Completion(requests, echoes, sum(map(len, prompts)), stream, usage)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:  # the latter where it is nested too deeply
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequestError("the body is no JSON object")
    for name, value in fields.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise BadRequestError(f"{name} is not supported", name)
        elif name not in KNOWN:
            raise BadRequestError(f"{name}: unknown", name)
    return fields


def _prompts(given: Any, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts from a text, token ids, or a list of either."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise BadRequestError("expected a text, token ids, or a list of either", "prompt")
    if all(isinstance(part, int) for part in given):
        given = [given]
    return [_prompt(part, vocab_size) for part in given]


def _prompt(given: Any, vocab_size: int) -> tuple[int, ...]:
    if isinstance(given, str):
        return tuple(data.encode(_utf8(given, "prompt")).tolist())
    whole = isinstance(given, list) and given
    if not whole or not all(type(t) is int and 0 <= t < vocab_size for t in given):
        raise BadRequestError(
            f"expected a text, or token ids from 0 to {vocab_size - 1}, or a list of either",
            "prompt",
        )
    return tuple(given)


def _stops(given: Any) -> tuple[tuple[int, ...], ...]:
    """Stops as runs of tokens; a token is a byte, so a text's bytes are its tokens."""
    given = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(given, list) or not all(isinstance(stop, str) and stop for stop in given):
        raise BadRequestError("expected a text that is not empty, or a list of such", "stop")
    if len(given) > MAX_STOPS:
        raise BadRequestError(f"got {len(given)}, expected {MAX_STOPS} at most", "stop")
    return tuple(tuple(_utf8(stop, "stop")) for stop in given)


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
        raise BadRequestError(f"cannot be written as UTF-8: {error}", param) from error


def _stream_options(fields: dict[str, Any]) -> bool:
    """Whether usage is asked for."""
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict) or not set(options) <= {"include_usage"}:
        raise BadRequestError("expected {include_usage: bool}", "stream_options")
    return _flag(options, "include_usage")


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False) or isinstance(value, int) != isinstance(value, bool):
        raise BadRequestError(f"got {value!r}, expected true or false", name)
    return bool(value)


def _integer(fields: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise BadRequestError(f"got {value!r}, expected an integer from {low} to {high}", name)
    return value


def _number(fields: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadRequestError(f"got {value!r}, expected a number from {low} to {high}", name)
    return float(value)
