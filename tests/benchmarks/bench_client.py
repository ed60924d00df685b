"""Compares the load generator with other clients on one fake server. Not a test; run it by hand on an idle machine.

    python tests/benchmarks/bench_client.py --output reports/client-bench.json \\
        --vllm .venv-test/bin/python --guidellm ENV/bin/python --aiperf ENV/bin/python

    python tests/benchmarks/bench_client.py --vllm-rs vllm/vllm-rs   # the file in vLLM's wheel for GPUs (unzip it)

Every client sends the same number of requests, Poisson arrivals at one rate, prompts of 100 tokens, outputs of a
fixed length, streamed at 50 tokens/s. Three figures:

- CPU per streamed token: user and system time of the client's whole process tree, in a run with long outputs minus
  one with short outputs, divided by the difference in tokens. Start-up, imports and work per request cancel out; a
  second column divides the long run's total time by its tokens. The time of a process that its parent does not wait
  for is missing, in favour of that client.
- CPU around: the run with short outputs less that figure times its tokens: start, plan, work per request, storage,
  analysis.
- TTFT error: the client's own TTFT from its send, less the server's from receipt to first token, request by
  request, joined by request id.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ebbench.fakeserver import FakeConfig, FakeServerProcess, LedgerEntry

TTFT_MS, TOKENS_PER_S, PROMPT_TOKENS = 50.0, 50.0, 100

_VLLM = (
    "import sys; from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "p = FlexibleArgumentParser(); add_cli_args(p); main(p.parse_args(sys.argv[1:]))"
)


@dataclass(frozen=True)
class Load:
    """What every client is asked to do."""

    requests: int
    rate: float
    output_tokens: int


@dataclass(frozen=True)
class Outcome:
    """One client's run: CPU of its process tree, tokens the server sent, TTFT in ms as the two sides saw it."""

    cpu_s: float
    tokens: int
    ttft_ms: list[float]
    server_ttft_ms: list[float]


Read = Callable[[], dict[str, float]]
Client = Callable[[str, Load, Path], tuple[list[str], Read]]


def ebbench(python: str) -> Client:
    """This project, by its command line, storage and analysis included."""

    def prepare(url: str, load: Load, folder: Path) -> tuple[list[str], Read]:
        command = [
            python, "-c", "from ebbench.__main__ import run; run()", "run", "balanced", "--engine", url,
            "-n", str(load.requests), "--scenario", "poisson", "--request-rate", str(load.rate),
            "--input-len", str(PROMPT_TOKENS), "--output-len", str(load.output_tokens),
            "--length-distribution", "fixed", "--source", "profile", "--output-dir", str(folder / "run"), "--quiet",
        ]  # fmt: skip

        def read() -> dict[str, float]:
            from ebbench.records.run import Run

            run = Run.load(folder / "run")
            ok = [r for r in run.requests.to_pylist() if r["status"] == "ok"]
            prefix = run.manifest.facts["request_id_prefix"]
            return {prefix + r["request_id"]: (r["first_token_ns"] - r["sent_ns"]) / 1e6 for r in ok}

        return command, read

    return prepare


def vllm_serve(python: str, tokenizer: Path) -> Client:
    """``vllm bench serve``; its list of TTFTs is in the order of its request numbers."""

    def prepare(url: str, load: Load, folder: Path) -> tuple[list[str], Read]:
        result = folder / "vllm.json"
        command = [
            python, "-c", _VLLM, "--backend", "openai", "--base-url", url, "--model", "fake-model",
            "--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
            "--random-output-len", str(load.output_tokens), "--num-prompts", str(load.requests),
            "--request-rate", str(load.rate), "--disable-tqdm", "--save-result", "--save-detailed",
            "--result-filename", str(result), "--request-id-prefix", "v-",
        ]  # fmt: skip

        def read() -> dict[str, float]:
            ttfts_s = json.loads(result.read_text())["ttfts"]
            return {f"v-{number}": 1000 * ttft_s for number, ttft_s in enumerate(ttfts_s)}

        return command, read

    return prepare


