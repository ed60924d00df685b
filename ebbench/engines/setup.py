"""Creates engines from their settings; the only module that knows which settings each engine supports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ebbench.config.server_url import is_server_url
from ebbench.config.setting_strings import option_name
from ebbench.devices.base import Device, StepShape
from ebbench.engines.base import Engine
from ebbench.errors import UsageError
from vllm_eb.calibration import Calibration

if TYPE_CHECKING:
    from ebbench.client import ClientOptions
    from ebbench.config.topology import TopologySpec
    from ebbench.dispatch import DispatchSpec
    from ebbench.engines.label import PolicyLabel
    from ebbench.records.plan import Plan
    from ebbench.records.run import RunWriter
    from vllm_eb.policy import PolicySpec


def is_server(engine: str) -> bool:
    """Whether the engine is a server that ebbench does not start: it is only measured, and policies are labels."""
    return is_server_url(engine)


class _NoCost:
    """Cost model of a server, which is measured and not predicted."""

    def step_s(self, shape: StepShape) -> float:
        """Raise RuntimeError: engines that measure have no cost model."""
        raise RuntimeError("a server has no cost model")


def unknown_device(device: str | None, model: str | None) -> Device:
    """A placeholder for the hardware behind an external server: the given names without a cost model."""
    nothing = Calibration(alpha_p=1.0, beta_p=1.0, alpha_d=1.0, beta_d=1.0, source="none: a server")
    return Device(
        device or "unknown",
        model or "unknown",
        _NoCost(),
        0,
        nothing,
        "a server, measured from outside",
        costs_known=False,
    )


@dataclass(frozen=True)
class EngineSetup:
    """Settings of an engine besides the scheduler's options; None if not given.

    ``engine``: auto, sim, emulated, vllm or a server's URL. ``model``: the model that a server serves. ``client``: load
    generator options that were set, by the field names of ClientOptions. ``scenario``: may also contain a topology.
    ``drop_too_long``: leave out requests longer than ``max_model_len`` tokens. ``vllm_options``: arguments for ``vllm
    serve`` that ebbench does not know. The others are those of :func:`with_cluster`.
    """

    engine: str = "auto"
    model: str | None = None
    client: Mapping[str, Any] = field(default_factory=dict)
    scenario: str | None = None
    topology: TopologySpec | str | None = None
    link: str | None = None
    dispatch: str | None = None
    decode_dispatch: str | None = None
    replicas: int | None = None
    max_model_len: int | None = None
    drop_too_long: bool = False
    vllm_options: tuple[str, ...] = ()


def make_engine(setup: EngineSetup) -> tuple[Engine, str]:
    """The engine with its settings, and a sentence that names it.

    Raises UsageError for a setting that the engine does not support.
    """
    from ebbench import engines

    engine, sentence = engines.select_engine(setup.engine)
    if is_server(setup.engine):
        engine = _for_server(engine, setup)
    engine = _serving(engine, setup)
    engine, several = with_cluster(
        engine,
        setup.scenario,
        topology=setup.topology,
        link=setup.link,
        dispatch=setup.dispatch,
        decode_dispatch=setup.decode_dispatch,
        replicas=setup.replicas,
    )
    if setup.client and (client := client_of(engine, setup.client)) is not None:
        _check_tls(engine, setup.client)
        engine = with_client(engine, replace(client, **setup.client))
    return engine, f"{sentence}; {several}" if several else sentence


def _for_server(engine: Engine, setup: EngineSetup) -> Engine:
    from ebbench.engines.endpoint import EndpointEngine

    if not isinstance(engine, EndpointEngine):
        return engine
    client = replace(
        engine.client, model=setup.model, max_model_len=setup.max_model_len, drop_too_long=setup.drop_too_long
    )
    return replace(engine, client=client)


def _serving(engine: Engine, setup: EngineSetup) -> Engine:
    """A vLLM engine with its model and vLLM's own options; other engines unchanged."""
    if engine.name != "vllm" and not setup.vllm_options:
        return engine
    from ebbench.engines.vllm import VllmEngine
    from ebbench.engines.vllm_command import check_vllm_options

    if engine.name != "vllm":
        check_vllm_options(setup.vllm_options)
        given = " ".join(setup.vllm_options)
        raise UsageError(f"arguments after -- are for `vllm serve`, which engine {engine.name} does not start: {given}")
    assert isinstance(engine, VllmEngine)
    check_vllm_options(setup.vllm_options)
    return replace(engine, model=setup.model or engine.model, vllm_options=setup.vllm_options)


