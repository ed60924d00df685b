"""Hostile variants of files that ebbench reads, and a process per variant that must answer in one line.

``python -m tests.foreign.hostile --cases 2000`` tries so many of each kind (``make hostile``). A case is named by its
kind and its seed, and ``--kind logs --seed 17`` makes it again and prints the file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA = Path(__file__).resolve().parents[1] / "data"
LIMIT_S, LIMIT_BYTES = 20, 3 << 30
KINDS = ("config", "logs", "toml", "manifest", "parquet", "options")
GOOD_CODES = (0, 2, 3, 4)
_BYTES = (b"\0", b"\xff\xfe", b'"', b"[" * 300, b"\n", b",", b"1" * 5000, b"=" * 3000, b"{")
_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, int("9" * 4000), 0.5, -0.5, 1e-300, 1e300, float("inf"),
    float("-inf"), float("nan"), "", "0", "4096", "-1", "nan", "1e999", "x" * 5000, "\x1b[31m", "\n", "\0", "é",
    "../../etc/passwd", [], {}, [[]], [None], [1, "a", None], {"a": None}, {"": {}}, [1.5] * 40, [[1]] * 3,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What was tried and how it ended: ``wrong`` is empty if the command answered as it should."""

    kind: str
    seed: int
    words: tuple[str, ...]
    wrong: str


def mutated(value: Any, rng: random.Random, times: int) -> Any:
    """A copy of nested lists and objects with so many places changed."""
    for _ in range(times):
        value = _changed(value, rng)
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value[:6]):
            yield from _places(inner, (*path, place))


