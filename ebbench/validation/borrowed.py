"""Measure on a GPU that is borrowed for minutes: a machine with Python and torch, without vLLM and without a network.

``python -m ebbench.validation.borrowed pack``, where there is a network, installs vLLM and ebbench into a tree, leaves
out what a Llama or Qwen decoder on a Hopper GPU does not load, and cuts its archive into parcels of bounded size.
``python3 PARCELS/borrowed.py measure``, on the machine, takes the parcels over as they arrive; with the last one it
unpacks them and runs ``ebbench validate`` until the time is up. It needs the standard library alone: ebbench is inside
the parcels.

``python3 borrowed.py steps`` needs no parcels: it builds a decoder with random weights from torch alone and measures
its prefill, decode and mixed steps, from which ``ebbench calibrate --steps`` makes a calibration.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

CONTENTS = "parcels.json"
CHECKOUT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

LEFT_OUT = (
    # The machine has torch and what belongs to it.
    "torch", "triton",
    # Kernels of other models, quantizations and GPUs; FlashAttention 3 and torch.compile serve a decoder without them.
    "flashinfer-python", "flashinfer-cubin", "tilelang", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "quack-kernels",
    "tokenspeed-mla", "humming-kernels", "fastsafetensors", "numba", "nvtx",
    # Sound, video and the APIs of others.
    "torchaudio", "torchcodec", "pynvvideocodec", "opencv-python-headless", "anthropic", "mcp",
    # Commands of ebbench other than validate.
    "datasets", "duckdb", "altair", "vl-convert-python", "pymannkendall",
)  # fmt: skip
"""Distributions that are not packed, nor what only they need. What vLLM 0.25.1 loads for a Qwen3 decoder was seen by
starting it up to its first CUDA call; torchvision is loaded by a warm-up of every model."""

REMOVED = (
    "bin", "**/*.a", "pyarrow/include", "pyarrow/*flight*", "mistral_common/data", "pycountry/locales",
    "vllm/vllm-rs", "vllm/_moe_C*", "vllm/_qutlass_C*", "vllm/_flashmla*", "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100", "vllm/vllm_flash_attn/_vllm_fa2_C*",
)  # fmt: skip
"""Files that are removed from the packed distributions: kernels of experts, MLA, FP4 and of Ampere and Ada
(FlashAttention 2), the Rust server, static libraries, tokenizers and translations."""

MEASUREMENT = (
    "--policy", "v1", "--policy", "eb", "--policy", "ebplus", "--seqs", "16,64,256", "--loads", "64,256",
    "--input-len", "512", "--output-len", "128", "--rounds", "2",
)  # fmt: skip
"""Options of ``ebbench validate`` unless others are given: two rounds of step times and of six runs."""

ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""vLLM would import FlashInfer, which is not packed, to sample by top-k and top-p; requests here are greedy."""

RESERVE_S = 40.0
"""Kept for stopping a server, judging and storing."""
SHORTEST_S = 200.0
"""Least time to begin one: two starts of vLLM (step times, one server), its compilation and one policy's runs."""
DONE, NOT_STARTED = (0, 5), 4
"""Exit codes of ``ebbench validate``: with a verdict, decided or not; vLLM did not run."""
STEPS = "steps/round-1/steps.json"
KEPT = ("result.json", "result.md", "manifest.json", "steps/round-1/profile/calibration.json")


class BorrowedError(Exception):
    """What cannot be done, in one line with the remedy."""


class NoServerError(Exception):
    """vLLM did not start, with compilation and CUDA graphs or without."""


@dataclass(frozen=True)
class Contents:
    """What the parcels hold. ``model``: its config.json. ``needs``: versions of Python and of distributions that the
    machine must have. ``commit``: of the checkout. ``packages``: versions of all packed distributions. ``pieces``:
    SHA-256 of each parcel by its name."""

    model: str
    needs: dict[str, str]
    commit: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, str] = field(default_factory=dict)


# --- where there is a network ------------------------------------------------------------------------------------