def vllm_rust(binary: str, tokenizer: Path) -> Client:
    """``vllm-rs bench serve``, the client in Rust inside vLLM's GPU wheel; its results have the same form."""

    def prepare(url: str, load: Load, folder: Path) -> tuple[list[str], Read]:
        command, read = vllm_serve(binary, tokenizer)(url, load, folder)
        return [binary, "bench", "serve", *command[3:]], read

    return prepare


def guidellm(python: str, tokenizer: Path) -> Client:
    """``guidellm run``; it keeps the server's id of each answer."""

    def prepare(url: str, load: Load, folder: Path) -> tuple[list[str], Read]:
        report = folder / "guidellm.json"
        command = [
            str(Path(python).with_name("guidellm")), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={url},model=fake-model,request_format=/v1/completions",
            "--profile", f"kind=poisson,rate={load.rate}",
            "--constraint", f"kind=max_requests,count={load.requests}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={load.output_tokens}",
            "--output", f"kind=json,path={report}",
        ]  # fmt: skip

        def read() -> dict[str, float]:
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
            done = benchmark["requests"]["successful"]
            return {r["response_id"]: r["time_to_first_token_ms"] for r in done}

        return command, read

    return prepare


def aiperf(python: str, tokenizer: Path) -> Client:
    """``aiperf profile``; it sends an id with each request."""

    def prepare(url: str, load: Load, folder: Path) -> tuple[list[str], Read]:
        command = [
            str(Path(python).with_name("aiperf")), "profile", "--model", "fake-model", "--url", url,
            "--endpoint-type", "completions", "--streaming", "--tokenizer", str(tokenizer),
            "--request-rate", str(load.rate), "--arrival-pattern", "poisson",
            "--request-count", str(load.requests), "--isl", str(PROMPT_TOKENS), "--osl", str(load.output_tokens),
            "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none",
            "--no-gpu-telemetry", "--no-server-metrics",
        ]  # fmt: skip

        def read() -> dict[str, float]:
            (export,) = folder.rglob("profile_export.jsonl")
            rows = [json.loads(line) for line in export.read_text().splitlines()]
            done = [r for r in rows if r.get("error") is None]
            return {r["metadata"]["x_request_id"]: r["metrics"]["time_to_first_token"]["value"] for r in done}

        return command, read

    return prepare


