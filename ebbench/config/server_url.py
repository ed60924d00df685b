"""The URL of a server as users paste it, and the URLs of its pages and of its API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from ebbench.errors import UsageError

_SCHEME = re.compile(r"https?://", re.IGNORECASE)
_VERSION = re.compile(r"v\d+[a-z]*\d*")
"""A path segment that names a version of an API: v1, v3, v1beta, v1alpha2."""
_CREDENTIAL = re.compile(r"key|token|secret|passw|auth|credential|^sig", re.IGNORECASE)
Endpoint = Literal[
    "completions", "chat", "responses", "messages", "embeddings", "rerank", "sglang", "llama.cpp", "tgi", "ollama",
    "triton",
]  # fmt: skip
PATHS: Mapping[Endpoint, str] = {
    "chat": "chat/completions", "completions": "completions", "responses": "responses", "messages": "messages",
    "embeddings": "embeddings", "rerank": "rerank", "sglang": "generate", "llama.cpp": "completion",
    "tgi": "generate_stream", "ollama": "api/chat", "triton": "v2/models/{model}/generate_stream",
}  # fmt: skip
"""Where requests of each endpoint go; one that ends in another one's path comes before it."""
BESIDE_API: frozenset[Endpoint] = frozenset({"sglang", "llama.cpp", "tgi", "ollama", "triton"})
"""Endpoints of a server's own API, which lie beside /v1, not in it."""


def is_server_url(text: str) -> bool:
    """Whether the text is an http or https URL, in any case."""
    return _SCHEME.match(text) is not None


def is_loopback(url: str) -> bool:
    """Whether a URL has an address that is this machine's own wherever it is used."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


class ServerUrl(NamedTuple):
    """Where a server is.

    ``root``: what precedes /health and /metrics. ``api``: what precedes /completions and /models, mostly ``root`` +
    /v1. ``query``: appended to requests of the API, such as ``api-version=...``. ``named``: the endpoint that the URL
    ends in, if it does.
    """

    root: str
    api: str
    query: str = ""
    named: Endpoint | None = None

    @classmethod
    def parse(cls, text: str) -> ServerUrl:
        """The server at a URL. Raises UsageError.

        A path with a version (``/openai/v1``, ``/api/v3``), or one that ends in an endpoint, is the API's as it
        stands; /v1 is added to any other path.
        """
        if not is_server_url(text) or re.search(r"[\s\x00-\x1f\x7f\\]", text):
            raise UsageError(f"{text!r} is no server URL; write http://HOST:PORT")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"{text!r} is no server URL ({error}); write http://HOST:PORT") from None
        if "@" in parts.netloc or any(_CREDENTIAL.search(name) for name, _ in parse_qsl(parts.query)):
            raise UsageError("leave credentials out of the URL; give the API key in EBBENCH_API_KEY or OPENAI_API_KEY")
        if not host or port == 0:
            raise UsageError(f"{text!r} is no server URL; write http://HOST:PORT")
        segments = [part for part in parts.path.split("/") if part]
        named, length = _ending(segments)
        api = segments[: len(segments) - length]
        versions = [place for place, part in enumerate(api) if _VERSION.fullmatch(part)]
        root = api[: versions[-1]] if versions else api
        if not versions and (not length or named in BESIDE_API):
            api = [*root, "v1"]
        origin = f"{parts.scheme}://{parts.netloc}"
        return cls("/".join((origin, *root)), "/".join((origin, *api)), parts.query, named)

    @property
    def secure(self) -> bool:
        """Whether requests are encrypted (https)."""
        return self.root.startswith("https:")

    def endpoint(self, path: str) -> str:
        """The URL of a path of the API, such as ``models``."""
        return f"{self.api}/{path}" + (f"?{self.query}" if self.query else "")

    def page(self, path: str) -> str:
        """The URL of a page beside the API, such as ``health``."""
        return f"{self.root}/{path}"

    def target(self, endpoint: Endpoint, model: str) -> str:
        """The URL to which requests of an endpoint go."""
        path = PATHS[endpoint].format(model=quote(model, safe=""))
        return self.page(path) if endpoint in BESIDE_API else self.endpoint(path)

    def __str__(self) -> str:
        """What is shown and stored: without /v1 where that was added."""
        short = self.api == f"{self.root}/v1" and not self.query
        return self.root if short else self.api + (f"?{self.query}" if self.query else "")


def _ending(segments: list[str]) -> tuple[Endpoint | None, int]:
    """The endpoint that a URL's path ends in, if it does, and how many segments at its end are no part of the API."""
    if segments[-1:] == ["models"]:
        return None, 1
    if segments[-1:] == ["generate_stream"] and segments[-4:-2] == ["v2", "models"]:
        return "triton", 4
    for name, path in PATHS.items():
        end = path.split("/")
        if segments[-len(end) :] == end:
            return name, len(end)
    return None, 0