def pack(folder: Path, vllm: str, python: str, model: Path, parcel_mib: int, without: Sequence[str] = ()) -> Contents:
    """Install ``vllm`` and this checkout for Python ``python`` on Linux x86-64, and write the parcels into ``folder``.

    ``model``: a config.json; its weights will be random. ``without``: further distributions to leave out. Raises
    BorrowedError where the installation fails.
    """
    from ebbench.records.manifest import git_commit

    uv = shutil.which("uv")
    if uv is None:
        raise BorrowedError("uv is not installed: pip install uv")
    if not (CHECKOUT / "pyproject.toml").exists():
        raise BorrowedError("parcels are packed from a checkout of ebbench; this is an installed copy")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BorrowedError(f"{folder} is not empty; give another folder")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        tree = Path(temporary)
        site = tree / "site"
        excluded = tree / "excluded.txt"
        excluded.write_text("\n".join((*LEFT_OUT, *without)))
        target = ("--target", site, "--python-version", python, "--python-platform", "x86_64-manylinux_2_31")
        wheels = ("--only-binary", ":all:", "--no-binary", "ebbench", "--link-mode", "copy", "--excludes", excluded)
        words = (uv, "pip", "install", "--quiet", *target, *wheels, vllm, f"{CHECKOUT}[power]")
        if subprocess.run(list(map(str, words))).returncode:
            raise BorrowedError(f"{vllm} could not be installed for Python {python}; the reason is above")
        excluded.unlink()
        for path in [path for pattern in REMOVED for path in site.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        kept = Path("models") / model.resolve().parent.name / "config.json"
        (tree / kept).parent.mkdir(parents=True)
        shutil.copy(model, tree / kept)
        versions = {
            distribution.name: distribution.version
            for distribution in importlib.metadata.distributions(path=[str(site)])
        }
        contents = Contents(str(kept), {"python": python, "torch": _torch(site, vllm)}, git_commit(), versions)
        contents = cut(tree, folder, parcel_mib * MIB, contents)
    shutil.copy(__file__, folder)
    return contents


def _torch(site: Path, vllm: str) -> str:
    name = vllm.partition("=")[0]
    (distribution,) = importlib.metadata.distributions(name=name, path=[str(site)])
    pinned = [line.split("==")[1] for line in distribution.requires or () if line.startswith("torch==")]
    return pinned[0].split(";")[0].split("+")[0].strip()


def cut(tree: Path, folder: Path, limit: int, contents: Contents) -> Contents:
    """Write the compressed tree as files of at most ``limit`` bytes, and what they hold."""
    pieces: dict[str, str] = {}
    environ = {"XZ_OPT": "-T0", **os.environ}
    with subprocess.Popen(["tar", "-cJf", "-", "-C", tree, "."], stdout=subprocess.PIPE, env=environ) as archive:
        while data := cast("IO[bytes]", archive.stdout).read(limit):
            name = f"parcel-{len(pieces) + 1}"
            (folder / name).write_bytes(data)
            pieces[name] = hashlib.sha256(data).hexdigest()
    if archive.returncode:
        raise BorrowedError("tar with xz failed; the reason is above")
    contents = replace(contents, pieces=pieces)
    (folder / CONTENTS).write_text(json.dumps(asdict(contents), indent=1) + "\n")
    return contents


# --- on the machine ----------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Seconds of this call that are left, and the lines that say when what was done."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.begun)

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self.begun:5.0f} s] {text}", flush=True)


