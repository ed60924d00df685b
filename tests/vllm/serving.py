"""A mix of all kinds of requests, a client that sends them, and ``ebbench serve`` to answer them.

Priorities, guided JSON, several answers per prompt, log-probabilities of answers and of prompts, stop strings, shortest
lengths, echo, chat and completions, streamed and whole, clients that leave; a KV cache too small for all of them.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.processes.process_tree import assert_gone, descendants, wait_until
from tests.vllm.whole_command import begin

REQUESTS, CLIENTS = 320, 24
H200 = ("--device", "h200", "--device-model", "qwen3-8b")
STARTED_S, ANSWERED_S, ENDED_S = 540.0, 300.0, 60.0
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 12, 123]}, "name": {"enum": ["oak", "elm", "ash"]}},
    "required": ["size", "name"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Sent:
    """One request. ``leaves``: its client closes the connection after the first piece of the streamed answer."""

    path: str
    body: dict[str, Any]
    leaves: bool = False

    @property
    def answers(self) -> int:
        """Number of answers it asks for."""
        return int(self.body.get("n", 1))


@dataclass
class Answer:
    """What came back, per choice: text, finish reason, log-probabilities by their place in the JSON; token counts.

    Log-probabilities are kept per place, since a streamed answer may come in any number of pieces.
    """

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def take(self, piece: dict[str, Any]) -> None:
        """Add a whole response, or one event of a streamed one."""
        for choice in piece["choices"]:
            index = choice["index"]
            part = choice.get("message") or choice.get("delta") or choice
            self.texts[index] = self.texts.get(index, "") + str(part.get("text") or part.get("content") or "")
            of_prompt = choice.get("prompt_logprobs") or piece.get("prompt_logprobs")
            for place, number in _numbers({"answer": choice.get("logprobs"), "prompt": of_prompt}, str(index)):
                self.logprobs.setdefault(place, []).append(number)
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]
        if usage := piece.get("usage"):
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _numbers(part: Any, place: str) -> Iterator[tuple[str, float]]:
    """All floats below, each with the keys that lead to it."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from _numbers(value, f"{place}/{key}")
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _numbers(value, place)
    elif isinstance(part, float):
        yield place, part


def requests() -> list[Sent]:
    """The mix, the same every time; a third of the prompts begin alike."""
    dice = random.Random(7)
    shared = "".join(dice.choice("abcdefgh ") for _ in range(150))
    found = []
    for number in range(REQUESTS):
        own = "".join(dice.choice("abcdefghijklmnop ") for _ in range(dice.randint(5, 200)))
        prompt = shared + own if number % 3 == 0 else own
        found.append(_request(dice, number, prompt))
    return found


def _request(dice: random.Random, number: int, prompt: str) -> Sent:
    leaves, chat, kind = number % 12 == 11, number % 5 == 4, number % 8
    body: dict[str, Any] = {
        "max_tokens": dice.randint(1, 48), "temperature": 0.0, "priority": dice.randint(0, 2), "ignore_eos": True,
        "stream": leaves or dice.random() < 0.4,
    }  # fmt: skip
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    if leaves:
        body["max_tokens"] = 60
    elif kind == 1:
        body |= {"max_tokens": 80, "ignore_eos": False}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    elif kind == 2:
        # The most likely token, as several answers exclude temperature 0. A seed would kill vLLM's CPU worker (0.32).
        body |= {"n": 2, "temperature": 1.0, "top_k": 1}
    elif kind == 3:
        body |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    elif kind == 4 and not body["stream"]:
        body |= {"prompt_logprobs": 2}
    elif kind == 5:
        body |= {"stop": ["e", "qu"], "min_tokens": min(4, body["max_tokens"])}
    elif kind == 6 and not chat:
        body |= {"echo": True}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return Sent("/v1/chat/completions" if chat else "/v1/completions", body, leaves)


def client(timeout_s: float = ANSWERED_S) -> httpx.Client:
    """For many requests: making a client takes 25 ms of CPU, as long as a model of this size takes to answer."""
    return httpx.Client(timeout=timeout_s, limits=httpx.Limits(max_connections=None))


def healthy(http: httpx.Client, url: str) -> bool:
    """Whether a server answers there."""
    try:
        return http.get(url + "/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def answered(http: httpx.Client, url: str, sent: Sent) -> Answer:
    """Send a request and read its answer, or the first piece of it."""
    answer, body = Answer(), sent.body | {"model": "small"}
    if not sent.body["stream"]:
        reply = http.post(url + sent.path, json=body)
        assert reply.status_code == 200, reply.text
        answer.take(reply.json())
        return answer
    with http.stream("POST", url + sent.path, json=body) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                answer.take(json.loads(line[6:]))
                if sent.leaves:
                    break
    return answer


def all_answered(url: str) -> list[Answer]:
    """The answers of the whole mix, CLIENTS requests at a time. Requests that failed are named all at once."""
    with client() as http, concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        pending = [pool.submit(answered, http, url, sent) for sent in requests()]
        concurrent.futures.wait(pending)
        errors = {number: error for number, one in enumerate(pending) if (error := one.exception()) is not None}
        assert not errors, f"{len(errors)} requests failed, the server answers: {healthy(http, url)}; {errors!r:.4000}"
        return [one.result() for one in pending]


def samples(url: str) -> dict[str, float]:
    """vLLM's metrics by name, added up over labels; those of finished requests by their reason."""
    found: dict[str, float] = {}
    text = httpx.get(url + "/metrics", timeout=30.0).text
    for name, labels, value in re.findall(r"^(vllm\S+?)\{(.*)\} (\S+)$", text, re.MULTILINE):
        reason = re.search(r'finished_reason="(\w+)"', labels)
        key = f"{name} {reason[1]}" if reason else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


@contextmanager
def server(
    model: Path, policy: str, log: Path, *options: str, log_level: str = "INFO", costs: Sequence[str] = H200
) -> Iterator[str]:
    """``ebbench serve`` on the CPU; its URL. ``options`` are vLLM's; ``costs``: where the policy's step times are from.

    Its processes must all end with it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_LOGGING_LEVEL": log_level, "VLLM_LOG_STATS_INTERVAL": "1"}
    command = [
        "serve", str(model), "--policy", policy, *costs, "--port", str(port), "--", "--enforce-eager",
        "--max-model-len", "512",
        "--max-num-seqs", "12", "--max-num-batched-tokens", "128", "--dtype", "float32", "--served-model-name", "small",
        # Or a model with random weights would write blanks between the parts of its JSON for ever.
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}', *options,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = begin(command, environment, output, output, Path.cwd())
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        return healthy(http, url)

    below = descendants(process.pid)
    try:
        with client() as http:
            wait_until(ready, "the server did not come up", STARTED_S)
        below = descendants(process.pid)
        yield url
    except Exception as error:
        error.add_note(f"the server's log ends with:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(ENDED_S)
    assert_gone(below)
