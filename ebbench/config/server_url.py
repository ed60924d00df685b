"""The URL of an OpenAI-compatible server as users paste it, and the URLs of its pages and of its API."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from ebbench.errors import UsageError

_SCHEME = re.compile(r"https?://", re.IGNORECASE)
_VERSION = re.compile(r"v\d+[a-z]*\d*")
"""A path segment that names a version of an API: v1, v3, v1beta, v1alpha2."""
_CREDENTIAL = re.compile(r"key|token|secret|passw|auth|credential|^sig", re.IGNORECASE)
_PATHS: tuple[tuple[tuple[str, ...], Literal["completions", "chat"] | None], ...] = (
    (("chat", "completions"), "chat"),
    (("completions",), "completions"),
    (("models",), None),
)
"""Last segments of URLs inside the API, and the endpoint that each names."""


def is_server_url(text: str) -> bool:
    """Whether the text is an http or https URL, in any case."""
    return _SCHEME.match(text) is not None


@dataclass(frozen=True)
class ServerUrl:
    """Where a server is.

    ``root``: what precedes /health and /metrics. ``api``: what precedes /completions and /models, mostly ``root`` +
    /v1. ``query``: appended to requests of the API, such as ``api-version=...``. ``named``: the endpoint that the URL
    ends in, if it does.
    """

    root: str
    api: str
    query: str = ""
    named: Literal["completions", "chat"] | None = None

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
        end, named = next(((end, named) for end, named in _PATHS if tuple(segments[-len(end) :]) == end), ((), None))
        versions = [place for place, part in enumerate(segments) if _VERSION.fullmatch(part)]
        api = segments[: len(segments) - len(end)]
        root = api[: versions[-1]] if versions else api
        if not end and not versions:
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

    def target(self, endpoint: Literal["completions", "chat"]) -> str:
        """The URL to which requests of an endpoint go."""
        return self.endpoint("chat/completions" if endpoint == "chat" else "completions")

    def page(self, path: str) -> str:
        """The URL of a page beside the API, such as ``health``."""
        return f"{self.root}/{path}"

    def __str__(self) -> str:
        """What is shown and stored: without /v1 where that was added."""
        short = self.api == f"{self.root}/v1" and not self.query
        return self.root if short else self.api + (f"?{self.query}" if self.query else "")