def measure(parcels: Path, store: Path, output: Path, clock: Clock, options: Sequence[str]) -> int:
    """Take over the parcels that are here; with all of them, measure for the time that is left.

    Returns the exit code: 0 with a result in ``output``, 1 without. The same call goes on where the last one ended.
    Where vLLM does not start, steps are measured with torch alone.
    """
    contents = Contents(**json.loads((parcels / CONTENTS).read_bytes()))
    check_machine(contents)
    store.mkdir(parents=True, exist_ok=True)
    missing = take_over(contents, parcels, store)
    if missing:
        clock.say(f"{len(contents.pieces) - len(missing)} of {len(contents.pieces)} parcels are in {store}")
        clock.say(f"bring {', '.join(missing)} and give the same command")
        return 1
    unpack(contents, store, clock)
    try:
        folder = run_validations(store, contents.model, clock, options)
    except NoServerError:
        clock.say(f"vLLM does not run here: steps with torch alone for the {clock.left_s:.0f} s that are left")
        return steps(Decoder.of(store / contents.model), StepGrid(), output, clock)
    if folder is None:
        return 1
    collect(folder, output)
    shutil.copy(parcels / CONTENTS, output)
    clock.say(f"results are in {output}")
    return 0


def check_machine(contents: Contents) -> None:
    """Raise BorrowedError unless Python and the needed distributions have the versions of the parcels."""
    here = ".".join(map(str, sys.version_info[:2]))
    for name, needed in contents.needs.items():
        try:
            installed = here if name == "python" else importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != needed:
            raise BorrowedError(
                f"the parcels are for {name} {needed}; {sys.executable} has {installed}: pack again for this machine, "
                f"or measure steps with torch alone: {sys.executable} borrowed.py steps"
            )


def take_over(contents: Contents, parcels: Path, store: Path) -> list[str]:
    """Copy new parcels into the store. Returns the names of those that are still missing.

    Raises BorrowedError for a damaged one.
    """
    for name, digest in contents.pieces.items():
        source, kept = parcels / name, store / f"{name}-{digest[:12]}"
        if kept.exists() or not source.exists():
            continue
        data = source.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise BorrowedError(f"{source} is damaged, or of other parcels than {CONTENTS}: bring it again")
        partial = kept.with_suffix(".part")
        partial.write_bytes(data)
        partial.rename(kept)
    return [name for name, digest in contents.pieces.items() if not (store / f"{name}-{digest[:12]}").exists()]


def unpack(contents: Contents, store: Path, clock: Clock) -> None:
    """Unpack all parcels into the store, unless an earlier call did."""
    digest = hashlib.sha256("".join(contents.pieces.values()).encode()).hexdigest()
    done = store / "unpacked"
    if done.exists() and done.read_text() == digest:
        return
    clock.say("unpacking")
    for name in ("site", "models"):
        shutil.rmtree(store / name, ignore_errors=True)
    with tempfile.TemporaryFile(dir=store) as joined:
        for name, piece in contents.pieces.items():
            joined.write((store / f"{name}-{piece[:12]}").read_bytes())
        joined.seek(0)
        with tarfile.open(fileobj=joined, mode="r:xz") as archive:
            archive.extractall(store, filter="tar")
    done.write_text(digest)


def run_validations(store: Path, model: str, clock: Clock, options: Sequence[str]) -> Path | None:
    """Run ``ebbench validate``, and again without compilation and CUDA graphs if vLLM did not start with them.

    Returns the folder with a result; None, and the reason is said, if there is none. Raises NoServerError.
    """
    eager = (*(() if "--" in options else ("--",)), "--optimization-level", "0")
    attempts = {"measured": (), "measured-eager": eager}
    if (store / "measured-eager" / STEPS).exists():
        del attempts["measured"]  # an earlier call tried that
    for name, more in attempts.items():
        folder = store / name
        left_s = clock.left_s - RESERVE_S
        needed_s = 1.0 if (folder / STEPS).exists() else SHORTEST_S  # one that has begun knows what fits
        if left_s < needed_s:
            clock.say(f"skipped: a validation needs {needed_s:.0f} s and {RESERVE_S:.0f} s to end, "
                      f"{clock.left_s:.0f} s are left; the same command in a later call measures")  # fmt: skip
            return folder if (folder / KEPT[0]).exists() else None
        clock.say(f"measuring for {left_s:.0f} s{': compilation and CUDA graphs are off' if more else ''}")
        status = _validate(folder, left_s, ["--model", model, *options, *more], left_s + RESERVE_S / 4)
        if status not in DONE:
            why = "the time is up" if status is None else f"ebbench validate ended with exit code {status}"
            clock.say(f"{why}; its reason is above, logs are in {folder}")
            if (folder / STEPS).exists():  # else it would begin to measure them
                clock.say("what is complete is judged")
                status = _validate(folder, 1.0, ["--model", model, *options, *more], RESERVE_S / 2)
        if status in DONE:
            return folder
        if status != NOT_STARTED:
            return None
    raise NoServerError


