"""Creates engines from their settings, for the hardware of this machine as its drivers name it.

The only module that knows which settings each engine supports.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ebbench.config.declare import option_name
from ebbench.devices.base import Device, StepShape
from ebbench.engines.base import Engine
from ebbench.errors import UnknownNameError, UsageError
from ebbench.records.warnings import RunWarning, warning
from ebbench.spec.server import is_server
from vllm_eb.calibration import Calibration
from vllm_eb.policy import PolicyError, PolicySpec, parse_policy

if TYPE_CHECKING:
    from ebbench.config.topology import TopologySpec
    from ebbench.dispatch import DispatchSpec
    from ebbench.records.plan import Plan
    from ebbench.records.run import RunWriter
    from ebbench.spec.client import ClientOptions
    from ebbench.spec.run import ClusterOptions, RunSpec


# The policy's name on a run of a server that ebbench did not start: as stated by the user, or by the server.


@dataclass(frozen=True)
class PolicyLabel:
    """The policy that a run is labelled with, and what qualifies that."""

    policy: PolicySpec
    warnings: tuple[RunWarning, ...] = ()


def policy_label(engine: Engine, policy: PolicySpec, *, stated: bool = True) -> PolicyLabel:
    """The label of runs on a server. One with the vllm_eb plugin reports its policy in /metrics.

    ``stated``: the user named the policy, and did not leave it at its default. Raises UsageError if the server reports
    another policy than was stated, RunError if it is not ready.
    """
    from ebbench.client.server_queries import POLICY, read_reports
    from ebbench.engines.endpoint import EndpointEngine

    name = read_reports(engine.url, engine.client).get(POLICY) if isinstance(engine, EndpointEngine) else None
    try:
        reported = None if name is None else parse_policy(name)
    except PolicyError:
        reported = None  # of a version of the plugin that we do not know
    if reported is None:
        return PolicyLabel(policy, (warning("policy-is-a-label", stated=stated),))
    if stated and reported != policy:
        raise UsageError(
            f"the server reports policy {reported.name}, not {policy.name}: leave --policy out, or "
            "start the server with the policy that you mean"
        )
    return PolicyLabel(reported)


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


_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+(/|$)")
ENGINES = ("auto", "sim", "emulated", "vllm")


def select_engine(name: str) -> tuple[Engine, str]:
    """The engine of that name (or URL), and a sentence that tells the user which engine runs and why."""
    if is_server(name):
        from ebbench.engines.endpoint import EndpointEngine

        return EndpointEngine(name), f"engine: the server at {name}"
    if name not in ENGINES and ("://" in name or _HOST_AND_PORT.match(name)):
        address = name.partition("://")[2] or name
        raise UsageError(f"--engine {name}: write a server's URL as http://HOST:PORT" + _hint(address))
    if name not in ENGINES:
        raise UnknownNameError("engine", name, (*ENGINES, "http://HOST:PORT"))
    if name == "auto":
        chosen, why = _automatic()
        engine, _ = select_engine(chosen)
        return engine, f"engine: {chosen} ({why})"
    if name == "sim":
        from ebbench.engines.sim import SimEngine

        return SimEngine(), "engine: sim (vLLM's scheduling rules on an emulated device, virtual time)"
    if name == "emulated":
        from ebbench.engines.emulated import EmulatedEngine

        return EmulatedEngine(), "engine: emulated (the real vLLM scheduler on an emulated device, virtual time)"
    from ebbench.engines.vllm import VllmEngine

    return VllmEngine(), "engine: vllm (a vLLM server started for this run)"


def _hint(address: str) -> str:
    if _HOST_AND_PORT.match(address):
        return f", such as http://{address}"
    return "; Unix sockets and other schemes are not supported"


def chosen_engine(name: str) -> str:
    """The engine that ``auto`` means on this machine; another name is itself."""
    return _automatic()[0] if name == "auto" else name


def _automatic() -> tuple[str, str]:
    if importlib.util.find_spec("vllm") is None:
        return "sim", "vLLM is not installed"
    if not _gpu_visible():
        return "sim", "no GPU is visible"
    return "vllm", "vLLM is installed and a GPU is visible"


def _gpu_visible() -> bool:
    return shutil.which("nvidia-smi") is not None and any(Path("/dev").glob("nvidia[0-9]*"))


def make_engine(spec: RunSpec) -> tuple[Engine, str]:
    """The engine of a run with its settings, and a sentence that names it.

    Raises UsageError for a setting that the engine does not support.
    """
    engine, sentence = select_engine(spec.engine)
    if is_server(spec.engine):
        engine = _for_server(engine, spec)
    engine = _serving(engine, spec)
    engine, several = with_cluster(engine, spec.cluster, spec.plan.scenario)
    if (given := spec.client.given()) and (client := client_options(engine, given)) is not None:
        _check_tls(engine, given)
        engine = with_client(engine, replace(client, **given))
    return engine, f"{sentence}; {several}" if several else sentence


def refuse_limits_on_tokens(client: ClientOptions, limits: Iterable[str]) -> None:
    """Raise UsageError for a limit such as ``ttft:50`` where answers have no tokens; ``e2el`` they have."""
    of_tokens = [] if client.generates else [limit for limit in limits if "e2el" not in limit.split(":")]
    if of_tokens:
        raise UsageError(f"{of_tokens[0]}: answers of --endpoint {client.endpoint} have no tokens; limit e2el")


def _for_server(engine: Engine, spec: RunSpec) -> Engine:
    from ebbench.engines.endpoint import EndpointEngine

    if not isinstance(engine, EndpointEngine):
        return engine
    plan = spec.plan
    refuse_limits_on_tokens(spec.client, spec.goodput.replace(",", " ").split())
    client = replace(
        engine.client, model=spec.model, max_model_len=plan.max_model_len, drop_too_long=plan.drop_too_long,
        tokenizer=plan.tokenizer,
    )  # fmt: skip
    return replace(engine, client=client)


def _serving(engine: Engine, spec: RunSpec) -> Engine:
    """A vLLM engine with its model and vLLM's own options; other engines unchanged."""
    if engine.name != "vllm" and not spec.vllm_options:
        return engine
    from ebbench.engines.vllm import VllmEngine
    from ebbench.engines.vllm_command import check_vllm_options

    check_vllm_options(spec.vllm_options)
    if engine.name != "vllm":
        given = " ".join(spec.vllm_options)
        raise UsageError(f"arguments after -- are for `vllm serve`, which engine {engine.name} does not start: {given}")
    assert isinstance(engine, VllmEngine)
    return replace(engine, model=spec.model or engine.model, vllm_options=spec.vllm_options)


