"""Options of several instances, as ``ebbench run`` takes them: topology, dispatch policies, replicas."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ebbench.cli.options import opt
from ebbench.errors import UsageError

if TYPE_CHECKING:
    from ebbench.config.topology import TopologySpec
    from ebbench.dispatch import DispatchSpec
    from ebbench.engines.base import Engine

_PANEL = "Several instances"


_opt = partial(opt, panel=_PANEL)


@dataclass(frozen=True)
class ClusterAsked:
    """What was asked for; None where nothing was."""

    topology: Annotated[
        str | None,
        _opt("--topology", help="dp=4, 2p2d, tp=4,dp=8,ep=32, ... or a TOML file with a \\[topology] table."),
    ] = None
    dispatch: Annotated[
        str | None,
        _opt(
            "--dispatch",
            help="round-robin, least-outstanding (default), power-of-two, prefix-affine, iqr or sbs\\[:key=value,...].",
        ),
    ] = None
    decode_dispatch: Annotated[
        str | None, _opt("--decode-dispatch", help="The same in front of the decode pool. Default: iqr with sbs.")
    ] = None
    replicas: Annotated[
        int | None,
        _opt("--replicas", help="Engines behind a dispatcher: vLLM servers and the gateway, or simulated ones."),
    ] = None


def with_cluster(engine: Engine, asked: ClusterAsked, scenario: str | None) -> tuple[Engine, str]:
    """The engine for several instances, and a sentence about them; the engine as it is where nothing was asked for.

    A scenario file may bring a topology of its own; ``--topology`` goes before it. Raises UsageError.
    """
    from ebbench.dispatch import parse_dispatch

    topology = _topology(asked, scenario)
    if asked.replicas is not None and asked.replicas < 1:
        raise UsageError(f"--replicas must be at least 1, not {asked.replicas}")
    if topology is None and asked.replicas is None:
        if asked.dispatch or asked.decode_dispatch:
            raise UsageError(
                "--dispatch chooses among several instances: give --topology (for example dp=4) or --replicas"
            )
        return engine, ""
    dispatch = parse_dispatch(asked.dispatch or "least-outstanding")
    decode = parse_dispatch(asked.decode_dispatch or ("iqr" if dispatch.kind == "sbs" else "least-outstanding"))
    if engine.name == "sim":
        from ebbench.engines.cluster import ClusterEngine

        if topology is None:
            topology = _replicas(asked.replicas or 1)
        elif asked.replicas is not None:
            raise UsageError("--topology says how many instances there are; leave out --replicas")
        words = f"{topology.label} ({topology.gpus} GPUs), dispatch {dispatch.name}"
        return ClusterEngine(topology, dispatch, decode), words
    if engine.name == "vllm":
        return _servers(engine, asked, topology, dispatch)
    raise UsageError(
        f"--topology is for engine sim and --replicas for sim and vllm, not {engine.name}; for servers of your own, "
        "put `ebbench gateway` in front of them and give its URL as --engine"
    )


def _servers(
    engine: Engine, asked: ClusterAsked, topology: TopologySpec | None, dispatch: DispatchSpec
) -> tuple[Engine, str]:
    """Several vLLM servers and the gateway in front of them."""
    from ebbench.extras import need

    if topology is not None:
        raise UsageError(
            f"topology {topology.label} can only be simulated (--engine sim); for servers write --replicas N"
        )
    if asked.decode_dispatch is not None:
        raise UsageError("--decode-dispatch is for simulated decode pools (--engine sim); leave it out")
    for module in ("starlette", "uvicorn"):
        need(module, "several servers behind a gateway", "gateway")
    from ebbench.engines.replicas import ReplicatedVllmEngine

    count = asked.replicas or 1
    words = f"{count} servers behind a gateway, dispatch {dispatch.name}"
    given = {field.name: getattr(engine, field.name) for field in fields(engine) if field.init}  # type: ignore[arg-type]
    return ReplicatedVllmEngine(**given, replicas=count, dispatch=dispatch.name), words


def _topology(asked: ClusterAsked, scenario: str | None) -> TopologySpec | None:
    wanted: TopologySpec | str | None = asked.topology
    if wanted is None and scenario is not None:
        from ebbench.traffic.spec import load_scenario

        wanted = load_scenario(scenario).topology
    if isinstance(wanted, str):
        from ebbench.config.topology import parse_topology

        return parse_topology(wanted)
    return wanted


def _replicas(count: int) -> TopologySpec:
    from ebbench.config.topology import PoolSpec, TopologySpec

    return TopologySpec(replicas=PoolSpec(instances=count))
