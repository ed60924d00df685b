"""Loads a Device by the names of device and model: the best available cost model, its source and its warnings.

The warnings say what of its step times and KV cache is estimated instead of measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import ParamSpec

from ebbench.config.topology import PoolSpec, TopologySpec
from ebbench.devices import library
from ebbench.devices.base import (
    MOE_BACKENDS,
    CostModel,
    Device,
    DeviceRequest,
    Drafter,
    Parallel,
    StepShape,
    quantised,
)
from ebbench.devices.capacity import requested_capacity, requested_layout
from ebbench.devices.costs import (
    GIVEN,
    LEAST_FIXED_S,
    SOURCE,
    Built,
    LinearCost,
    RooflineCost,
    TableCost,
    cost_grid,
    fit_calibration,
    given_device,
    published_calibration,
    roofline_cost,
    table_cost,
)
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.layers import MAX_TOKENS, MXFP4, choose_link
from ebbench.devices.profiles import (
    DeviceProfile,
    device_identity,
    find_model,
    find_profile,
    has_bundled_shape,
    has_other_shape,
    measured_name,
)
from ebbench.devices.routers import HOPPER
from ebbench.devices.surfaces import has_joint_tables
from ebbench.errors import UsageError, check_known
from ebbench.records.warnings import HOST_DOUBTED, HOST_UNFITTED, LIBRARY_ABSENT, MIXING_UNMEASURED, RunWarning, warning
from ebbench.spec.server import OPTION, HostCosts, Speculative, parse_release
from vllm_eb.calibration import Calibration

SLOWER = 1.02
"""From this ratio on, a step is said to be slower than with weights in 16 bits, or than on half the GPUs."""
SAME = 0.02
"""Largest relative difference at which a device file's numbers are those of the bundled device of its name."""
_RATES = ("bandwidth_bytes_per_s", "bf16_flops_per_s")
_STEPS = {
    "256 decodes": StepShape((), 256, 256 * 1024, 256),
    "2,048 prompt tokens": StepShape(((2048, 0),), 0, 0, 1),
    "8,192 prompt tokens": StepShape(((2048, 0),) * 4, 0, 0, 4),
}
_MANY_SHORT = StepShape((), 512, 512 * 256, 512)


TABLES_SINCE = (0, 19)
"""The oldest vLLM under which kernels of the tables were measured; the newest is 0.24."""


def older_than(request: DeviceRequest, release: tuple[int, int]) -> bool:
    """Whether the request names a version of vLLM before this one."""
    version = parse_release(request.vllm_version or "")
    return version is not None and version < release


def _caveats(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: CostModel, host: HostCosts
) -> Iterator[RunWarning]:
    """Warnings about options without effect, and about what was not measured, not fitted or is simplified.

    ``model``: in the types that are served. ``host``: the constants in ``cost``.
    """
    if model.note:
        yield warning("model-note", model=model.name, note=model.note)
    if has_other_shape(model):
        yield warning("other-shape", given=request.model, model=model.name, params=model.params)
    if not isinstance(cost, TableCost):
        if request.eager:
            yield warning("eager-unknown")
    elif older_than(request, TABLES_SINCE):  # what of an older vLLM --vllm-version does not set
        yield warning("older-vllm", vllm_version=request.vllm_version)
    if request.name.endswith(".toml"):
        yield from _unused_numbers(request, profile, model, cost)
    if isinstance(cost, TableCost | RooflineCost) and not host.fitted:
        yield warning(HOST_UNFITTED, device=request.name, step_s=host.step_s, sequence_s=host.sequence_s)
    if isinstance(cost, TableCost):
        if not profile.mixed_fitted and not has_joint_tables(profile.name):
            yield warning(MIXING_UNMEASURED, device=profile.name, taken=profile.mixed_note)
        yield from _doubtful_host(profile, cost)
        yield from _slower_than_16_bits(request, profile, model, cost)
        yield from _slower_than_half_the_gpus(request, profile, model, cost)