def measure(client: Client, load: Load, log: Path) -> Outcome:
    """Run one client against a fresh server. Raises RuntimeError with the end of its log when it fails."""
    config = FakeConfig(ttft_ms=TTFT_MS, itl_ms=1000.0 / TOKENS_PER_S)
    with tempfile.TemporaryDirectory() as name, FakeServerProcess(config) as server:
        command, read = client(server.url, load, Path(name))
        environ = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with log.open("ab") as sink:
            done = subprocess.run(command, cwd=name, env=environ, stdout=sink, stderr=sink, timeout=900, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        ledger = [entry for entry in server.ledger() if entry.max_tokens == load.output_tokens]
        try:
            seen_ms = read()
        except (OSError, ValueError, KeyError) as error:
            tail = log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {error!r}\n{tail}") from None
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    truth_ms = _server_ttft_ms(ledger)
    both = sorted(seen_ms.keys() & truth_ms.keys())
    return Outcome(cpu_s, sum(e.tokens for e in ledger), [seen_ms[k] for k in both], [truth_ms[k] for k in both])


def _server_ttft_ms(ledger: Sequence[LedgerEntry]) -> dict[str, float]:
    """From receipt to first token, by the client's id of a request and by the server's id of its answer."""
    truth_ms = {}
    for entry in ledger:
        if entry.outcome == "length":
            ttft_ms = (entry.token_ns[0] - entry.received_ns) / 1e6
            truth_ms[entry.request_id] = truth_ms[f"cmpl-{entry.number}"] = ttft_ms
    return truth_ms


@dataclass(frozen=True)
class Row:
    """The figures of one client."""

    client: str
    cpu_us_per_token: float
    cpu_us_per_token_whole: float
    cpu_around_s: float
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    completed: int
    tokens: int
    ttft_p50_ms: float
    server_ttft_p50_ms: float


def summarise(name: str, short: Outcome, long: Outcome) -> Row:
    """Slope between the two runs, and the TTFT error of the long one."""
    errors = np.array(long.ttft_ms) - np.array(long.server_ttft_ms)
    per_token_s = (long.cpu_s - short.cpu_s) / (long.tokens - short.tokens)
    return Row(
        client=name,
        cpu_us_per_token=1e6 * per_token_s,
        cpu_us_per_token_whole=1e6 * long.cpu_s / long.tokens,
        cpu_around_s=short.cpu_s - per_token_s * short.tokens,
        ttft_error_p50_ms=float(np.percentile(errors, 50)),
        ttft_error_p99_ms=float(np.percentile(errors, 99)),
        completed=len(errors),
        tokens=long.tokens,
        ttft_p50_ms=float(np.percentile(long.ttft_ms, 50)),
        server_ttft_p50_ms=float(np.percentile(long.server_ttft_ms, 50)),
    )


def make_tokenizer(folder: Path, python: str) -> Path:
    """A tokenizer of single bytes on disk, so that no peer needs to download one."""
    script = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = {c: i + 3 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
core = Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, **letters}, [], unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
fast.save_pretrained(sys.argv[1])
"""
    subprocess.run([python, "-c", script, str(folder)], check=True, capture_output=True)
    return folder


def main() -> None:
    """Parse, measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="Python with vLLM (and transformers)")
    parser.add_argument("--vllm-rs", help="the file vllm/vllm-rs of vLLM's wheel for GPUs")
    parser.add_argument("--guidellm", help="Python of guidellm's environment")
    parser.add_argument("--aiperf", help="Python of aiperf's environment")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=256, help="mean number of open streams")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a long answer")
    parser.add_argument("--rounds", type=int, default=1, help="how often each client is measured; the best is kept")
    parser.add_argument("--output", type=Path, help="write the rows as JSON here")
    parser.add_argument("--log", type=Path, default=Path("bench_client.log").absolute(), help="what the clients say")
    asked = parser.parse_args()
    for peer in ("vllm", "vllm_rs", "guidellm", "aiperf"):  # clients run in folders of their own
        if getattr(asked, peer):
            setattr(asked, peer, str(Path(getattr(asked, peer)).absolute()))
    rate = round(asked.streams / (TTFT_MS / 1000 + asked.tokens / TOKENS_PER_S), 1)
    with tempfile.TemporaryDirectory() as folder:
        clients: dict[str, Client] = {"ebbench": ebbench(sys.executable)}
        if asked.vllm or asked.vllm_rs or asked.guidellm or asked.aiperf:
            python = asked.vllm or asked.guidellm or asked.aiperf or sys.executable
            tokenizer = make_tokenizer(Path(folder), python)
        if asked.vllm:
            clients["vllm bench serve"] = vllm_serve(asked.vllm, tokenizer)
        if asked.vllm_rs:
            clients["vllm-rs bench serve"] = vllm_rust(asked.vllm_rs, tokenizer)
        if asked.guidellm:
            clients["guidellm"] = guidellm(asked.guidellm, tokenizer)
        if asked.aiperf:
            clients["aiperf"] = aiperf(asked.aiperf, tokenizer)
        rows = []
        for number in range(asked.rounds):
            for name, client in clients.items():
                try:
                    short = measure(client, Load(asked.requests, rate, 5), asked.log)
                    long = measure(client, Load(asked.requests, rate, asked.tokens), asked.log)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                rows.append(summarise(name, short, long))
                print(f"round {number + 1}:", json.dumps(asdict(rows[-1])), flush=True)
    load_average = os.getloadavg()
    if asked.output:
        facts = {"rate": rate, "requests": asked.requests, "tokens": asked.tokens, "cores": os.cpu_count()}
        document = {**facts, "load_average": load_average, "rows": [asdict(r) for r in rows]}
        asked.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
