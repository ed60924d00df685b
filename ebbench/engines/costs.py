"""Step costs for the controller if vLLM runs on this machine's hardware.

They are measured (``ebbench calibrate``), taken from a device profile, or not needed. Costs of another GPU are used
only if the user names it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbench.devices.base import QUANTIZATIONS, Device
from ebbench.devices.gridcost import read_calibration
from ebbench.engines.vllm_command import Emulation, Serving, hub_name, parse_parallel, parse_types
from ebbench.errors import UsageError
from ebbench.records.warnings import warning
from ebbench.spec.server import METHODS, MOST_TOKENS, EngineOptions, Speculative, served_drafts
from vllm_eb.calibration import Calibration
from vllm_eb.config import needs_calibration
from vllm_eb.policy import PolicySpec, parse_policy

BY_BATCH = "num_speculative_tokens_per_batch_size"
"""Entry of vLLM's speculative_config with which it is prepared for draft lengths that change."""


def serving_of(
    model: str, policy: str, vllm_options: Sequence[str], *, device: str | None, device_model: str | None,
    calibration: Path | None, assume_kernels: bool, emulate: str | None, slow_motion: float,
) -> Serving:  # fmt: skip
    """What ``ebbench serve`` serves, with the costs that its policy needs. Raises UsageError.

    ``device``: whose costs the policy computes with; ``emulate``: a GPU to emulate, whose profile calls the model
    ``device_model``.
    """
    if emulate is None and slow_motion != 1.0:
        raise UsageError("--slow-motion slows an emulated device; give --emulate GPU")
    if emulate is not None and not parse_parallel(vllm_options).single:
        raise UsageError("--emulate emulates one GPU; leave out the options of several after --")
    if emulate is not None and parse_types(vllm_options):
        raise UsageError(
            "--emulate emulates a model in the types of its config.json; leave out --quantization and --kv-cache-dtype "
            "after --, or give them to `ebbench run --engine emulated`"
        )
    spec, profiled = parse_policy(policy), device_model or model
    emulation = Emulation(emulate or "", profiled, slow_motion, assume_kernels=assume_kernels)
    costs = serving_costs(
        [spec], calibration=calibration, device=device or emulate, model=profiled, vllm_options=vllm_options,
        assume_kernels=assume_kernels,
    )  # fmt: skip
    return Serving(
        model=model if Path(model).exists() else hub_name(model),
        policy=spec,
        calibration=costs,
        extra=vllm_options,
        emulation=None if emulate is None else emulation,
    )


def serving_costs(
    policies: Sequence[PolicySpec],
    options: EngineOptions | None = None,
    *,
    calibration: Path | None,
    device: str | None,
    model: str,
    vllm_options: Sequence[str] = (),
    assume_kernels: bool = False,
) -> Calibration | None:
    """Costs for a server on this machine: from the file, else from the profile that was named or fits the GPU.

    ``vllm_options``: arguments for ``vllm serve``, which say how many GPUs share the model and in which types.
    ``assume_kernels``: as among the ``options``, where there are none.
    None if no policy uses costs. Raises UsageError that says what to do if a policy needs costs and there are none.
    """
    if calibration is not None:
        return _fitting(read_calibration(calibration), calibration, policies, vllm_options)
    needing = [spec.name for spec in policies if needs_calibration(spec)]
    if not needing:
        return None
    from ebbench.devices.loader import load_device
    from ebbench.engines.machine import local_device, machine_name

    profile = device or local_device()
    if profile is None:
        raise UsageError(
            f"policy {', '.join(needing)} computes from the step costs of the hardware, and {machine_name()} has no "
            f"device profile: measure them (minutes) with `ebbench calibrate --model {model}` and give --calibration "
            "calibration/calibration.json, or name a GPU like it with --device; v1, v0, deferred and a fixed k or "
            "theta need no costs"
        )
    settings = {"assume_kernels": assume_kernels} | _how(options, vllm_options)
    drafts, parallel = _drafts(policies, model, vllm_options), parse_parallel(vllm_options)
    return load_device(profile, model, parallel=parallel, speculative=drafts, **settings).calibration


def _drafts(policies: Sequence[PolicySpec], model: str, vllm_options: Sequence[str]) -> Speculative | None:
    """How the server drafts tokens, as a profile prices it; None: not at all, or in a way that it does not price.

    Raises UsageError for a policy that sets how many are drafted where the server drafts none or as many in any batch,
    or where their price is not known.
    """
    from ebbench.devices.profiles import find_model

    _check_varying(policies, vllm_options)
    if not (config := served_drafts(vllm_options)):
        return None
    method, tokens = (
        str(config.get("method", config.get("model", ""))).strip("[]"),
        config.get("num_speculative_tokens"),
    )
    method = "mtp" if method.endswith("mtp") else method
    geometry = find_model(model)
    priced = method in METHODS and not (geometry.windows or geometry.own_pages or geometry.state_bytes)
    if priced and isinstance(tokens, int) and 1 <= tokens <= MOST_TOKENS and (method != "mtp" or geometry.mtp_layers):
        return Speculative(method, tokens, (0.0,) * tokens)  # what is accepted costs nothing
    if varying := [spec.name for spec in policies if spec.varies_drafts]:
        raise UsageError(
            f"policy {varying[0]}: what drafts by {method} cost {geometry.name} is not in the profile; measure it with "
            f"`ebbench calibrate --model {model} -- --speculative-config ...` and give --calibration"
        )
    return None