def _unused_numbers(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: CostModel
) -> Iterator[RunWarning]:
    """Numbers in the user's device file that the step times do not depend on, with what they are taken from instead."""
    if isinstance(cost, TableCost):
        bundled = find_profile(profile.name)
        unused = [name for name in _RATES if abs(getattr(profile, name) / getattr(bundled, name) - 1.0) > SAME]
        why = "tables"
    elif isinstance(cost, LinearCost):
        unused = [*_RATES, *_stated(profile, ("gemm_factor", "host"))]
        why = "linear"
    else:
        unused = _stated(profile, ("gemm_factor", "mixed_from"))
        why = "measured"
        if isinstance(cost, RooflineCost):
            unused += [f"host.{name}.mixed_excess" for name, host in profile.host.items() if host.mixed_excess != 1.0]
            why = "roofline"
    if unused:
        named = {"file": request.name, "device": profile.name, "published_for": list(profile.calibration_names)}
        yield warning("unused-numbers", unused=unused, times=why, model=model.name, **named)


def _stated(profile: DeviceProfile, names: Sequence[str]) -> list[str]:
    """The fields that differ from their defaults."""
    defaults = {setting.name: setting for setting in fields(DeviceProfile)}
    return [name for name in names if getattr(profile, name) and getattr(profile, name) != defaults[name].default]


def _doubtful_host(profile: DeviceProfile, cost: TableCost) -> Iterator[RunWarning]:
    """Where the host takes longer than the GPU in steps of many short sequences, and its constant is in doubt."""
    host, seqs = cost.host, _MANY_SHORT.decode_seqs
    host_s = host.step_s + host.sequence_s * seqs
    gpu_s = replace(cost, host=HostCosts(0.0, 0.0), overlap=False).step_s(_MANY_SHORT)
    if host.doubt and host_s > gpu_s:
        yield warning(HOST_DOUBTED, seqs=seqs, host_s=host_s, gpu_s=gpu_s, device=profile.name, doubt=host.doubt)


def _slower_than_16_bits(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: TableCost
) -> Iterator[RunWarning]:
    """A warning if the tables' kernels with FP8 weights are slower than in 16 bits, as no server would run them."""
    if not model.weight_dtype.startswith("fp8") or model.own_pages:  # DeepSeek-V4 runs in no other type
        return
    plain = replace(model, weight_dtype="bfloat16", attention_dtype="", expert_dtype="")
    if slow := _slower_steps(request, profile, plain, cost, request.parallel):
        named = {"quantization": request.quantization, "by_block": model.weight_dtype == "fp8_block"}
        yield warning("fp8-slower", device=profile.name, times=slow, **named)


