"""Compares what other tools report with `ebbench show --as`, on one fake server. Not a test; run it by hand.

    python tests/benchmarks/bench_definitions.py --vllm .venv-test/bin/python --guidellm ENV/bin/python \\
        --aiperf ENV/bin/python --inference-perf ENV/bin/python --sglang .venv-test/bin/python=WHEEL_FOLDER \\
        --output reports/other-tools.md

Every tool sends the same closed loop to a fresh server that streams each token, then to one that bundles four tokens in
a message. Its own figures stand beside those that ebbench computes from a run of its own by that tool's definitions.
``--sglang`` takes a Python with transformers and aiohttp, and the folder in which SGLang's wheel was unpacked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.fakeserver.config import parse_fault
from tests.benchmarks.bench_client import _VLLM, make_tokenizer

REQUESTS, CONCURRENCY, PROMPT, OUTPUT = 64, 8, 100, 40
TTFT_MS, ITL_MS = 50.0, 20.0
LIMITS = {"ttft": 150.0, "tpot": 21.0}
SERVERS = {"each token a message": (), "four tokens a message": (parse_fault("bundle:tokens=4"),)}
SHOWN = ("median_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "mean_itl_ms", "median_itl_ms", "median_e2el_ms",
         "output_throughput", "request_throughput", "request_goodput")  # fmt: skip
Figures = Mapping[str, float | None]


def run(command: list[str], folder: Path, environ: Mapping[str, str] | None = None) -> None:
    """Run a command in ``folder``. Raises RuntimeError with the end of its output when it fails."""
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **(environ or {})}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[:3]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def ebbench(url: str, folder: Path) -> Mapping[str, Figures]:
    """ebbench's figures by the definitions of every tool."""
    entry = [sys.executable, "-c", "from ebbench.cli.main import run; run()"]
    run(
        [*entry, "run", "balanced", "--engine", url, "-n", str(REQUESTS), "-c", str(CONCURRENCY), "--source", "profile",
         "--input-len", str(PROMPT), "--output-len", str(OUTPUT), "--length-distribution", "fixed", "--lag-limit-ms",
         "500", "--quiet", "-o", "run", "--goodput", *(f"{name}:{value:g}" for name, value in LIMITS.items())],
        folder,
    )  # fmt: skip
    shown = subprocess.run(
        [*entry, "show", "run", "--as", "all", "--json"], cwd=folder, capture_output=True, check=True
    )
    (document,) = json.loads(shown.stdout)
    found: Mapping[str, Figures] = document["figures"]
    return found


def vllm(python: str, tokenizer: Path) -> Callable[[str, Path], Figures]:
    """``vllm bench serve``."""

    def measure(url: str, folder: Path) -> Figures:
        run(
            [python, "-c", _VLLM, "--backend", "openai", "--base-url", url, "--model", "fake-model", "--tokenizer",
             str(tokenizer), "--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len",
             str(OUTPUT), "--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY), "--disable-tqdm",
             "--save-result", "--result-filename", str(folder / "vllm.json"), "--percentile-metrics",
             "ttft,tpot,itl,e2el", "--goodput", *(f"{name}:{value:g}" for name, value in LIMITS.items())],
            folder,
        )  # fmt: skip
        found: Figures = json.loads((folder / "vllm.json").read_text())
        return found

    return measure


def sglang(python: str, tokenizer: Path) -> Callable[[str, Path], Figures]:
    """``sglang.benchmark.serving``; ``python``: PYTHON=FOLDER."""
    interpreter, _, wheel = python.partition("=")

    def measure(url: str, folder: Path) -> Figures:
        run(
            [interpreter, "-m", "sglang.benchmark.serving", "--backend", "vllm", "--base-url", url, "--model",
             "fake-model", "--tokenizer", str(tokenizer), "--dataset-name", "random-ids", "--random-input-len",
             str(PROMPT), "--random-output-len", str(OUTPUT), "--random-range-ratio", "1", "--num-prompts",
             str(REQUESTS), "--max-concurrency", str(CONCURRENCY), "--disable-tqdm", "--output-file",
             str(folder / "sglang.jsonl"), "--warmup-requests", "0", "--goodput",
             *(f"{name}:{value:g}" for name, value in LIMITS.items())],
            folder, {"PYTHONPATH": str(Path(wheel).absolute())},
        )  # fmt: skip
        found = json.loads((folder / "sglang.jsonl").read_text().splitlines()[-1])
        statistics = {f"{s}_e2el_ms": found.get(f"{s}_e2e_latency_ms") for s in ("mean", "median", "p99")}
        return {**found, **statistics}

    return measure


