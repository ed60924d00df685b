"""Requests that are not part of the measurement: is the server ready, which model does it serve, its metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from ebbench.client.options import ClientOptions, api_key, redacted, secrets
from ebbench.connections import IDLE_LIMIT_S, tls_context
from ebbench.errors import RunError, UsageError

_ASK_TIMEOUT_S = 10.0
RESET_PATHS = ("/reset_prefix_cache", "/flush_cache")
"""Paths that empty a prefix cache: of vLLM, which needs VLLM_SERVER_DEV_MODE=1, and of SGLang."""
MADE_UP = "ebbench-fake-server"
"""What ebbench's fake server names as the owner of its models."""
_UNTRUSTED = "give its certificate authority with --ca-file FILE or in SSL_CERT_FILE, or do not verify: --insecure"


@dataclass(frozen=True)
class Served:
    """Model name and maximum length that the server reports. ``made_up``: it is ebbench's fake server.

    ``names``: all that it serves, adapters too; None if it does not say.
    """

    model: str
    max_model_len: int | None
    made_up: bool = False
    names: frozenset[str] | None = None


def _distinct_models(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The first name of each model: with vLLM's ``--served-model-name A B`` one model has several.

    LoRA adapters, which have a parent, are no models of their own where that is served.
    """
    first: dict[Any, str] = {}
    for name, model in models.items():
        if (parent := model.get("parent")) == name or parent not in models:
            first.setdefault(model.get("root") or name, name)
    return list(first.values())


class ServerQueries:
    """Sends unmeasured requests to one server. Use as an asynchronous context manager."""

    def __init__(self, url: str, options: ClientOptions, environ: Mapping[str, str]) -> None:
        self._url, self._options = url.rstrip("/"), options
        self._secrets = secrets(options, environ)
        headers, key = dict(options.headers), api_key(environ)
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx.AsyncClient(
            headers=headers, timeout=_ASK_TIMEOUT_S, limits=httpx.Limits(keepalive_expiry=IDLE_LIMIT_S),
            verify=tls_context(options.verify_tls, options.ca_file, environ) if url.startswith("https:") else False,
            trust_env=options.transport != "direct",
        )  # fmt: skip

    async def __aenter__(self) -> ServerQueries:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ready(self) -> None:
        """Wait until the server is ready. Raises RunError with the last reason after ``ready_timeout_s``."""
        deadline_s = time.monotonic() + self._options.ready_timeout_s
        while True:
            reason = await self._not_ready_reason()
            if reason is None:
                return
            if time.monotonic() >= deadline_s:
                raise RunError(
                    f"{self._url} is not ready after {self._options.ready_timeout_s:g} s: {reason}; "
                    "is the server running there?"
                )
            await asyncio.sleep(0.2)

    async def served(self) -> Served:
        """The model to request. Raises RunError if the server serves none, UsageError if not the one asked for."""
        asked = self._options.model
        try:
            response = await self._client.get(f"{self._url}/v1/models")
            models = {m["id"]: m for m in response.raise_for_status().json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            if asked is not None:
                return Served(asked, self._options.max_model_len)
            raise RunError(self._redacted(f"{self._url}/v1/models: {error}; name the model that is served")) from None
        if not models:
            raise RunError(f"{self._url} serves no model")
        if asked is not None and asked not in models:
            raise UsageError(f"{self._url} does not serve {asked!r}; it serves {', '.join(sorted(models))}")
        different = _distinct_models(models)
        if asked is None and len(different) > 1:
            raise UsageError(f"{self._url} serves several models: {', '.join(different)}; say which with --model")
        name = asked or different[0]
        limit = self._options.max_model_len or models[name].get("max_model_len")
        return Served(
            name, limit if isinstance(limit, int) else None, models[name].get("owned_by") == MADE_UP, frozenset(models)
        )

    async def reset_prefix_cache(self) -> bool:
        """Empty the server's prefix cache. Returns False if the server cannot."""
        for path in RESET_PATHS:
            try:
                response = await self._client.post(f"{self._url}{path}")
            except httpx.HTTPError:
                return False
            if response.status_code == 200:
                return True
        return False

    async def metrics(self) -> str | None:
        """The text of /metrics, or None if the server has none."""
        try:
            response = await self._client.get(f"{self._url}/metrics")
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    async def _not_ready_reason(self) -> str | None:
        """Why the server is not ready, or None if it is. A server without /health is ready if /v1/models responds."""
        for path in ("/health", "/v1/models"):
            try:
                response = await self._client.get(self._url + path)
            except httpx.InvalidURL as error:
                raise UsageError(f"{self._url}: {error}") from None
            except httpx.HTTPError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):  # a certificate does not become valid by waiting
                    raise RunError(f"{self._url}: {error}; {_UNTRUSTED}") from None
                return self._redacted(str(error) or type(error).__name__)
            if response.status_code == 200:
                return None
            if response.status_code not in (404, 405):
                return f"{path} answers {response.status_code}"
        return None

    def _redacted(self, text: str) -> str:
        return redacted(text, self._secrets)