def _slower_than_half_the_gpus(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: TableCost
) -> Iterator[RunWarning]:
    """A warning if the model also fits on half as many GPUs and a step is faster there, with fewer collectives."""
    whole = request.parallel
    if whole.tp < 2 or whole.dp > 1:
        return
    half = replace(whole, tp=whole.tp // 2, ep=max(whole.ep // 2, 1))
    try:
        half.check(model)
        requested_capacity(profile, model, replace(request, parallel=half, kv_tokens=None))
    except UsageError:  # vLLM would not start there
        return
    if slow := _slower_steps(request, profile, model, cost, half):
        yield warning("fewer-gpus-faster", device=profile.name, gpus=whole.tp, fewer=half.tp, times=slow)


def _slower_steps(
    request: DeviceRequest, profile: DeviceProfile, model: ModelGeometry, cost: TableCost, on: Parallel
) -> dict[str, float]:
    """Steps that take longer with ``cost`` than with tables of ``model`` on GPUs of the shape ``on``, and how much."""
    smaller = table_cost(
        profile, model, cost.host, shape=on, overlap=request.async_scheduling, eager=request.eager, vllm=request.vllm
    )
    assert smaller is not None  # the device has tables
    ratios = {what: cost.step_s(step) / smaller.cost.step_s(step) for what, step in _STEPS.items()}
    return {what: ratio for what, ratio in ratios.items() if ratio > SLOWER}


P = ParamSpec("P")
COSTS = ("auto", "table", "linear", "roofline")
DEFAULT_HOST = HostCosts(step_s=2e-3, sequence_s=10e-6, fitted=False)


def _check_measured(
    request: DeviceRequest, profile: DeviceProfile, geometry: ModelGeometry, named: ModelGeometry,
    measured: Calibration | None,
) -> None:  # fmt: skip
    """Raise UsageError where step times were measured of one GPU or one type, and others are asked for."""
    if measured is not None and geometry != named:
        raise UsageError(
            f"step times of {geometry.name} on {profile.name} were measured with its own types; leave out "
            "--quantization and --kv-cache-dtype, or calibrate with them"
        )
    if not request.parallel.single and (measured is not None or request.cost == "linear"):
        raise UsageError(
            f"step times of {geometry.name} on {profile.name} were measured on one GPU and cannot be divided among "
            "several; leave tp and ep out of the topology, or use a device with kernel tables (`ebbench devices list`)"
        )


def check_backend(moe_backend: str, model: ModelGeometry) -> None:
    """Raise UsageError for kernels that are unknown, or not those of the model's experts."""
    check_known("kernels of experts (--moe-backend)", moe_backend, MOE_BACKENDS)
    if moe_backend == "marlin" and not (model.experts and model.dtype_of_experts in (MXFP4, "int4")):
        kind = f"experts in {model.dtype_of_experts}" if model.experts else "no experts"
        raise UsageError(f"--moe-backend marlin is for experts in MXFP4 or INT4: {model.name} has {kind}; leave it out")


def load(request: DeviceRequest) -> Device:
    """The device of a request, or one given by its constants (``costs.given_device``).

    Raises UnknownNameError for an unknown device, model, cost, link or type, UsageError if the model does not fit, the
    cost model does not exist for this pair, or kernels were not measured and are not to be assumed.
    """
    check_known("cost model", request.cost, COSTS)
    if (request.max_num_batched_tokens or 0) > MAX_TOKENS:
        raise UsageError(
            f"step times end at {MAX_TOKENS:,} tokens per step; lower --max-num-batched-tokens "
            f"{request.max_num_batched_tokens}"
        )
    if request.name.startswith(GIVEN):
        return given_device(request.name, request.model)
    profile, named = find_profile(request.name), find_model(request.model)
    drafts = request.speculative
    if drafts is not None:
        check_drafts(drafts, named)
    geometry = quantised(named, request.quantization, request.kv_cache_dtype)
    check_backend(request.moe_backend, geometry)
    request.parallel.check(geometry)
    capacity = requested_capacity(profile, geometry, request)
    measured = _measured(profile, request.model, geometry)
    _check_measured(request, profile, geometry, named, measured)
    published = measured or _published(profile, geometry, request.parallel)
    own = None if has_other_shape(named) else profile.host.get(geometry.name)
    constants = (request.host or own or profile.host.get("default") or DEFAULT_HOST).with_workers(request.parallel.tp)
    built = (
        _grid(profile, measured, own)
        if measured is not None and request.cost == "auto"
        else _build(request, profile, geometry, published, constants)
    )
    _refuse_unmeasured(request, built)
    calibration = measured or _calibration(built, published, profile.margin_s_per_token)
    if measured is not None and measured.drafts:
        calibration = _of_drafts_measured(measured, built, 0 if drafts is None else drafts.tokens)
    elif drafts is not None:
        plain, built = built, _drafting(built, drafts, geometry)
        calibration = _with_drafts(calibration, plain, built, drafts.tokens)
    return Device(
        name=profile.name,
        model=geometry.name,
        cost=built.cost,
        kv_capacity_tokens=capacity,
        calibration=calibration,
        provenance=built.provenance,
        warnings=(*built.warnings, *_caveats(request, profile, geometry, built.cost, constants)),
        profile=profile,
        geometry=geometry,
        request=request,
        identity=(*device_identity(profile, named, cost=request.cost, host=request.host), *built.identity),
        kv_layout=requested_layout(profile, geometry, request),
    )


def _loaded_as(request: Callable[P, DeviceRequest]) -> Callable[P, Device]:
    def load_device(*args: P.args, **settings: P.kwargs) -> Device:
        """:func:`load` with the arguments of a DeviceRequest."""
        return load(request(*args, **settings))

    return load_device


load_device = _loaded_as(DeviceRequest)
_ROOFLINE = "roofline"
_UNMEASURED = (_ROOFLINE, "experts-roofline", "layers-estimated")
"""Codes of the caveats that a roofline stands for kernels: off by a factor, where scaled ones are off by a fifth."""


def _refuse_unmeasured(request: DeviceRequest, built: Built) -> None:
    """Raise UsageError for kernels that were not measured, unless the user has asked for a roofline of them.

    A device file of the user's own asks for one by the rates that it states.
    """
    if request.assume_kernels or request.cost == _ROOFLINE:
        return
    codes = [code for code in _UNMEASURED if code != _ROOFLINE or not request.name.endswith(".toml")]
    missing = [said for said in built.warnings if said.code in codes]
    if not missing:
        return
    what = str(missing[0])
    if missing[0].code == _ROOFLINE:
        what = (
            f"kernels were not measured on {request.name}, and a roofline by its data sheet is right to a factor only"
        )
    hint = [f"{said}, or" for said in built.warnings if said.code == LIBRARY_ABSENT]
    remedy = " ".join([*hint, "choose a GPU that has them (`ebbench devices list`), or accept the estimate"])
    raise UsageError(
        f"{what}; {remedy} with --assume-kernels (run, capacity, plan, advise, sweep, devices show, serve)"
    )


def check_drafts(drafts: Speculative, model: ModelGeometry) -> None:
    """Raise UsageError for a model that cannot draft in this way, or whose KV cache is not simulated with drafts."""
    if drafts.method == "mtp" and not model.mtp_layers:
        raise UsageError(
            f"{OPTION}: {model.name} has no layers for multi-token prediction (num_nextn_predict_layers in its "
            "config.json); use method=eagle3 or method=ngram"
        )
    kept_whole = {"chunk"} if drafts.method != "ngram" else set()
    if model.own_pages or any(mixer.kind not in kept_whole for mixer in model.windows):
        kept = "a window of tokens"
    elif any(mixer.state_bytes and not mixer.draft_bytes for mixer in model.mixers):
        kept = "a state without a convolution"
    else:
        return
    raise UsageError(
        f"{OPTION}: layers of {model.name} keep {kept}, whose KV blocks are not simulated with drafts; leave it out, "
        "or choose a model whose layers keep every token or a state as Qwen3-Next's"
    )


def _drafting(built: Built, drafts: Speculative, model: ModelGeometry) -> Built:
    """The cost model with the drafter's own passes, and a note of what is modelled."""
    rules, cost = drafts.rules, built.cost
    if rules.layers and isinstance(cost, TableCost | RooflineCost):
        layers = rules.layers
        kind = [mixer for mixer in model.mixers if mixer.kind != "index"].index(model.main)
        cost = replace(cost, drafter=Drafter(drafts.tokens, layers, layers / model.layers, rules.head_share, kind))
    layers = rules.layers if cost is not built.cost else 0
    states = {"states": True} if model.state_bytes else {}
    note = warning("drafts-modelled", tokens=drafts.tokens, model=model.name, layers=layers, **states)
    return Built(cost, built.provenance, (*built.warnings, note))


def _with_drafts(calibration: Calibration, plain: Built, drafting: Built, tokens: int) -> Calibration:
    """The controller's calibration, changed by as much as drafts change a fit to the cost model; costs of decodes are
    per computed token. What is published or measured knows no drafts."""
    before = fit_calibration(plain.cost, "", calibration.margin)
    after = fit_calibration(drafting.cost, "", calibration.margin, tokens)

    def changed(name: str) -> float:
        return max(float(getattr(calibration, name) + getattr(after, name) - getattr(before, name)), 0.0)

    return replace(
        calibration,
        alpha_p=changed("alpha_p"),
        beta_p=changed("beta_p"),
        alpha_d=max(changed("alpha_d"), LEAST_FIXED_S),
        beta_d=changed("beta_d"),
        mixed=after.mixed,
        source=f"{calibration.source}; {tokens} drafted tokens per decode from the {drafting.provenance}",
        grid=cost_grid(drafting.cost, tokens),
        undrafted=cost_grid(drafting.cost),
    )


def _of_drafts_measured(measured: Calibration, built: Built, tokens: int) -> Calibration:
    """The controller's calibration of a server with ``tokens`` drafts by what was measured on one that drafts.

    Raises UsageError for steps without drafts where only those with them were measured.
    """
    if tokens == measured.drafts:
        return measured
    if measured.undrafted is None:
        raise UsageError(
            f"only steps with {measured.drafts} drafted tokens were measured: give {OPTION} with "
            f"tokens={measured.drafts}, or calibrate with num_speculative_tokens_per_batch_size in --speculative-config"
        )
    fitted = fit_calibration(built.cost, measured.source, measured.margin, tokens)
    undrafted = measured.undrafted if tokens else None
    return replace(fitted, grid=cost_grid(built.cost, tokens), undrafted=undrafted, drafts=tokens)


def resized(device: Device, request: DeviceRequest) -> Device:
    """A loaded device with the memory, batch size and budget of ``request``, which only affect its KV cache size."""
    assert device.profile is not None
    assert device.geometry is not None
    capacity = requested_capacity(device.profile, device.geometry, request)
    layout = requested_layout(device.profile, device.geometry, request)
    return replace(device, kv_capacity_tokens=capacity, request=request, kv_layout=layout)


def _published(profile: DeviceProfile, model: ModelGeometry, parallel: Parallel) -> Calibration | None:
    """The authors' coefficients, which are for one GPU in 16 bits; None for other models, whatever their name."""
    same = parallel.single and model.plain and has_bundled_shape(model)
    return published_calibration(profile, model) if same else None


def _measured(profile: DeviceProfile, model: str, geometry: ModelGeometry) -> Calibration | None:
    """The calibration measured on this device for this model, if the profile names one."""
    measured = {measured_name(name): path for name, path in profile.measured.items()}
    by_name = () if has_other_shape(geometry) else (geometry.name, geometry.hf_id)
    for name in (measured_name(model), *by_name):
        if name in measured:
            from ebbench.devices.gridcost import measured_calibration

            return measured_calibration(Path(measured[name]))
    return None


def _grid(profile: DeviceProfile, calibration: Calibration, host: HostCosts | None) -> Built:
    from ebbench.devices.gridcost import GridCost

    cost = GridCost.of(calibration, host.request_s if host is not None else 0.0)
    return Built(cost, f"step times measured: {calibration.source or profile.provenance}", ())


def _build(
    request: DeviceRequest,
    profile: DeviceProfile,
    model: ModelGeometry,
    published: Calibration | None,
    host: HostCosts,
) -> Built:
    wanted = request.cost
    if wanted in ("auto", "table"):
        tables = table_cost(
            profile, model, host, shape=request.parallel, overlap=request.async_scheduling, eager=request.eager,
            vllm=request.vllm,
            marlin=request.moe_backend == "marlin" or (request.start.marlin and profile.name in HOPPER),
        )  # fmt: skip
        if tables is not None:
            return tables
        if wanted == "table":
            raise UsageError(f"no kernel tables for {profile.name}; use cost auto, which takes the next best model")
    if wanted in ("auto", "linear") and published is not None:
        warnings: tuple[RunWarning, ...] = (warning("linear-cost"),)
        if published.mixed is None:
            warnings += (warning("mixed-cost-unpublished", model=model.name, device=profile.name),)
        return Built(LinearCost(published), f"linear coefficients: {SOURCE}", warnings)
    if wanted == "linear":
        raise UsageError(
            f"no linear calibration of {model.name} on {profile.name} is published; use cost auto or roofline"
        )
    return _roofline(profile, model, host, request)


def _calibration(built: Built, published: Calibration | None, margin: float) -> Calibration:
    """The controller's calibration: the published coefficients, completed or replaced by a fit to the cost model."""
    grid = cost_grid(built.cost)
    fitted = fit_calibration(built.cost, f"fitted to the {built.provenance}", margin)
    if published is None:
        return replace(fitted, grid=grid)
    if published.mixed is None and fitted.mixed is not None and not isinstance(built.cost, LinearCost):
        source = f"{published.source}; beta_mb(r) {fitted.source}"
        return replace(published, mixed=fitted.mixed, source=source, grid=grid)
    return replace(published, grid=grid)


def _roofline(profile: DeviceProfile, model: ModelGeometry, host: HostCosts, request: DeviceRequest) -> Built:
    if not request.parallel.single:
        chosen = request.cost == "roofline"
        remedy = "leave out --cost roofline" if chosen else "use a device with kernel tables (`ebbench devices list`)"
        raise UsageError(
            f"{profile.name}: a roofline of {request.parallel.gpus} GPUs as one unit was never checked; "
            f"{'; '.join([f'{remedy}, or leave tp and ep out of the topology', *map(str, library.hint(profile))])}"
        )
    estimated = warning("roofline", model=model.name, device=profile.name)
    cost = roofline_cost(profile, model, host, overlap=request.async_scheduling)
    hints = library.hint(profile) if request.cost == "auto" else ()
    return Built(cost, f"roofline of {profile.gpu}: {profile.provenance}", (estimated, *hints))


# A unit of several GPUs as a single device: its step times, KV capacity and memory.


@dataclass(frozen=True)
class UnitDevice:
    """One unit: its ``device`` (cost and KV capacity of all its GPUs) and the data for KV transfers.

    ``spare_bytes``: memory of its GPUs that the engine may not use. ``link_bytes_per_s``: None if the device's profile
    has no link.
    """

    device: Device
    spare_bytes: float
    link_bytes_per_s: float | None
    kv_bytes_per_token: int | None


def unit_device(
    device: Device, pool: PoolSpec, default_utilization: float | None, max_num_seqs: int, budget: int, link: str = ""
) -> UnitDevice:
    """The unit of ``pool`` on GPUs like ``device``, connected by ``link`` ("" is the device's default link).

    ``default_utilization``: the share of memory where neither the pool nor the user states one; None: that of vLLM's
    version. Raises UsageError for an unsupported shape. A device made by hand represents a whole unit of any number of
    GPUs.
    """
    request, profile, model = device.request, device.profile, device.geometry
    if request is None or profile is None or model is None:
        return UnitDevice(device, 0.0, None, None)
    given = pool.gpu_memory_utilization or request.gpu_memory_utilization
    utilization = given or default_utilization or request.memory_share
    sized = replace(
        request, gpu_memory_utilization=utilization, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    if pool.lockstep and model.experts:
        raise UsageError(
            f"lockstep is for dense models; the data-parallel units of {model.name} share its experts: write "
            f"ep={pool.tp * pool.dp} instead"
        )
    shape = _shape(pool, link)
    shape.check(model)
    if link or not shape.single:
        choose_link(profile, link)
    if not shape.single and shape != request.parallel:
        unit = _loaded(replace(sized, parallel=shape))
    elif utilization != request.memory_share or not shape.single:
        unit = resized(device, sized)
    else:
        unit = device
    speed = profile.links[choose_link(profile, link)].bytes_per_s if profile.links else None
    spare = profile.memory_bytes * (1 - utilization) * pool.tp
    return UnitDevice(unit, spare, speed, model.kv_bytes_per_token)


def parallel_shape(topology: TopologySpec) -> Parallel:
    """How the GPUs of one instance of the first pool share the model."""
    return _shape(topology.pools[0], topology.link)


def _shape(pool: PoolSpec, link: str) -> Parallel:
    """How units of the pool share the model; units in lockstep hold all of it, each for itself."""
    return Parallel(pool.tp, 1 if pool.lockstep else pool.dp, pool.ep, link)


@dataclass(frozen=True)
class SavingCost:
    """Steps of a prefill instance: ordinary steps plus ``prompt_s`` per prompt to save its KV."""

    base: CostModel
    prompt_s: float

    def step_s(self, shape: StepShape) -> float:
        """Time (s) of one step."""
        return self.base.step_s(shape) + self.prompt_s * len(shape.prefill)


def saving_kv(unit: UnitDevice, ms_per_layer: float) -> UnitDevice:
    """The unit as a prefill instance; a device made by hand, whose layers are unknown, is returned unchanged."""
    if unit.device.geometry is None or not ms_per_layer:
        return unit
    cost = SavingCost(unit.device.cost, unit.device.geometry.layers * ms_per_layer * 1e-3)
    return replace(unit, device=replace(unit.device, cost=cost))


@lru_cache(maxsize=8)
def _loaded(request: DeviceRequest) -> Device:
    return load(request)