def guidellm(python: str, tokenizer: Path) -> Callable[[str, Path], Figures]:
    """``guidellm run``."""

    def measure(url: str, folder: Path) -> Figures:
        run(
            [str(Path(python).with_name("guidellm")), "run", "--disable-console", "--backend",
             f"kind=openai_http,target={url},model=fake-model,request_format=/v1/completions", "--profile",
             f"kind=concurrent,streams={CONCURRENCY}", "--constraint", f"kind=max_requests,count={REQUESTS}",
             "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--data",
             f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}", "--output",
             f"kind=json,path={folder / 'guidellm.json'}"],
            folder,
        )  # fmt: skip
        (benchmark,) = json.loads((folder / "guidellm.json").read_text())["benchmarks"]
        metrics = {name: one["successful"] for name, one in benchmark["metrics"].items() if _by_status(one)}
        names = {"ttft": ("time_to_first_token_ms", 1), "tpot": ("time_per_output_token_ms", 1),
                 "itl": ("inter_token_latency_ms", 1), "e2el": ("request_latency", 1000)}  # fmt: skip
        latencies = {
            f"{statistic}_{ours}_ms": metrics[theirs][statistic] * factor
            for ours, (theirs, factor) in names.items()
            for statistic in ("mean", "median")
        }
        rates = {"output_throughput": "output_tokens_per_second", "request_throughput": "requests_per_second"}
        return latencies | {ours: metrics[theirs]["mean"] for ours, theirs in rates.items()}

    return measure


def _by_status(metric: Any) -> bool:
    return isinstance(metric, dict) and isinstance(metric.get("successful"), dict) and "mean" in metric["successful"]


def aiperf(python: str, tokenizer: Path) -> Callable[[str, Path], Figures]:
    """``aiperf profile``, with the server's token counts."""

    def measure(url: str, folder: Path) -> Figures:
        run(
            [str(Path(python).with_name("aiperf")), "profile", "--model", "fake-model", "--url", url, "--endpoint-type",
             "completions", "--streaming", "--tokenizer", str(tokenizer), "--concurrency", str(CONCURRENCY),
             "--request-count", str(REQUESTS), "--isl", str(PROMPT), "--osl", str(OUTPUT), "--extra-inputs",
             "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none", "--no-gpu-telemetry",
             "--no-server-metrics", "--use-server-token-count", "--goodput",
             f"time_to_first_token:{LIMITS['ttft']:g} inter_token_latency:{LIMITS['tpot']:g}"],
            folder,
        )  # fmt: skip
        (export,) = folder.rglob("profile_export_aiperf.json")
        found = json.loads(export.read_text())
        names = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "e2el": "request_latency"}
        latencies = {
            f"{statistic}_{ours}_ms": found[theirs][key]
            for ours, theirs in names.items()
            for statistic, key in (("mean", "avg"), ("median", "p50"))
        }
        rates = {"output_throughput": "output_token_throughput", "request_throughput": "request_throughput",
                 "request_goodput": "goodput"}  # fmt: skip
        return latencies | {ours: found[theirs]["avg"] for ours, theirs in rates.items() if theirs in found}

    return measure