def _check_varying(policies: Sequence[PolicySpec], vllm_options: Sequence[str]) -> None:
    """Raise UsageError for a policy that varies the drafts of a server that is not prepared for it."""
    config, varying = served_drafts(vllm_options), [spec.name for spec in policies if spec.varies_drafts]
    if not varying or BY_BATCH in config:
        return
    most = config.get("num_speculative_tokens", 3)
    given = {"method": "ngram", "num_speculative_tokens": most, **config, BY_BATCH: [[1, 1, most]]}
    why = "drafts no tokens" if not config else "would draft as many tokens in any batch"
    raise UsageError(
        f"policy {varying[0]}: the server {why}; end the command with: -- --speculative-config '{json.dumps(given)}'"
    )


def _fitting(
    calibration: Calibration, path: Path, policies: Sequence[PolicySpec], vllm_options: Sequence[str]
) -> Calibration:
    """The calibration of a file. Raises UsageError if a policy varies drafts and it does not tell what they cost."""
    _check_varying(policies, vllm_options)
    varying = [spec.name for spec in policies if spec.varies_drafts]
    tokens = served_drafts(vllm_options).get("num_speculative_tokens", 0)
    if calibration.drafts and tokens != calibration.drafts:
        raise UsageError(
            f"{path} was measured with {calibration.drafts} drafted tokens, and this server drafts {tokens}; "
            "measure it as it is served"
        )
    if varying and calibration.undrafted is None:
        raise UsageError(
            f"policy {varying[0]} needs step times with drafts and without them, and {path} was measured without: "
            "measure again with `ebbench calibrate ... -- --speculative-config ...`"
        )
    return calibration


def _how(options: EngineOptions | None, vllm_options: Sequence[str]) -> dict[str, Any]:
    """Options that a profile's costs and KV capacity depend on, as arguments of ``load_device``.

    Where both have one, vLLM takes the one of ``vllm_options``, which come last.
    """
    types = parse_types(vllm_options)
    if types.get("quantization", QUANTIZATIONS[0]) not in QUANTIZATIONS:
        raise UsageError(
            f"the step costs of {types['quantization']} weights are not known: measure them with `ebbench calibrate` "
            "and give --calibration"
        )
    if options is None:
        return types
    return {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "async_scheduling": options.async_scheduling,
        "eager": options.enforce_eager,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "moe_backend": options.moe_backend,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "assume_kernels": options.assume_kernels,
        **types,
    }


def local_hardware(
    policies: Sequence[PolicySpec],
    options: EngineOptions,
    *,
    model: str,
    device: str | None = None,
    calibration: Path | None = None,
    vllm_options: Sequence[str] = (),
) -> Device:
    """This machine serving ``model``, with the costs that the policies need.

    A GPU with a profile has the profile's name. Only vLLM knows what fits. Raises what :func:`serving_costs` raises.
    """
    from ebbench.devices.profiles import find_profile
    from ebbench.engines.machine import local_device, machine_name
    from ebbench.engines.setup import unknown_device

    costs = serving_costs(
        policies, options, calibration=calibration, device=device, model=model, vllm_options=vllm_options
    )
    profile = local_device()
    own_device = None if profile is None else _profiled(profile, model, options, vllm_options)
    if own_device is None:
        own_device = replace(unknown_device(machine_name(), model), provenance="this machine, measured")
    if costs is None:
        return own_device
    warnings = own_device.warnings
    if calibration is None and device is not None and (named := find_profile(device).name) != own_device.name:
        warnings += (warning("costs-of-another-device", costs_of=named, device=own_device.name),)
    return replace(own_device, calibration=costs, costs_known=True, warnings=warnings)


def _profiled(profile: str, model: str, options: EngineOptions, vllm_options: Sequence[str]) -> Device | None:
    """The device of a profile; None where it cannot describe the model, which vLLM may serve all the same.

    Its KV cache is unknown: the server that starts has its own version and options, and reports what it has.
    """
    from ebbench.devices.loader import load_device

    try:
        settings = _how(options, vllm_options) | {"assume_kernels": True}  # its step times are not used
        device = load_device(profile, model, parallel=parse_parallel(vllm_options), **settings)
        return replace(device, kv_capacity_tokens=0)
    except UsageError:
        return None