def _validate(folder: Path, time_s: float, options: Sequence[str], limit_s: float) -> int | None:
    """The exit code of ``ebbench validate --max-time time_s``; None if it was interrupted at the limit."""
    words = ("validate", "--output", folder, "--max-time", f"{time_s:.0f}")
    store = folder.parent
    process = subprocess.Popen(
        [sys.executable, "-m", "ebbench", *map(str, words), *options],
        cwd=store,  # python -m would take ebbench from a checkout that the command is given in
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(store / "site")},
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # stops vLLM and keeps what was measured
        try:
            process.wait(RESERVE_S / 4)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def collect(folder: Path, output: Path) -> None:
    """Copy what ``reports/measured`` keeps into ``output``, and all else as one archive."""
    output.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (folder / name).exists():
            shutil.copy(folder / name, output)
    with tarfile.open(output / "everything.tar.xz", "w:xz") as archive:
        archive.add(folder, folder.name)


# --- step times with torch alone ---------------------------------------------------------------------------------

Point = tuple[int, int, int]
"""A step: tokens of one prompt, decoding sequences, tokens of each decode's context. 0: none."""


@dataclass(frozen=True)
class Decoder:
    """Sizes of a dense decoder; the default is Qwen3-8B's and nearly every other 8B decoder's."""

    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12_288
    vocab: int = 151_936

    @staticmethod
    def of(path: Path) -> Decoder:
        """The decoder of a config.json. Raises BorrowedError where it lacks a size."""
        config = json.loads(path.read_bytes())
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                 "intermediate_size", "vocab_size")  # fmt: skip
        config.setdefault("head_dim", config.get("hidden_size", 0) // max(config.get("num_attention_heads", 1), 1))
        if missing := [name for name in names if not isinstance(config.get(name), int)]:
            raise BorrowedError(f"{path} has no {missing[0]}: give the config.json of a dense decoder")
        return Decoder(*(config[name] for name in names))


@dataclass(frozen=True)
class StepGrid:
    """Sizes of the steps: every prompt, every batch of decodes, and every prompt with every batch."""

    tokens: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    seqs: tuple[int, ...] = (16, 64, 256)
    contexts: tuple[int, ...] = (256, 1024)
    repeats: int = 12

    def points(self) -> list[Point]:
        """All steps, prompts and decodes alone first."""
        decodes = [(0, n, c) for n in self.seqs for c in self.contexts]
        return [(x, 0, 0) for x in self.tokens] + decodes + [(x, n, c) for x in self.tokens for _, n, c in decodes]

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache that the largest step needs."""
        return self.seqs[-1] * self.contexts[-1] + self.tokens[-1]


class TorchSteps:
    """A decoder of random weights whose steps are timed: replays of CUDA graphs on a GPU, calls on a CPU.

    ``attention``: ``varlen`` computes prompt and decodes in one call of FlashAttention, ``parts`` in two.
    """

    def __init__(self, decoder: Decoder, grid: StepGrid, device: str) -> None:
        import torch

        self.torch: Any = torch
        self._decoder, self._grid, self._device = decoder, grid, device
        self._dtype = torch.bfloat16
        kv, wide = decoder.kv_heads * decoder.head_dim, decoder.heads * decoder.head_dim
        sizes = ((decoder.hidden, wide + 2 * kv), (wide, decoder.hidden),
                 (decoder.hidden, 2 * decoder.intermediate), (decoder.intermediate, decoder.hidden))  # fmt: skip
        self._weights = [[self._random(*size) for size in sizes] for _ in range(decoder.layers)]
        self._head = self._random(decoder.hidden, decoder.vocab)
        cache = (grid.kv_tokens, decoder.kv_heads, decoder.head_dim)
        self._cache = [(self._random(*cache), self._random(*cache)) for _ in range(decoder.layers)]

    def _random(self, *size: int) -> Any:
        return self.torch.randn(size, device=self._device, dtype=self._dtype) * size[0] ** -0.5

    def seconds(self, point: Point, attention: str) -> list[float]:
        """Times (s) of ``repeats`` steps, after two that do not count."""
        step = self._step(point, attention)
        with self.torch.inference_mode():
            if self._device == "cuda":
                return self._on_gpu(step)
            moments = [time.perf_counter()]
            for _ in range(2 + self._grid.repeats):
                step()
                moments.append(time.perf_counter())
            return [ended - begun for begun, ended in pairwise(moments)][2:]

    def _on_gpu(self, step: Callable[[], Any]) -> list[float]:
        cuda = self.torch.cuda
        aside = cuda.Stream()
        aside.wait_stream(cuda.current_stream())
        with cuda.stream(aside):  # what a first call allocates and chooses must not be captured
            step()
        cuda.current_stream().wait_stream(aside)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            step()
        graph.replay()
        events = [cuda.Event(enable_timing=True) for _ in range(self._grid.repeats + 1)]
        for event in events:
            event.record()
            if event is not events[-1]:
                graph.replay()
        cuda.synchronize()
        return [begun.elapsed_time(ended) / 1e3 for begun, ended in pairwise(events)]

    def _step(self, point: Point, attention: str) -> Callable[[], Any]:
        torch, decoder = self.torch, self._decoder
        prompt, seqs, context = point
        hidden = self._random(seqs + prompt, decoder.hidden)
        angles = torch.randn((seqs + prompt, 1, decoder.head_dim // 2), device=self._device).to(self._dtype)
        cos, sin = angles.cos(), angles.sin()
        ends = [context * (number + 1) - 1 for number in range(seqs)]
        slots = torch.tensor([*ends, *range(seqs * context, seqs * context + prompt)], device=self._device)
        attend = self._attend(point, attention)
        last = list(range(seqs)) + ([seqs + prompt - 1] if prompt else [])
        sampled = torch.tensor(last, device=self._device)
        heads, kv = decoder.heads, decoder.kv_heads

        def normed(x: Any) -> Any:
            return torch.nn.functional.rms_norm(x, (decoder.hidden,))

        def rotated(x: Any) -> Any:
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        def step() -> Any:
            x = hidden
            for (qkv, out, up, down), (keys, values) in zip(self._weights, self._cache, strict=True):
                projected = (normed(x) @ qkv).view(-1, heads + 2 * kv, decoder.head_dim)
                q, k, v = projected.split((heads, kv, kv), 1)
                keys.index_copy_(0, slots, rotated(k))
                values.index_copy_(0, slots, v)
                x = x + attend(rotated(q), keys, values).reshape(len(hidden), -1) @ out
                gate, inner = (normed(x) @ up).chunk(2, -1)
                x = x + (torch.nn.functional.silu(gate) * inner) @ down
            return (normed(x.index_select(0, sampled)) @ self._head).argmax(-1)

        return step

    def _attend(self, point: Point, attention: str) -> Callable[[Any, Any, Any], Any]:
        torch = self.torch
        prompt, seqs, context = point
        decoded = seqs * context
        sizes = self._decoder.kv_heads, self._decoder.head_dim
        if attention == "varlen":
            queries = [*range(seqs + 1), *([seqs + prompt] if prompt else [])]
            cached = [context * number for number in range(seqs + 1)] + ([decoded + prompt] if prompt else [])
            of_q, of_k = (torch.tensor(ends, device=self._device, dtype=torch.int32) for ends in (queries, cached))
            longest = max(prompt, 1), max(prompt, context)

            def together(q: Any, k: Any, v: Any) -> Any:
                k, v = k[: decoded + prompt], v[: decoded + prompt]
                return torch.ops.aten._flash_attention_forward(q, k, v, of_q, of_k, *longest, 0.0, True, False)[0]

            return together
        attend = torch.nn.functional.scaled_dot_product_attention

        def apart(q: Any, k: Any, v: Any) -> Any:
            parts = []
            if seqs:
                past = (kept[:decoded].view(seqs, context, *sizes).transpose(1, 2) for kept in (k, v))
                parts.append(attend(q[:seqs].unsqueeze(2), *past, enable_gqa=True).squeeze(2))
            if prompt:
                own = (kept[decoded : decoded + prompt].transpose(0, 1).unsqueeze(0) for kept in (k, v))
                whole = attend(q[seqs:].transpose(0, 1).unsqueeze(0), *own, is_causal=True, enable_gqa=True)
                parts.append(whole.squeeze(0).transpose(0, 1))
            return torch.cat(parts)

        return apart


def steps(decoder: Decoder, grid: StepGrid, output: Path, clock: Clock) -> int:
    """Measure the steps of the grid for the time that is left, those of an earlier call not again.

    Writes ``steps-ATTENTION.json`` after every step. Returns the exit code: 0 if a file is complete, else 1.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock.say(f"building {decoder.layers} layers of {decoder.hidden} on {_device_facts(torch)['gpu']}")
    measured: TorchSteps | None = None
    complete = False
    for attention in ("varlen", "parts") if device == "cuda" else ("parts",):
        path = output / f"steps-{attention}.json"
        times = _measured_before(path, decoder, grid)
        longest_s = 1.0
        for point in [point for point in grid.points() if point not in times]:
            if clock.left_s < STEPS_RESERVE_S + 2 * longest_s:
                clock.say(f"{attention}: {len(times)} of {len(grid.points())} steps measured; the time is up, the same "
                          "command goes on")  # fmt: skip
                return 0 if complete else 1
            begun = time.monotonic()
            try:
                measured = measured or TorchSteps(decoder, grid, device)
                times_s = measured.seconds(point, attention)
            except RuntimeError as error:  # out of memory, or no such kernel in this build of torch
                clock.say(
                    f"{attention}: a step of {point} failed: {str(error).splitlines()[0]} (for less memory: smaller "
                    "--seqs or --contexts)"
                )
                break
            longest_s = max(longest_s, time.monotonic() - begun)
            times[point] = times_s
            _write_steps(path, decoder, grid, attention, times, _device_facts(torch))
        else:
            complete = True
            clock.say(f"{attention}: all {len(times)} steps are in {path}")
            _show_steps(grid, times)
    return 0 if complete else 1


STEPS_RESERVE_S = 5.0
"""Kept for storing and for the process to end."""


def _device_facts(torch: Any) -> dict[str, Any]:
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"gpu": "CPU", "memory_bytes": memory, "torch": torch.__version__}
    about = torch.cuda.get_device_properties(0)
    return {
        "gpu": about.name, "memory_bytes": about.total_memory, "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip


def _measured_before(path: Path, decoder: Decoder, grid: StepGrid) -> dict[Point, list[float]]:
    """The steps of an earlier call. Raises BorrowedError where that measured another decoder or grid."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_bytes())
    if stored["decoder"] != asdict(decoder) or stored["grid"] != json.loads(json.dumps(asdict(grid))):
        raise BorrowedError(f"{path} is of another decoder or grid: give another --output")
    return {tuple(step["step"]): step["times_s"] for step in stored["steps"]}


def _write_steps(
    path: Path, decoder: Decoder, grid: StepGrid, attention: str, times: dict[Point, list[float]], facts: dict[str, Any]
) -> None:
    written = {
        "format": 1, "attention": attention, "decoder": asdict(decoder), "grid": asdict(grid),
        "manifest": {
            **facts, "host": os.uname().nodename, "python": sys.version.split()[0], "command": sys.argv,
            "script_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "steps": [{"step": list(point), "times_s": times_s} for point, times_s in times.items()],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(written, indent=1) + "\n")
    partial.rename(path)


def _show_steps(grid: StepGrid, times: dict[Point, list[float]]) -> None:
    """Print mixed steps beside the sum of their parts, by the share r of decodes among their tokens."""
    ms = {point: 1e3 * statistics.median(times_s) for point, times_s in times.items()}
    print("   r  prompt  decodes  context   mixed ms  its parts ms  mixed us per token")
    for point in sorted(grid.points(), key=lambda point: point[1] / max(point[0] + point[1], 1)):
        prompt, seqs, context = point
        if prompt and seqs:
            parts = ms[prompt, 0, 0] + ms[0, seqs, context]
            print(f"{seqs / (prompt + seqs):4.2f} {prompt:7,} {seqs:8,} {context:8,} {ms[point]:10.3f} {parts:13.3f} "
                  f"{1e3 * ms[point] / (prompt + seqs):19.2f}")  # fmt: skip


# --- the commands ------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="borrowed", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="build the parcels, where there is a network and uv")
    packing.add_argument("--dest", type=Path, default=Path("parcels"), help="an empty folder (parcels)")
    packing.add_argument("--vllm", default="vllm==0.25.1", help="what to install (vllm==0.25.1)")
    packing.add_argument("--python", default="3.12", help="Python of the machine (3.12)")
    model = CHECKOUT / "reports" / "measured" / "configs" / "qwen3-8b" / "config.json"
    packing.add_argument("--model", type=Path, default=model, help="a config.json (qwen3-8b)")
    packing.add_argument("--parcel-mib", type=int, default=50, help="largest size of a parcel in MiB (50)")
    packing.add_argument(
        "--without", action="append", default=[], help="leave out a distribution (on the machine); repeat"
    )
    measuring = commands.add_parser(
        "measure",
        help="take parcels over; with all of them, unpack and measure",
        epilog=f"Options of ebbench validate go after --; without any: {' '.join(MEASUREMENT)}",
    )
    stepping = commands.add_parser("steps", help="measure step times with torch alone, without parcels")
    stepping.add_argument("--model", type=Path, help="a config.json of a dense decoder (Qwen3-8B's sizes)")
    for name in ("tokens", "seqs", "contexts"):
        sizes = ",".join(map(str, getattr(StepGrid, name)))
        stepping.add_argument(f"--{name}", type=_sizes, default=sizes, help=f"increasing sizes ({sizes})")
    for packing in (measuring, stepping):
        packing.add_argument("--output", type=Path, default=Path("measured"), help="folder of the results (measured)")
        packing.add_argument("--seconds", type=float, default=560.0, help="time of this call (560)")
    store = Path(tempfile.gettempdir()) / "ebbench-borrowed"
    measuring.add_argument("--store", type=Path, default=store, help=f"where parcels and runs are kept ({store})")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    """At least two increasing sizes, separated by commas. Raises ValueError."""
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) < 2 or sizes[0] < 1 or any(larger <= size for size, larger in pairwise(sizes)):
        raise ValueError
    return sizes


def main(words: Sequence[str]) -> int:
    """Run ``pack``, ``measure`` or ``steps``; returns the exit code."""
    end = words.index("--") if "--" in words else len(words)
    given, options = _parser().parse_args(words[:end]), words[end + 1 :]
    try:
        if given.command == "measure":
            here = Path(__file__).resolve().parent
            clock = Clock(given.seconds)
            return measure(here, given.store.resolve(), given.output, clock, options or MEASUREMENT)
        if given.command == "steps":
            decoder = Decoder() if given.model is None else Decoder.of(given.model)
            return steps(
                decoder, StepGrid(given.tokens, given.seqs, given.contexts), given.output, Clock(given.seconds)
            )
        contents = pack(given.dest, given.vllm, given.python, given.model, given.parcel_mib, given.without)
        sizes = [(given.dest / name).stat().st_size / MIB for name in contents.pieces]
        print(f"{len(sizes)} parcels, {sum(sizes):.0f} MiB, in {given.dest}, with {CONTENTS} and borrowed.py")
    except BorrowedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
