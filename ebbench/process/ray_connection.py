"""Joining a Ray cluster: the one at an address, or a new one on this machine.

Sweeps run their cells on it, the load generator its clients.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ebbench.errors import RunError
from ebbench.installation import need
from ebbench.process.child import descendants_guarded
from ebbench.process.termination import signals_kept

THIS_MACHINE = "local"
"""The address of a new cluster on this machine that ends with this process."""
CONNECT_S = 5.0
"""How long an address may take to accept a connection."""


def ray_for(option: str) -> Any:
    """The module ``ray``. Raises EbbenchError, which names ``option``, if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return need("ray", option, "sweep")


def given_address(address: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The address asked for, else RAY_ADDRESS; None without either.

    By default Ray itself joins the cluster last started on this machine, even another user's.
    """
    return address or environ.get("RAY_ADDRESS") or None


@contextmanager
def joined(ray: Any, address: str, *, own_cpus: int | None = None) -> Iterator[None]:
    """Inside, this process is connected to the cluster at ``address``: ``auto``, ``HOST:PORT`` or THIS_MACHINE.

    A process that is connected already stays so. ``own_cpus``: CPUs of a new cluster. Raises RunError if there is no
    cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    with _guarded(address):
        _connect(ray, address, own_cpus)
        try:
            yield
        finally:
            ray.shutdown()


def _guarded(address: str) -> AbstractContextManager[None]:
    """A cluster of its own ends with this process: Ray's agents notice a minute late that it was killed."""
    return descendants_guarded() if address == THIS_MACHINE else nullcontext()


def _connect(ray: Any, address: str, own_cpus: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == THIS_MACHINE:
        options |= {"include_dashboard": False, "num_cpus": own_cpus}
    else:
        _check_listening(address)
    try:
        with signals_kept():  # Ray handles SIGTERM with sys.exit, which would lose measurements
            ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "this machine" if address == THIS_MACHINE else address
        raise RunError(f"no Ray cluster at {where}: {str(error).splitlines()[0]}") from None


def _check_listening(address: str) -> None:
    """Raise RunError if nothing accepts a connection: Ray would retry for minutes without a message."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():  # neither auto nor a URL of Ray
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise RunError(f"no Ray cluster at {address}: {error}") from None
