"""Measure on a GPU that is borrowed for minutes: a machine with Python and torch, without vLLM and without a network.

``python -m ebbench.validation.borrowed pack``, where there is a network, installs vLLM and ebbench into a tree, leaves
out what a Llama or Qwen decoder on a Hopper GPU does not load, and cuts its archive into parcels of bounded size.
``python3 PARCELS/borrowed.py measure``, on the machine, takes the parcels over as they arrive; with the last one it
unpacks them and runs ``ebbench validate`` until the time is up. It needs the standard library alone: ebbench is inside
the parcels.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, cast

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
"""Least time for a validation: two starts of vLLM (step times, one server), its compilation and one policy's runs."""
DONE, NOT_STARTED = (0, 5), 4
"""Exit codes of ``ebbench validate``: with a verdict, decided or not; vLLM did not run."""
STEPS = "steps/round-1/steps.json"
KEPT = ("result.json", "result.md", "manifest.json", "steps/round-1/profile/calibration.json")


class BorrowedError(Exception):
    """What cannot be done, in one line with the remedy."""


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
    with tempfile.TemporaryDirectory(dir=_empty(folder)) as temporary:
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
        _remove(site)
        kept = Path("models") / model.resolve().parent.name / "config.json"
        (tree / kept).parent.mkdir(parents=True)
        shutil.copy(model, tree / kept)
        found = {one.name: one.version for one in importlib.metadata.distributions(path=[str(site)])}
        contents = Contents(str(kept), {"python": python, "torch": _torch(site, vllm)}, git_commit(), found)
        contents = cut(tree, folder, parcel_mib * MIB, contents)
    shutil.copy(__file__, folder)
    return contents


def _empty(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BorrowedError(f"{folder} is not empty; give another folder")
    return folder


def _remove(site: Path) -> None:
    for pattern in REMOVED:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _torch(site: Path, vllm: str) -> str:
    """The version of torch that the packed vLLM is built for."""
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
    folder = run_validations(store, contents.model, clock, options)
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
            found = here if name == "python" else importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != needed:
            raise BorrowedError(
                f"the parcels are for {name} {needed}; {sys.executable} has {found}: pack again for this machine"
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


class _Joined:
    """The parcels, read as one file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._data: Iterator[IO[bytes]] = (path.open("rb") for path in paths)
        self._file: IO[bytes] | None = next(self._data)

    def read(self, size: int) -> bytes:
        """The next bytes, at most ``size``; none at the end of the last parcel."""
        while self._file is not None:
            if data := self._file.read(size):
                return data
            self._file.close()
            self._file = next(self._data, None)
        return b""


def unpack(contents: Contents, store: Path, clock: Clock) -> None:
    """Unpack all parcels into the store, unless an earlier call did."""
    digest = hashlib.sha256("".join(contents.pieces.values()).encode()).hexdigest()
    done = store / "unpacked"
    if done.exists() and done.read_text() == digest:
        return
    clock.say("unpacking")
    for name in ("site", "models"):
        shutil.rmtree(store / name, ignore_errors=True)
    joined = _Joined([store / f"{name}-{piece[:12]}" for name, piece in contents.pieces.items()])
    with tarfile.open(fileobj=cast("IO[bytes]", joined), mode="r|xz") as archive:
        archive.extractall(store, filter="tar")
    done.write_text(digest)


def run_validations(store: Path, model: str, clock: Clock, options: Sequence[str]) -> Path | None:
    """Run ``ebbench validate``, and again without compilation and CUDA graphs if vLLM did not start with them.

    Returns the folder with a result; None, and the reason is said, if there is none.
    """
    eager = (*(() if "--" in options else ("--",)), "--optimization-level", "0")
    attempts = {"measured": (), "measured-eager": eager}
    if (store / "measured-eager" / STEPS).exists():
        del attempts["measured"]  # an earlier call tried that
    for name, more in attempts.items():
        folder = store / name
        left_s = clock.left_s - RESERVE_S
        if left_s < SHORTEST_S:
            clock.say(f"skipped: a validation needs {SHORTEST_S:.0f} s and {RESERVE_S:.0f} s to end, "
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
            break
    return None


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


# --- the commands ------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="borrowed", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("pack", help="build the parcels, where there is a network and uv")
    one.add_argument("--dest", type=Path, default=Path("parcels"), help="an empty folder (parcels)")
    one.add_argument("--vllm", default="vllm==0.25.1", help="what to install (vllm==0.25.1)")
    one.add_argument("--python", default="3.12", help="Python of the machine (3.12)")
    model = CHECKOUT / "reports" / "measured" / "configs" / "qwen3-8b" / "config.json"
    one.add_argument("--model", type=Path, default=model, help="a config.json (qwen3-8b)")
    one.add_argument("--parcel-mib", type=int, default=50, help="largest size of a parcel in MiB (50)")
    one.add_argument("--without", action="append", default=[], help="leave out a distribution (on the machine); repeat")
    two = commands.add_parser(
        "measure",
        help="take parcels over; with all of them, unpack and measure",
        epilog=f"Options of ebbench validate go after --; without any: {' '.join(MEASUREMENT)}",
    )
    two.add_argument("--output", type=Path, default=Path("measured"), help="folder of the results (measured)")
    two.add_argument("--seconds", type=float, default=560.0, help="time of this call (560)")
    store = Path(tempfile.gettempdir()) / "ebbench-borrowed"
    two.add_argument("--store", type=Path, default=store, help=f"where parcels and runs are kept ({store})")
    return parser


def main(words: Sequence[str]) -> int:
    """Run ``pack`` or ``measure``; returns the exit code."""
    end = words.index("--") if "--" in words else len(words)
    given, options = _parser().parse_args(words[:end]), words[end + 1 :]
    try:
        if given.command == "measure":
            here = Path(__file__).resolve().parent
            clock = Clock(given.seconds)
            return measure(here, given.store.resolve(), given.output, clock, options or MEASUREMENT)
        contents = pack(given.dest, given.vllm, given.python, given.model, given.parcel_mib, given.without)
        sizes = [(given.dest / name).stat().st_size / MIB for name in contents.pieces]
        print(f"{len(sizes)} parcels, {sum(sizes):.0f} MiB, in {given.dest}, with {CONTENTS} and borrowed.py")
    except BorrowedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