def inference_perf(python: str, tokenizer: Path) -> Callable[[str, Path], Figures]:
    """``inference-perf``, with the server's token counts."""

    def measure(url: str, folder: Path) -> Figures:
        config = {
            "api": {"type": "completion", "streaming": True},
            "data": {
                "type": "random",
                "input_distribution": {"min": PROMPT, "max": PROMPT, "mean": PROMPT, "std_dev": 0, "total_count": 200},
                "output_distribution": {"min": OUTPUT, "max": OUTPUT, "mean": OUTPUT, "std_dev": 0, "total_count": 200},
            },
            "load": {
                "type": "concurrent",
                "stages": [{"num_requests": REQUESTS, "concurrency_level": CONCURRENCY}],
                "num_workers": 1,
            },
            "server": {"type": "vllm", "model_name": "fake-model", "base_url": url, "ignore_eos": True},
            "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
            "storage": {"local_storage": {"path": str(folder / "reports")}},
            "report": {
                "request_lifecycle": {"summary": True, "per_stage": False, "per_request": False},
                "goodput": {"constraints": {name: value / 1000 for name, value in LIMITS.items()}},
            },
        }
        (folder / "config.json").write_text(json.dumps(config))
        run([str(Path(python).with_name("inference-perf")), "--config_file", str(folder / "config.json")], folder)
        found = json.loads(next(folder.rglob("*summary_lifecycle_metrics.json")).read_text())["successes"]
        names = {"ttft": "time_to_first_token", "tpot": "time_per_output_token", "itl": "inter_token_latency",
                 "e2el": "request_latency"}  # fmt: skip
        latencies = {
            f"{statistic}_{ours}_ms": found["latency"][theirs][statistic] * 1000
            for ours, theirs in names.items()
            for statistic in ("mean", "median")
        }
        rates = {"output_throughput": found["throughput"]["output_tokens_per_sec"],
                 "request_throughput": found["throughput"]["requests_per_sec"],
                 "request_goodput": found.get("goodput_metrics", {}).get("request_goodput")}  # fmt: skip
        return latencies | rates

    return measure


def _of_the_server(tokenizer: Path) -> Path:
    """The tokenizer with the fake server's only output token, `` a``, as one token of its own."""
    file = tokenizer / "tokenizer.json"
    document = json.loads(file.read_text())
    model = document["model"]
    model["vocab"]["\u0120a"] = len(model["vocab"])
    model["merges"] = [["\u0120", "a"]]
    file.write_text(json.dumps(document))
    return tokenizer


PEERS = {"vllm": vllm, "guidellm": guidellm, "aiperf": aiperf, "inference-perf": inference_perf, "sglang": sglang}


def table(tool: str, theirs: Figures, ours: Figures) -> list[str]:
    """Rows of Markdown: the tool's own figure, ebbench's by its definition, and the difference."""
    rows = []
    for name in SHOWN:
        said, computed = theirs.get(name), ours.get(name)
        if said is None or computed is None:
            continue
        difference = f"{100 * (computed / said - 1):+.1f} %" if said else "–"
        rows.append(f"| {tool} | {name} | {said:.2f} | {computed:.2f} | {difference} |")
    return rows


def main() -> None:
    """Measure every tool that is given, on both servers; print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PEERS:
        parser.add_argument(f"--{name}", help=f"Python of {name}'s environment")
    parser.add_argument("--output", type=Path, help="append the tables to this file")
    asked = vars(parser.parse_args())
    given = {name: asked[name.replace("-", "_")] for name in PEERS if asked[name.replace("-", "_")]}
    lines = []
    with tempfile.TemporaryDirectory() as tokenizer_folder:
        python = next(iter(given.values())).partition("=")[0]
        tokenizer = _of_the_server(make_tokenizer(Path(tokenizer_folder), python))
        for title, faults in SERVERS.items():
            lines += [
                "",
                f"**{title}**",
                "",
                "| tool | figure | the tool | `--as` | difference |",
                "|---|---|---|---|---|",
            ]
            config = FakeConfig(ttft_ms=TTFT_MS, itl_ms=ITL_MS, faults=faults)
            with tempfile.TemporaryDirectory() as folder, FakeServerProcess(config) as server:
                ours = ebbench(server.url, Path(folder))
            for name, path in given.items():
                measure = PEERS[name](path, tokenizer)
                try:
                    with tempfile.TemporaryDirectory() as folder, FakeServerProcess(config) as server:
                        lines += table(name, measure(server.url, Path(folder)), ours[name])
                except (RuntimeError, OSError, ValueError, KeyError, StopIteration) as error:
                    print(f"{name}: {error!r}", file=sys.stderr)
    text = "\n".join(lines) + "\n"
    print(text)
    if asked["output"]:
        with asked["output"].open("a") as sink:
            sink.write(text)


if __name__ == "__main__":
    main()