def client_options(engine: Engine, given: Collection[str] = ()) -> ClientOptions | None:
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
    from ebbench.client.release_schedule import ramped
    from ebbench.spec.client import ClientOptions

    client = client_options(engine)
    if client is None and plan.closed_loop:
        raise UsageError(f"--ramp-up of a closed loop needs a server; engine {engine.name} fills its slots at once")
    plan, options = ramped(plan, client or ClientOptions(), ramp_up_s)
    return plan, with_client(engine, options)


def journalled(engine: Engine, writer: RunWriter) -> Engine:
    """The engine with a journal of finished requests; an engine in virtual time is returned unchanged."""
    from ebbench.engines.endpoint import SendingEngine
    from ebbench.records.run import Journal

    if not isinstance(engine, SendingEngine):
        return engine
    return replace(engine, on_batch=Journal(writer, "requests").add, log=writer.path / "server.log")


def recording(engine: Engine, *, stored: bool) -> Engine:
    """A simulator that keeps as much as is stored: its steps in parts, or, of one instance, none; other engines
    unchanged."""
    if not hasattr(engine, "figures_only") or (simulated_pools(engine) is not None and not stored):
        return engine
    return replace(engine, steps_in_parts=stored, figures_only=not stored)  # type: ignore[type-var]


def simulated_pools(engine: Engine) -> TopologySpec | None:
    """The instances of a simulation; None for one, and for other engines."""
    pools: TopologySpec | None = getattr(engine, "topology", None)
    return pools


def with_cluster(engine: Engine, cluster: ClusterOptions, scenario: str | None) -> tuple[Engine, str]:
    """The engine for several instances, and a sentence about them; the engine unchanged if no such option was given.

    A scenario file may contain a topology; a given one takes precedence. Raises UsageError.
    """
    spec, replicas = resolve_topology(cluster.topology, scenario, cluster.link), cluster.replicas
    if spec is None and replicas is None:
        if cluster.dispatch or cluster.decode_dispatch:
            raise UsageError(
                "--dispatch chooses among several instances: give --topology (for example dp=4) or --replicas"
            )
        return engine, ""
    from ebbench.dispatch import DEFAULT_DISPATCH, parse_dispatch

    front = parse_dispatch(cluster.dispatch or DEFAULT_DISPATCH)
    decode = parse_dispatch(cluster.decode_dispatch) if cluster.decode_dispatch else None
    if engine.name == "sim":
        return _simulated(spec, replicas, front, decode)
    if engine.name == "vllm":
        if decode is not None:
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
    return SimEngine(spec, front.name, decode.name), words


def _servers(engine: Engine, spec: TopologySpec | None, dispatch: DispatchSpec, count: int) -> tuple[Engine, str]:
    """Several vLLM servers behind the gateway."""
    from ebbench.installation import need

    if spec is not None:
        raise UsageError(f"topology {spec.label} can only be simulated (--engine sim); for servers write --replicas N")
    for module in ("starlette", "uvicorn"):
        need(module, "several servers behind a gateway", "gateway")
    words = f"{count} servers behind a gateway, dispatch {dispatch.name}"
    return replace(engine, replicas=count, dispatch=dispatch.name), words  # type: ignore[type-var]


def resolve_topology(wanted: TopologySpec | str | None, scenario: str | None, link: str | None) -> TopologySpec | None:
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