def _changed(value: Any, rng: random.Random) -> Any:
    path = rng.choice(list(_places(value)))
    if not path:
        return value if rng.random() < 0.9 else rng.choice(_LEAVES)
    copy = json.loads(json.dumps(value))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    key, what = path[-1], rng.random()
    if what < 0.1 and isinstance(holder, dict):
        del holder[key]
    elif what < 0.2 and isinstance(holder, dict):
        holder[rng.choice([f"{key}x", "", "a" * 300, key.upper() if isinstance(key, str) else "k"])] = holder.pop(key)
    elif what < 0.35:
        holder[key] = str(holder[key])
    elif what < 0.45:
        holder[key] = [holder[key]]
    elif what < 0.5:
        holder[key] = {"a": holder[key]}
    else:
        holder[key] = rng.choice(_LEAVES)
    return copy


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The bytes with a few of them changed, cut off, repeated or put in."""
    data = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        at, what = rng.randrange(len(data) + 1), rng.randrange(6)
        if what == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del data[at : at + rng.randrange(1, 40)]
        elif what == 2:
            data[at:at] = rng.choice(_BYTES)
        elif what == 3:
            data[at:at] = data[max(0, at - 60) : at]
        elif what == 4 and at < len(data):
            data[at] = rng.randrange(256)
        else:
            data = data[:at] if rng.random() < 0.3 else data
    return bytes(data)


def as_toml(value: Any) -> str:
    """The tables of a value as TOML; what TOML has no word for becomes a text."""
    lines = []
    for key, inner in value.items() if isinstance(value, dict) else [("value", value)]:
        lines.append(f"{json.dumps(str(key))} = {_toml(inner)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps("" if value is None else value).replace("Infinity", "inf").replace("NaN", "nan")


class Inputs:
    """Files to start from, and the command that reads each kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        root = DATA.parents[1]
        self.logs = [path for path in (*sorted((DATA / "logs").iterdir()), DATA / "azure.csv", DATA / "mooncake.jsonl")
                     if path.is_file()]  # fmt: skip
        self.workloads = [*sorted((root / "workloads").glob("*.toml"))]
        self.scenarios = [*sorted((root / "scenarios").glob("*.toml"))]
        self.profiles = [*sorted((root / "ebbench/devices/data/profiles").glob("*.toml"))]
        self.run = folder / "run"

    def make_run(self) -> None:
        """A stored run, from which manifests and tables are taken."""
        words = ["run", "balanced", "--policy", "v1", "-n", "40", "--max-concurrency", "8", "--quiet"]
        code, out = tried([*words, "--output-dir", str(self.run)], self.folder)
        assert code == 0, out

    def case(self, kind: str, rng: random.Random, folder: Path) -> list[str]:
        """Write a hostile file into ``folder``; returns the words of the command that reads it."""
        make: Callable[[random.Random, Path], list[str]] = getattr(self, f"_{kind}")
        return make(rng, folder)

    def _config(self, rng: random.Random, folder: Path) -> list[str]:
        path = folder / "config.json"
        _write_json(path, rng.choice(CONFIGS), rng)
        return ["devices", "show", "h200", "--model", str(path)]

    def _logs(self, rng: random.Random, folder: Path) -> list[str]:
        source = rng.choice(self.logs)
        path = folder / source.name
        content = source.read_bytes()
        if source.suffix in (".jsonl", ".json") and rng.random() < 0.6:
            content = _mutated_records(content, rng)
        else:
            content = damaged(content, rng)
        path.write_bytes(content)
        words = ["workloads", "show", f"log:{path}"]
        if rng.random() < 0.2:
            words = ["workloads", "fit", f"log:{path}", "--output", str(folder / "fitted.toml")]
        elif rng.random() < 0.2:
            words = ["run", f"log:{path}", "--policy", "v1", "--quiet", "--output-dir", str(folder / "out"),
                     "--scenario", "saturated", "--max-concurrency", "4", "-n", "10"]  # fmt: skip
        return words

    def _toml(self, rng: random.Random, folder: Path) -> list[str]:
        what = rng.choice(("workload", "scenario", "device", "sweep", "topology", "prices"))
        path = folder / f"{what}.toml"
        sources = {"workload": self.workloads, "scenario": self.scenarios, "device": self.profiles}
        text = rng.choice(sources[what]).read_text() if what in sources else TOML[what]
        if rng.random() < 0.7:
            content = as_toml(mutated(tomllib.loads(text), rng, rng.randrange(1, 4))).encode(errors="replace")
        else:
            content = damaged(text.encode(), rng)
        path.write_bytes(content)
        return {
            "workload": ["workloads", "show", str(path), "-n", "30", "--source", "profile"],
            "scenario": ["scenarios", "show", str(path), "--saturation-rate", "5"],
            "device": ["devices", "show", str(path), "--model", "qwen3-8b"],
            "sweep": ["sweep", str(path), "--dry-run", "--output-dir", str(folder / "out")],
            "topology": ["run", "balanced", "--policy", "v1", "-n", "8", "--max-concurrency", "4", "--quiet",
                         "--topology", str(path), "--output-dir", str(folder / "out")],
            "prices": ["plan", "balanced", "--request-rate", "2", "-n", "20", "--device", "h200", "--price", str(path)],
        }[what]  # fmt: skip

    def _copied(self, folder: Path) -> Path:
        shutil.copytree(self.run, folder / "run")
        return folder / "run"

    def _manifest(self, rng: random.Random, folder: Path) -> list[str]:
        run = self._copied(folder)
        path = run / "manifest.json"
        _write_json(path, json.loads(path.read_bytes()), rng)
        return self._reading(rng, run, folder)

    def _reading(self, rng: random.Random, run: Path, folder: Path) -> list[str]:
        return rng.choice([
            ["show", str(run)],
            ["show", str(run), "--json"],
            ["compare", str(self.run), str(run)],
            ["gate", "--baseline", str(self.run), "--candidate", str(run)],
            ["report", str(run), "--output", str(folder / "page.html")],
            ["query", "select count(*) from requests", str(run)],
            ["run", "balanced", "--policy", "v1", "-n", "8", "--max-concurrency", "4", "--output-dir", str(run)],
        ])  # fmt: skip

    def _parquet(self, rng: random.Random, folder: Path) -> list[str]:
        if rng.random() < 0.3:
            path = folder / "log.parquet"
            rows = [{"timestamp": 1.5 * i, "input_tokens": 9 + i, "output_tokens": 7, "session_id": f"s{i % 3}"}
                    for i in range(30)]  # fmt: skip
            pq.write_table(_mutated_table(pa.Table.from_pylist(rows), rng), path)
            if rng.random() < 0.7:
                path.write_bytes(damaged(path.read_bytes(), rng))
            return ["workloads", "show", f"log:{path}"]
        run = self._copied(folder)
        path = run / f"{rng.choice(('plan', 'requests', 'requests', 'steps', 'decisions'))}.parquet"
        if rng.random() < 0.5:
            path.write_bytes(damaged(path.read_bytes(), rng))
        else:
            pq.write_table(_mutated_table(pq.read_table(path), rng), path)
        return self._reading(rng, run, folder)

    def _options(self, rng: random.Random, folder: Path) -> list[str]:
        name = rng.choice(OPTIONS)
        value = rng.choice(("1e12", "1000000000000", "-1", "0", "nan", "inf", "-inf", "1e400", "9" * 5000, "", " ", "x",
                            "1,2", "ttft:1e400", "0.5", "1e-320", "٣", "1_6", "[" * 5000, "a=" * 5000))  # fmt: skip
        return ["run", "balanced", "--policy", "v1", "-n", "8", "--max-concurrency", "4", "--quiet", "--output-dir",
                str(folder / "out"), name, value]  # fmt: skip