def policy_label(engine: Engine, policy: PolicySpec, *, stated: bool = True) -> PolicyLabel:
    """:func:`ebbench.engines.label.labelled`, imported here so that no simulated cell depends on the client's code."""
    from ebbench.engines.label import labelled

    return labelled(engine, policy, stated=stated)


def client_of(engine: Engine, given: Collection[str] = ()) -> ClientOptions | None:
    """The load generator options of an engine; None if it sends no requests.

    ``given``: names of load generator options that were set. Raises UsageError if there are some and the engine sends
    no requests.
    """
    from ebbench.engines.endpoint import SendingEngine

    if isinstance(engine, SendingEngine):
        return engine.client
    for name in given:
        flag = _FLAGS.get(name, option_name(name))
        raise UsageError(f"{flag} is for sending requests, which engine {engine.name} does not do; give a server's URL")
    return None


_FLAGS = {"headers": "--header", "verify_tls": "--insecure", "client_nodes": "--workers ray:N"}


def _check_tls(engine: Engine, given: Collection[str]) -> None:
    """Raise UsageError for options of an encrypted connection to a server that is asked without one."""
    url = str(getattr(engine, "url", ""))
    for name in ("ca_file", "verify_tls"):
        if name in given and url.lower().startswith("http:"):
            flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
            raise UsageError(f"{flag} is for https, and {url} is asked without it; write https:// or leave {flag} out")


def with_client(engine: Engine, client: ClientOptions) -> Engine:
    """The engine with these load generator options; an engine that sends no requests is returned unchanged."""
    from ebbench.engines.endpoint import SendingEngine

    return replace(engine, client=client) if isinstance(engine, SendingEngine) else engine


def with_ramp(plan: Plan, engine: Engine, ramp_up_s: float | None) -> tuple[Plan, Engine]:
    """Plan and engine with a ramp of ``ramp_up_s`` seconds (None: no ramp).

    Raises UsageError if the engine does not support it.
    """
    if ramp_up_s is None:
        return plan, engine
    from ebbench.client import ClientOptions
    from ebbench.client.ramp import ramped

    client = client_of(engine)
    if client is None and plan.closed_loop:
        raise UsageError(f"--ramp-up of a closed loop needs a server; engine {engine.name} fills its slots at once")
    plan, options = ramped(plan, client or ClientOptions(), ramp_up_s)
    return plan, with_client(engine, options)


def journalled(engine: Engine, writer: RunWriter) -> Engine:
    """The engine with a journal of finished requests; an engine in virtual time is returned unchanged."""
    from ebbench.engines.endpoint import SendingEngine
    from ebbench.records.journal import Journal

    if not isinstance(engine, SendingEngine):
        return engine
    return replace(engine, on_batch=Journal(writer, "requests").add, log=writer.path / "server.log")


def with_step_parts(engine: Engine) -> Engine:
    """The engine as a run that is stored needs it: a simulation gives its steps in parts."""
    from ebbench.engines.sim import SimEngine

    return replace(engine, steps_in_parts=True) if isinstance(engine, SimEngine) else engine


