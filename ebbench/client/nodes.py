"""The client machines of a Ray cluster: which are used, and calls to them that end in every case."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

import ebbench
from ebbench.client.messages import Place
from ebbench.client.ray_node import RayNode, this_place
from ebbench.errors import RunError, UsageError
from ebbench.process.ray_connection import given_address, joined, ray_for
from ebbench.spec.client import ClientOptions

START_S = 60.0
"""How long a node may take to start its client."""
_OPTION = "--workers ray:N"
_PLACE = msgspec.msgpack.Decoder(Place)


class CallFailedError(Exception):
    """A call to a node that brought no result: the node is gone, or silent."""


@dataclass(frozen=True)
class ClientNode:
    """A node of the cluster and the actor on it."""

    ray: Any
    address: str
    actor: Any
    place: Place

    def end(self) -> None:
        """End the actor and with it its worker processes."""
        self.ray.kill(self.actor, no_restart=True)


def wants_nodes(options: ClientOptions) -> bool:
    """Whether client machines of a Ray cluster send the plan."""
    return options.client_nodes is not None or options.ray_address is not None


@contextlib.asynccontextmanager
async def client_nodes(
    url: str, options: ClientOptions, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[Sequence[ClientNode]]:
    """Start one client on each of ``options.client_nodes`` nodes (None: all); on exit, end them in every case.

    Raises EbbenchError without Ray, UsageError for too few nodes or a server that they cannot reach, RunError for a
    cluster that does not answer.
    """
    address = given_address(options.ray_address, environ)
    if address is None:
        raise UsageError(f"{_OPTION} needs the address of a Ray cluster: give --ray-address auto or HOST:PORT")
    ray = ray_for(_OPTION)
    with joined(ray, address):
        actors = [(one["NodeManagerAddress"], _actor(ray, one["NodeID"])) for one in _chosen(ray, options.client_nodes)]
        try:
            nodes = await asyncio.gather(*(_started(ray, *one) for one in actors))
            check_reachable(url, nodes)
            yield nodes
        finally:
            for _, actor in actors:
                ray.kill(actor, no_restart=True)


async def result_of(call: Any, timeout_s: float) -> Any:
    """The result of a remote call. Raises CallFailedError if its node is lost or does not answer in time."""
    future = asyncio.wrap_future(call.future())
    done, _ = await asyncio.wait([future], timeout=timeout_s)
    if not done:
        future.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise CallFailedError(f"no answer for {timeout_s:g} s")
    try:
        return future.result()
    except ray_for(_OPTION).exceptions.RayError as error:
        raise CallFailedError(_line_of(error)) from None


def _line_of(error: Exception) -> str:
    """One line of a Ray error: the last line of a remote traceback, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    remote = [line for line in lines if "Error: " in line]
    return (remote[-1] if remote else lines[0])[:200]


def _chosen(ray: Any, asked: int | None) -> list[dict[str, Any]]:
    """The nodes that send: those with a CPU for a client, by address. Raises UsageError for too few."""
    able = [one for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU", 0) >= 1]
    able.sort(key=lambda one: (one["NodeManagerAddress"], one["NodeID"]))
    count = len(able) if asked is None else asked
    if count > len(able) or not able:
        raise UsageError(
            f"--workers ray:{count or 1}: the Ray cluster has {len(able)} node(s) with a CPU; start more with "
            "`ray start --address=HOST:PORT` on other machines, or ask for fewer"
        )
    return able[:count]


def _actor(ray: Any, node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return ray.remote(RayNode).options(num_cpus=1, max_restarts=0, scheduling_strategy=there).remote()


async def _started(ray: Any, address: str, actor: Any) -> ClientNode:
    try:
        place = _PLACE.decode(await result_of(actor.place.remote(), START_S))
    except CallFailedError as error:
        raise RunError(
            f"client node {address} did not start ({error}); it needs a free CPU and the same ebbench as this machine"
        ) from None
    if place.version != ebbench.__version__:
        raise RunError(f"client node {address} has ebbench {place.version}, this machine {ebbench.__version__}")
    return ClientNode(ray, address, actor, place)


def check_reachable(url: str, nodes: Sequence[ClientNode]) -> None:
    """Raise UsageError for a server on this machine's loopback address that another machine is to load."""
    host = urlsplit(url).hostname or ""
    if not _is_loopback(host):
        return
    here = this_place()
    away = [one.address for one in nodes if (one.place.machine, one.place.network) != (here.machine, here.network)]
    if away:
        raise UsageError(
            f"{url} is an address of this machine only, which client node {away[0]} cannot reach; let the server "
            "listen on an address of the network and give that"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