def _write_json(path: Path, value: Any, rng: random.Random) -> None:
    if rng.random() < 0.8:
        path.write_text(json.dumps(mutated(value, rng, rng.randrange(1, 4))))
    else:
        path.write_bytes(damaged(json.dumps(value).encode(), rng))


def _mutated_records(content: bytes, rng: random.Random) -> bytes:
    lines = content.decode().splitlines()
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError:
        return json.dumps(mutated(json.loads(content), rng, rng.randrange(1, 4))).encode()
    at = rng.randrange(len(rows))
    rows[at] = mutated(rows[at], rng, rng.randrange(1, 4))
    return "\n".join(map(json.dumps, rows)).encode()


def _mutated_table(table: pa.Table, rng: random.Random) -> pa.Table:
    """The table with a column that has other values, another type, no values, twice its name, or is gone."""
    names = table.column_names
    place, what = rng.randrange(len(names)), rng.randrange(7)
    column, rows = table.column(place), max(1, table.num_rows)
    name = names[place]
    if what == 0:
        return table.remove_column(place)
    if what == 1:
        return table.append_column(name, column)
    if what == 2:
        return table.set_column(place, name, pa.nulls(table.num_rows, column.type))
    values = column.to_pylist() or [None]
    if what == 3:
        values[rng.randrange(len(values))] = None
    elif what == 4 and pa.types.is_integer(column.type):
        extreme = rng.choice((-1, 0, 2**31 - 1, -(2**31)) if column.type == pa.int32() else (-(2**63), 2**63 - 1, -1))
        values[rng.randrange(len(values))] = extreme
    elif what == 5:
        return table.set_column(place, name, pa.array([str(value) for value in values][: table.num_rows], pa.string()))
    else:
        return table.slice(0, rng.randrange(rows))
    return table.set_column(place, name, pa.array(values[: table.num_rows], column.type))


CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
     "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
     "sliding_window": None, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
     "original_max_position_embeddings": 32768}, "torch_dtype": "bfloat16", "tie_word_embeddings": False},
    {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
     "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
     "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
     "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["x"]}},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
     "intermediate_size": 10240, "sliding_window": 1024, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
     "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}, "vision_config": {"hidden_size": 1152}},
    {"model_type": "llama4", "text_config": {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
     "num_key_value_heads": 8, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "vocab_size": 202048,
     "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "moe_layers": [0, 1, 2]}},
)  # fmt: skip
TOML = {
    "sweep": 'name = "s"\nworkload = "balanced"\nrepeats = 2\n[common]\nnum_prompts = 20\nmax_concurrency = 8\n'
             '[grid]\npolicy = ["v1", "eb"]\nmax_num_seqs = [8, 16]\n',
    "topology": "[topology]\nreplicas = 2\n",
    "prices": 'currency = "USD"\nas_of = "2026-11-01"\n[gpu_hour]\nh200 = 3.5\n',
}  # fmt: skip
OPTIONS = (
    "--repeats", "--max-repeats", "--num-prompts", "--max-concurrency", "--max-num-seqs", "--max-num-batched-tokens",
    "--seed", "--input-len", "--output-len", "--request-rate", "--burstiness", "--duration", "--max-model-len",
    "--goodput", "--prefix-share", "--prefix-groups", "--think-time", "--workers", "--length-distribution",
    "--thinking-len", "--speed", "--gpu-memory-utilization", "--rate-scale", "--images", "--sub-agents",
)  # fmt: skip


def tried(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """Exit code (-N: ended by signal N) and stderr of a command, in a fork with little time and memory."""
    errors = folder / "stderr"
    child = os.fork()
    if not child:
        _run_and_exit(words, errors)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), errors.read_text(errors="replace")


def _run_and_exit(words: Sequence[str], errors: Path) -> None:
    code = 70
    try:
        descriptor, null = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(descriptor, 2)
        if words[0] != "report":  # whose JavaScript engine reserves addresses by the terabyte
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        from ebbench.cli.main import app

        sys.stdout = os.fdopen(null, "w", encoding="utf-8")
        sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", buffering=1)
        app(list(words), prog_name="ebbench")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 70
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wrong_with(code: int, errors: str) -> str:
    """What is wrong with how a command ended; empty if it succeeded, or was refused in one line."""
    lines = errors.strip().splitlines()
    if code < 0:
        return f"ended by {signal.Signals(-code).name}" + (" (out of time)" if code == -signal.SIGALRM else "")
    if "Traceback" in errors:
        return lines[-1][:160]
    if code not in GOOD_CODES and not (code in (1, 5) and not any(line.startswith("error: ") for line in lines)):
        return f"exit code {code}: {errors[-160:]}"
    if code not in (0, 1, 5) and sum(line.startswith("error: ") for line in lines) != 1:
        return f"exit code {code} with {len(lines)} lines: {errors[-160:]!r}"
    if code not in (0, 1, 5) and len(lines[-1]) > 3000:
        return f"a line of {len(lines[-1]):,} characters"
    return ""


def try_case(inputs: Inputs, kind: str, seed: int, *, keep: bool = False) -> Case:
    """Make a case from its seed and try it."""
    rng = random.Random(f"{kind}-{seed}")
    folder = Path(tempfile.mkdtemp(dir=inputs.folder))
    words = inputs.case(kind, rng, folder)
    code, errors = tried(words, folder)
    if keep:
        print(f"files: {folder}\nebbench {' '.join(words)}\nexit code {code}\n{errors}")
    else:
        shutil.rmtree(folder)
    return Case(kind, seed, tuple(words), wrong_with(code, errors))


def wrong_cases(kind: str, seeds: Sequence[int], folder: Path, seconds: float = float("inf")) -> list[Case]:
    """The cases of these seeds that end as they should not."""
    inputs, began = Inputs(folder), time.monotonic()
    _import_all()
    if kind in ("manifest", "parquet"):
        inputs.make_run()
    return [
        case for seed in seeds
        if time.monotonic() - began < seconds and (case := try_case(inputs, kind, seed)).wrong
    ]  # fmt: skip


def _import_all() -> None:
    """Import what commands import when they are called, so that not every case does."""
    from ebbench.cli.main import load_command

    for name in ("run", "show", "compare", "gate", "report", "query", "workloads", "devices", "sweep", "plan"):
        load_command(name)
    for name in ("ebbench.runs.execute", "ebbench.engines.sim", "ebbench.workloads", "ebbench.devices",
                 "ebbench.analysis", "ebbench.devices.model_config", "ebbench.runs.pool",
                 "ebbench.run_policies", "ebbench.workloads.trace", "ebbench.render.tables", "rich.table",
                 "ebbench.analysis.paired", "ebbench.sizing.drive", "ebbench.workloads.fit_log",
                 "jinja2", "pyarrow.compute", "pyarrow.dataset", "pydantic.type_adapter", "pymannkendall",
                 "scipy.stats", "yaml"):  # fmt: skip
        importlib.import_module(name)
    importlib.import_module("ebbench.report.page").specs(("v1",))
    gc.freeze()  # no case searches what all share for garbage


def main() -> int:
    """Try many cases, print those that end as they should not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    if given.seed is not None:
        folder = Path(tempfile.mkdtemp())
        inputs = Inputs(folder)
        inputs.make_run()
        print(try_case(inputs, given.kind[0], given.seed, keep=True).wrong or "as it should be")
        return 0
    count = 0
    for kind in given.kind or KINDS:
        with tempfile.TemporaryDirectory() as place:
            wrong = wrong_cases(kind, range(given.first, given.first + given.cases), Path(place))
        for case in wrong:
            print(f"--kind {case.kind} --seed {case.seed}: {case.wrong}   [{' '.join(case.words)[:100]}]", flush=True)
        print(f"{kind}: {len(wrong)} of {given.cases} wrong", flush=True)
        count += len(wrong)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
