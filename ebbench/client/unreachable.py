"""Why a server cannot be reached: certificates, TLS where none is spoken, proxies that are not used."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from ebbench.config.server_url import ServerUrl
from ebbench.network.connections import tls_context

_PROBE_S = 2.0
_CERTIFICATES = (
    (("mismatch", "not valid for"), "the certificate is for other names: use one of them in the URL"),
    (("expired",), "the server needs a new certificate"),
    (("not yet valid",), "check the clocks of both machines"),
    (("",), "give its certificate authority with --ca-file FILE or in SSL_CERT_FILE"),
)
"""Words of OpenSSL's reason, in lower case, and what helps."""


def certificate_remedy(reason: str) -> str | None:
    """What to do about a certificate that was not accepted; None if the reason is another one."""
    if "CERTIFICATE_VERIFY_FAILED" not in reason:
        return None
    remedy = next(remedy for words, remedy in _CERTIFICATES if any(word in reason.lower() for word in words))
    return f"{remedy}, or do not verify: --insecure"


def unused_proxy(server: ServerUrl, environ: Mapping[str, str]) -> str | None:
    """A sentence if the environment names a proxy for this server, which the measuring client does not use."""
    host = urlsplit(server.root).hostname or ""
    no_proxy = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    direct = [name.strip().lstrip(".") for name in no_proxy.split(",") if name.strip()]
    if any(name in ("*", host) or host.endswith(f".{name}") for name in direct):
        return None
    names = ("https_proxy" if server.secure else "http_proxy", "all_proxy")
    named = next((one for name in names for one in (name, name.upper()) if environ.get(one)), None)
    if named is None:
        return None
    return f"{named} names a proxy, and ebbench uses none: give an address that this machine reaches without it"


async def other_protocol(server: ServerUrl) -> str | None:
    """A sentence if the server speaks TLS where the URL says http, or plain HTTP where it says https."""
    address = urlsplit(server.root)
    host, port = address.hostname or "", address.port or (443 if server.secure else 80)
    with contextlib.suppress(OSError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError):
        async with asyncio.timeout(_PROBE_S):
            if server.secure and await _speaks_http(host, port):
                return "it answers without TLS: write http://"
            if not server.secure and await _speaks_tls(host, port):
                return "it speaks TLS: write https://"
    return None


async def _speaks_http(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % host.encode())
        return await reader.readexactly(5) == b"HTTP/"
    finally:
        writer.close()


async def _speaks_tls(host: str, port: int) -> bool:
    _, writer = await asyncio.open_connection(host, port, ssl=tls_context(verify=False), server_hostname=host)
    writer.close()
    return True
