"""Runs the gateway under uvicorn."""

from __future__ import annotations

from collections.abc import Callable

import uvicorn
import uvloop

from ebbench.errors import RunError
from ebbench.gateway.app import Gateway, make_app
from ebbench.gateway.client_limits import LimitedProtocol
from ebbench.gateway.settings import GatewaySettings
from ebbench.process.open_files import allow_open_files

_CONNECTIONS = 65_536  # of clients and to upstreams, as far as the system lets


def serve(settings: GatewaySettings, on_ready: Callable[[int], None]) -> None:
    """Check the upstreams, then serve until SIGTERM or SIGINT; ``on_ready`` receives the port.

    Raises UsageError and RunError before the first request is served. Open requests get ``drain_s`` seconds to end.
    """
    allow_open_files(_CONNECTIONS)
    uvloop.run(_serve(settings.checked(), on_ready))


async def _serve(settings: GatewaySettings, on_ready: Callable[[int], None]) -> None:
    gateway = Gateway(settings)
    try:
        await gateway.start()
    except BaseException:
        await gateway.close()
        raise
    config = uvicorn.Config(
        make_app(gateway),
        host=settings.host,
        port=settings.port,
        loop="none",
        http=LimitedProtocol,
        proxy_headers=False,  # who is on this machine is not for a header to say
        ws="none",
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        backlog=4096,
    )
    server = _Server(config, on_ready)
    try:
        await server.serve()
    except SystemExit:
        raise RunError(
            f"cannot listen on {settings.host}:{settings.port}; is the port taken? Give another --port"
        ) from None
    finally:
        if not server.started:
            await gateway.close()
    if server.started:
        # Only a signal ends it. uvicorn raises that signal again as SIGINT, in vain where a shell had SIGINT ignored.
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """uvicorn's server, which calls ``on_ready`` with the port once it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """uvicorn's start-up, then ``on_ready``."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._on_ready(int(self.servers[0].sockets[0].getsockname()[1]))
