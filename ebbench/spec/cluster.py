"""Several instances: topology, dispatch policies, replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbench.config.declare import CLUSTER, declare
from ebbench.config.topology import TopologySpec


@dataclass(frozen=True)
class ClusterOptions:
    """Several instances; None where not given. A scenario file may contain a topology, too."""

    topology: TopologySpec | str | None = declare(
        None, "dp=4, 2p2d, tp=4,dp=8,ep=32, ... or a TOML file with a \\[topology] table.", CLUSTER, text=str
    )
    link: str | None = declare(
        None, "Kind of link between the GPUs of a server: pcie, nvlink, ...; see `ebbench devices show`.", CLUSTER
    )
    dispatch: str | None = declare(
        None, "round-robin, least-outstanding (default), power-of-two, prefix-affine, iqr or sbs\\[:key=value,...].",
        CLUSTER, complete="dispatch",
    )  # fmt: skip
    decode_dispatch: str | None = declare(None, "Dispatch policy of the decode pool. Default: iqr with sbs.", CLUSTER)
    replicas: int | None = declare(
        None, "Engines behind a dispatcher: vLLM servers and the gateway, or simulated ones.", CLUSTER
    )

    def named(self) -> ClusterOptions:
        """The same with the topology's label, for tables and file names."""
        topology = self.topology
        return replace(self, topology=topology.label) if isinstance(topology, TopologySpec) else self
