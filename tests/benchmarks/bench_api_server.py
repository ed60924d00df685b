"""Measures the CPU time of vLLM's API server on this machine, per streamed token, request and prompt token.

    python tests/benchmarks/bench_api_server.py [--model FOLDER] [--seconds 20] [--chat] [--client] [--write FILE.toml]

Runs a real ``vllm serve`` (completions, or chat with ``--chat``; streamed, one API server) on the emulated device in
real time: the engine computes nothing and no GPU is needed. The CPU time is the operating system's count for the
process, main thread and other threads separately, so other processes do not change it. Four loads:

- short prompts, one output token: the cost of a request;
- long prompts, one output token: the cost of a prompt token;
- short prompts, long outputs, rate far below saturation: the cost of a streamed token in its own message;
- the same at saturation: tokens per message and messages per second.

``--client`` adds 1,000 requests at once from the client of ``vllm bench serve`` and prints the CPU time of both sides.
``--write`` stores the costs as a file for ``ebbench run --api-server FILE.toml``. Without ``--model`` a tokenizer is
trained on the project's own documents (byte-level BPE). Prints figures, tests nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ebbench.engines.machine import machine_name
from ebbench.engines.vllm import server_environment
from ebbench.engines.vllm_command import Emulation, Serving, executable_line
from ebbench.engines.vllm_server import ServerProcess, free_port
from ebbench.spec.server import EngineOptions
from vllm_eb.policy import parse_policy

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MARK = b"data: "
READY_S = 600.0
SHORT, LONG = 16, 1016  # prompt tokens


@dataclass(frozen=True)
class Load:
    """``streams`` concurrent clients, each sending ``requests`` requests one at a time."""

    name: str
    streams: int
    requests: int
    prompt_tokens: int
    answer_tokens: int
    chat: bool = False

    @property
    def total(self) -> int:
        """Total number of requests."""
        return self.streams * self.requests


@dataclass(frozen=True)
class Measured:
    """CPU seconds of the main thread and of the others, wall seconds, and the messages that arrived."""

    load: Load
    main_s: float
    others_s: float
    wall_s: float
    messages: int

    @property
    def cpu_s(self) -> float:
        """Of all threads."""
        return self.main_s + self.others_s

    @property
    def tokens(self) -> int:
        """Streamed tokens."""
        return self.load.total * self.load.answer_tokens


class Answer(asyncio.Protocol):
    """Counts the messages of one streamed answer."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        self._request, self._done, self._messages, self._end = request, done, 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count, also a mark that was cut in two."""
        self._messages += (self._end[-(len(MARK) - 1) :] + data).count(MARK)
        self._end = (self._end + data)[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        """The server closes the connection after the last message."""
        if not self._done.done():
            if b"[DONE]" in self._end:
                self._done.set_result(self._messages - 1)  # without [DONE] itself
            else:
                self._done.set_exception(error or RuntimeError(f"no [DONE] at the end: {self._end!r}"))


def request_bytes(load: Load, port: int, model: str, prompt: str) -> bytes:
    """An HTTP/1.1 request after which the server closes."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    body = json.dumps(
        {"model": model, **asked, "max_tokens": load.answer_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST {path_of(load.chat)} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def path_of(chat: bool) -> str:
    """The server's path for completions or chat."""
    return "/v1/chat/completions" if chat else "/v1/completions"


async def send_load(load: Load, port: int, model: str, prompt: str) -> int:
    """Run the load; returns the messages received."""
    loop, request = asyncio.get_running_loop(), request_bytes(load, port, model, prompt)

    async def stream() -> int:
        found = 0
        for _ in range(load.requests):
            done: asyncio.Future[int] = loop.create_future()
            await loop.create_connection(lambda done=done: Answer(request, done), "127.0.0.1", port)  # type: ignore[misc]
            found += await done
        return found

    return sum(await asyncio.gather(*(stream() for _ in range(load.streams))))


def threads_s(pid: int) -> dict[int, float]:
    """CPU seconds of every thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[int(task.name)] = (int(fields[11]) + int(fields[12])) * TICK_S
    return found


def measure(load: Load, pid: int, port: int, model: str, prompt: str) -> Measured:
    """The load, with the CPU time of process ``pid`` while it runs."""
    before, start_s = threads_s(pid), time.perf_counter()
    messages = asyncio.run(send_load(load, port, model, prompt))
    wall_s = time.perf_counter() - start_s
    after = threads_s(pid)
    spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    return Measured(load, spent.pop(pid), sum(spent.values()), wall_s, messages)


def measure_client(load: Load, pid: int, port: int, model: str, prompt: str) -> str:
    """All requests of the load at once from the client of ``vllm bench serve``: one line with the CPU time of both."""
    import aiohttp
    from vllm.benchmarks.lib import endpoint_request_func as client

    send = client.async_request_openai_chat_completions if load.chat else client.async_request_openai_completions
    url = f"http://127.0.0.1:{port}{path_of(load.chat)}"

    async def burst() -> int:
        one = client.RequestFuncInput(prompt, url, load.prompt_tokens, load.answer_tokens, model, ignore_eos=True)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            answers = await asyncio.gather(*(send(one, session) for _ in range(load.total)))
        return sum(answer.success for answer in answers)

    before, start_s = sum(threads_s(pid).values()), time.process_time()
    answered = asyncio.run(burst())
    client_s, server_s = time.process_time() - start_s, sum(threads_s(pid).values()) - before
    tokens = load.total * load.answer_tokens
    each = (
        f"{name} {spent / load.total * 1e3:.2f} ms per request, {spent / tokens * 1e6:.0f} us per token"
        for name, spent in (("client", client_s), ("server", server_s))
    )
    return f"{answered} of {load.total} requests with {load.answer_tokens} tokens at once: {'; '.join(each)}"


def api_server_pid(group: int) -> int:
    """The process of a server's group that listens for clients: the one named ``vllm serve``'s main."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        if int(fields[2]) != group:
            continue
        pid = int(stat.parent.name)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"serve" in words and b"--port" in words and b"-m" in words and int(fields[1]) != 1 and _listens(pid):
            return pid
    raise RuntimeError("no API server found in the process group")


def _listens(pid: int) -> bool:
    """Whether it holds a listening TCP socket."""
    listening = {
        fields[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if (fields := line.split())[3] == "0A"
    }
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in listening:
            return True
    return False


def tokenizer_model(folder: Path) -> None:
    """A model folder whose tokenizer is a byte-level BPE, trained on the project's documents; no weights."""
    from tokenizers import ByteLevelBPETokenizer

    docs = sorted(str(path) for path in (Path(__file__).parents[2] / "docs").glob("*.md"))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(docs, vocab_size=8000, special_tokens=["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for one in messages %}{{ one.role + ': ' + one.content + '\\n' }}{% endfor %}"
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
        "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 8000,
        "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def prompt_of(model: Path, tokens: int) -> str:
    """Text of about so many tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = " ".join(path.read_text() for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))[:4])
    return str(tokenizer.decode(tokenizer.encode(text).ids[:tokens]))


def serve_and_measure(
    model: Path, loads: Sequence[tuple[Load, float]], seconds: float, bursts: Sequence[Load] = ()
) -> list[Measured]:
    """Measure the loads, each on a server whose device runs at its slow motion, and on the first one bursts from vLLM's
    client."""
    found: list[Measured] = []
    for slow_motion in dict.fromkeys(slow for _, slow in loads):
        port = free_port()
        serving = Serving(
            str(model), parse_policy("v1"), port=port, max_model_len=4096,
            options=EngineOptions(max_num_seqs=512, enable_prefix_caching=False),
            emulation=Emulation("h200", "qwen3-8b", slow_motion), extra=("--uvicorn-log-level", "warning"),
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="ebbench-api-server-") as folder:
            log = Path(folder) / "server.log"
            url = f"http://127.0.0.1:{port}"
            with ServerProcess(executable_line(serving), url, log, server_environment()) as server:
                server.wait_ready(READY_S, lambda _: None)
                pid = api_server_pid(server.group)
                warm = Load("warm-up", 16, 4, SHORT, 16, loads[0][0].chat)
                measure(warm, pid, port, str(model), prompt_of(model, SHORT))
                for load, slow in loads:
                    if slow != slow_motion:
                        continue
                    idle = threads_s(pid)
                    time.sleep(min(seconds / 10, 2.0))
                    resting_s = sum(threads_s(pid).values()) - sum(idle.values())
                    found.append(measure(load, pid, port, str(model), prompt_of(model, load.prompt_tokens)))
                    show(found[-1], resting_s)
                for burst in bursts if slow_motion == loads[0][1] else ():
                    text = prompt_of(model, burst.prompt_tokens)
                    print(measure_client(burst, pid, port, str(model), text), flush=True)
    return found


def show(one: Measured, resting_s: float) -> None:
    """One line per load."""
    load = one.load
    print(
        f"{load.name:28} {load.total:6} requests {one.tokens:8} tokens {one.messages:8} messages in {one.wall_s:6.1f} s"
        f"  main {one.main_s:6.2f} s  other threads {one.others_s:6.2f} s  (before, at rest: {resting_s:.2f} s)",
        flush=True,
    )


def main() -> None:
    """Measure, print, and store if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with config.json and tokenizer.json")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load, about")
    parser.add_argument("--chat", action="store_true", help="chat instead of completions")
    parser.add_argument("--client", action="store_true", help="measure the client of vllm bench serve as well")
    parser.add_argument("--write", type=Path, help="store the costs as a TOML file")
    args = parser.parse_args()
    rounds = max(1, round(args.seconds / 4))
    loads = [
        (Load("requests", 8, 40 * rounds, SHORT, 1), 1.0),
        (Load("prompt tokens", 8, 20 * rounds, LONG, 1), 1.0),
        (Load("streamed tokens", 32, 1 * rounds, SHORT, 128), 6.0),
        (Load("as fast as the engine", 256, 1, SHORT, 512), 0.2),
    ]
    loads = [(replace(load, chat=args.chat), slow) for load, slow in loads]
    bursts = [Load("burst", 1000, 1, 128, answer, args.chat) for answer in (4, 100)] if args.client else []
    with tempfile.TemporaryDirectory(prefix="ebbench-tokenizer-") as folder:
        model = args.model or Path(folder)
        if args.model is None:
            tokenizer_model(model)
        requests, prompts, tokens, fast = serve_and_measure(model, loads, args.seconds, bursts)
    # One answer token is part of a request here; its cost is taken off once the token's is known.
    request_us = requests.cpu_s / requests.load.total * 1e6
    prompt_us = (prompts.cpu_s / prompts.load.total * 1e6 - request_us) / (LONG - SHORT)
    token_us = (tokens.cpu_s / tokens.load.total * 1e6 - request_us) / (tokens.load.answer_tokens - 1)
    request_us -= token_us + SHORT * prompt_us
    print(f"machine: {machine_name()}")
    print(f"streamed token {token_us:.0f} us, request {request_us:.0f} us ({request_us / token_us:.0f} tokens' worth),")
    print(f"prompt token {prompt_us:.2f} us ({prompt_us / token_us:.3f} tokens' worth)")
    print(
        f"as fast as the engine: {fast.tokens / fast.wall_s:,.0f} tokens/s in {fast.messages / fast.wall_s:,.0f} "
        f"messages/s of {fast.tokens / fast.messages:.2f} tokens; {fast.cpu_s / fast.messages * 1e6:.0f} us of CPU per "
        f"message, {fast.cpu_s / fast.tokens * 1e6:.0f} us per token, {fast.cpu_s / fast.wall_s:.0%} of a core"
    )
    if args.write is not None:
        args.write.write_text(
            f"token_us = {token_us:.1f}\nrequest_us = {request_us:.0f}\nprompt_token_us = {prompt_us:.3f}\n"
            f'source = "measured by tests/benchmarks/bench_api_server.py on {machine_name()}"\n'
        )


if __name__ == "__main__":
    main()