def with_cluster(
    engine: Engine,
    scenario: str | None,
    *,
    topology: TopologySpec | str | None = None,
    link: str | None = None,
    dispatch: str | None = None,
    decode_dispatch: str | None = None,
    replicas: int | None = None,
) -> tuple[Engine, str]:
    """The engine for several instances, and a sentence about them; the engine unchanged if no such option was given.

    A scenario file may contain a topology; ``topology`` takes precedence. Raises UsageError.
    """
    from ebbench.dispatch import DEFAULT_DISPATCH, parse_dispatch

    spec = topology_of(topology, scenario, link)
    if replicas is not None and replicas < 1:
        raise UsageError(f"--replicas must be at least 1, not {replicas}")
    if spec is None and replicas is None:
        if dispatch or decode_dispatch:
            raise UsageError(
                "--dispatch chooses among several instances: give --topology (for example dp=4) or --replicas"
            )
        return engine, ""
    front = parse_dispatch(dispatch or DEFAULT_DISPATCH)
    decode = parse_dispatch(decode_dispatch) if decode_dispatch else None
    if engine.name == "sim":
        return _simulated(spec, replicas, front, decode)
    if engine.name == "vllm":
        if decode_dispatch is not None:
            raise UsageError("--decode-dispatch is for simulated decode pools (--engine sim); leave it out")
        return _servers(engine, spec, front, replicas or 1)
    raise UsageError(
        f"--topology is for engine sim and --replicas for sim and vllm, not {engine.name}; for servers of your own, "
        "put `ebbench gateway` in front of them and give its URL as --engine"
    )


def _simulated(
    spec: TopologySpec | None, replicas: int | None, front: DispatchSpec, decode: DispatchSpec | None
) -> tuple[Engine, str]:
    """The simulator with several instances."""
    from ebbench.config.topology import PoolSpec, TopologySpec
    from ebbench.dispatch import DEFAULT_DISPATCH, parse_dispatch
    from ebbench.engines.sim import SimEngine

    if spec is None:
        spec = TopologySpec(replicas=PoolSpec(instances=replicas or 1))
    elif replicas is not None:
        raise UsageError("--topology sets the number of instances; leave out --replicas")
    if decode is not None and not spec.disaggregated:
        raise UsageError(
            f"--decode-dispatch is for a decode pool, which {spec.label} has not; leave it out, or give --topology 1p1d"
        )
    decode = decode or parse_dispatch("iqr" if front.kind == "sbs" else DEFAULT_DISPATCH)
    words = f"{spec.label} ({spec.gpus} GPUs), dispatch {front.name}"
    return SimEngine(spec, front, decode), words


def _servers(engine: Engine, spec: TopologySpec | None, dispatch: DispatchSpec, count: int) -> tuple[Engine, str]:
    """Several vLLM servers behind the gateway."""
    from ebbench.extras import need

    if spec is not None:
        raise UsageError(f"topology {spec.label} can only be simulated (--engine sim); for servers write --replicas N")
    for module in ("starlette", "uvicorn"):
        need(module, "several servers behind a gateway", "gateway")
    from ebbench.engines.replicas import ReplicatedVllmEngine

    words = f"{count} servers behind a gateway, dispatch {dispatch.name}"
    given = {field.name: getattr(engine, field.name) for field in fields(engine) if field.init}  # type: ignore[arg-type]
    return ReplicatedVllmEngine(**given, replicas=count, dispatch=dispatch.name), words


def topology_of(wanted: TopologySpec | str | None, scenario: str | None, link: str | None) -> TopologySpec | None:
    """The given topology, else the scenario's, with the given link. Raises UsageError."""
    if wanted is None and scenario is not None:
        from ebbench.traffic.spec import load_scenario

        wanted = load_scenario(scenario).topology
    if isinstance(wanted, str):
        from ebbench.config.topology import parse_topology

        wanted = parse_topology(wanted)
    if link is None:
        return wanted
    if wanted is None:
        raise UsageError("--link joins the GPUs of a topology: give --topology (for example tp=2)")
    if not wanted.disaggregated and all(shape.tp == 1 and shape.ep == 1 for shape in wanted.pools):
        raise UsageError(
            f"--link {link} changes nothing in {wanted.label}: its GPUs share no model; leave it out, or give tp or ep"
        )
    return msgspec.structs.replace(wanted, link=link)
