"""Requests that are not part of the measurement: is the server ready, which model does it serve, its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import uvloop

from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.dialects import finite_number, whole_number
from ebbench.client.request_sender import BODY_BYTES, ConnectionPool, errors_of_httpx
from ebbench.client.stream_messages import parse_document
from ebbench.config.server_url import ServerUrl
from ebbench.errors import RunError, UsageError
from ebbench.network.connections import IdleTimeoutError, RequestHead, TransportError, tls_context
from ebbench.network.credentials import KEY_VARIABLES, api_key, redacted
from ebbench.network.questions import Answer, AnswerTooLargeError, ask, decoded, one_off_limits
from ebbench.process.termination import signals_here, stoppable_from
from ebbench.records.schema import SERVER_METRICS
from ebbench.records.warnings import RunWarning, health_in_words, warning
from ebbench.spec.client import ClientOptions, secrets

# Why a server cannot be reached: certificates, TLS where none is spoken, proxies that are not used.

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
    named = next((variable for name in names for variable in (name, name.upper()) if environ.get(variable)), None)
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


# Runs a coroutine to its end, also where an event loop is running already, as in a notebook.

T = TypeVar("T")


def run_to_end(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of ``make()`` on an event loop of its own; its exceptions pass through."""

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return uvloop.run(make())
    signals = signals_here()

    def run() -> T:
        with stoppable_from(signals):  # the caller waits, so that what it is signalled is for this thread
            return uvloop.run(make())

    threads = ThreadPoolExecutor(1)
    answer = threads.submit(run)
    threads.shutdown(wait=False)
    return answer.result()


# Single questions, each on a connection of its own: an idle one would occupy a thread of a server that has few of them.


class _Page:
    """Receives the body of an answer; see AnswerReceiver."""

    def __init__(self, limit_bytes: int) -> None:
        self.first_on_connection, self.body = True, bytearray()
        self._limit_bytes = limit_bytes

    @property
    def too_large(self) -> bool:
        """Whether more came than was asked for."""
        return len(self.body) > self._limit_bytes

    def sent(self, now_ns: int) -> None:
        """See AnswerReceiver."""

    def head(self, status: int, now_ns: int) -> None:
        """See AnswerReceiver."""

    def takes(self, content_type: str) -> bool:
        """See AnswerReceiver: of any type."""
        return True

    def feed(self, data: bytes, now_ns: int) -> None:
        """Keep bytes of the body; end the exchange at the limit, by an exception in the parser."""
        self.body += data
        if self.too_large:
            raise AnswerTooLargeError


class _Direct:
    """Asks over the load generator's own connections, without httpx, whose import takes 0.1 s of CPU."""

    def __init__(self, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        self._headers, self._tls = headers, tls

    async def ask(self, method: str, url: str, timeout_s: float, limit_bytes: int | None, json: bytes | None) -> Answer:
        """See :func:`ebbench.network.questions.ask`. Raises TransportError, UsageError for the URL."""
        kind = {} if json is None else {"content-type": "application/json"}
        head = RequestHead.of(method, url, {**self._headers, **kind, "connection": "close"})
        page = _Page(limit_bytes or 0)
        pool = ConnectionPool(head, self._tls, 2 * timeout_s, "per-request")
        try:
            async with asyncio.timeout(timeout_s):
                exchange = await pool.send("", json or b"", page)
                try:
                    await exchange.head()
                    rest = b"" if limit_bytes is None else await exchange.body()
                finally:
                    exchange.close()
        except TimeoutError:
            raise IdleTimeoutError(f"no complete answer within {timeout_s:.3g} s") from None
        except TransportError:
            if not page.too_large:
                raise
            rest = b""
        finally:
            pool.close()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers.items()}
        if limit_bytes is None:
            return Answer(exchange.status, headers, b"")
        coding = headers.get("content-encoding", "identity")
        if page.too_large or (len(rest) >= BODY_BYTES and coding != "identity"):
            raise AnswerTooLargeError(f"larger than {limit_bytes:,} bytes")
        return Answer(exchange.status, headers, decoded(bytes(page.body) or rest, coding, limit_bytes))

    async def close(self) -> None:
        """Nothing is kept open."""


class _Httpx:
    """Asks with httpx, which honours proxies from the environment."""

    def __init__(self, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        import httpx

        self._client = httpx.AsyncClient(
            headers=headers, timeout=_ASK_TIMEOUT_S, limits=one_off_limits(), verify=False if tls is None else tls
        )

    async def ask(self, method: str, url: str, timeout_s: float, limit_bytes: int | None, json: bytes | None) -> Answer:
        """See :func:`ebbench.network.questions.ask`. Raises TransportError."""
        with errors_of_httpx():
            return await ask(self._client, method, url, timeout_s=timeout_s, limit_bytes=limit_bytes, json=json)

    async def close(self) -> None:
        """Close the client."""
        await self._client.aclose()


_ASK_TIMEOUT_S = 10.0
_SHORTEST_ASK_S = 1.0  # for a server that is asked when the time to be ready is nearly over
_MODELS_BYTES, _METRICS_BYTES, _OTHER_BYTES = 4 << 20, 16 << 20, 64 << 10
_REASON_CHARACTERS, _NAMES_SHOWN = 300, 20
_FORBIDDEN, _NO_SUCH_PAGE = (401, 403), (404, 405, 501)
RESET_PATHS = ("reset_prefix_cache", "flush_cache")
"""Paths that empty a prefix cache: of vLLM, which needs VLLM_SERVER_DEV_MODE=1, and of SGLang."""
LONGEST_VERSION = 80
"""Characters of a server's version that are kept."""
_NO_SERVER = "is the server running there?"
MADE_UP = "ebbench-fake-server"
"""What ebbench's fake server names as the owner of its models."""


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


class _Ready(NamedTuple):
    """What one round of questions found. ``waiting``: why the server is not ready, None if it is.

    ``answers``: /health gives an answer. ``despite``: what it says although the server lists its models: a request
    decides at the deadline.
    """

    waiting: str | None = None
    despite: RunWarning | None = None
    answers: bool = False


class ServerQueries:
    """Sends unmeasured requests to one server. Use as an asynchronous context manager.

    ``notes``: warnings about the server in the run.
    """

    def __init__(self, server: ServerUrl, options: ClientOptions, environ: Mapping[str, str]) -> None:
        self._server, self._options, self._environ = server, options, environ
        self._secrets = secrets(options, environ)
        self.notes: list[RunWarning] = []
        headers, self._key = dict(options.headers), api_key(environ)
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        tls = tls_context(options.verify_tls, options.ca_file, environ) if server.secure else None
        self._asking = (_Direct if options.transport == "direct" else _Httpx)(headers, tls)

    async def __aenter__(self) -> ServerQueries:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._asking.close()

    async def ready(self) -> None:
        """Wait until the server is ready: /health says so, or it lists its models and has no /health for us.

        Raises RunError with the last reason after ``ready_timeout_s``, or at once for one that does not pass.
        """
        deadline_s = time.monotonic() + self._options.ready_timeout_s
        while True:
            state = await self._state(min(_ASK_TIMEOUT_S, max(_SHORTEST_ASK_S, deadline_s - time.monotonic())))
            if state.waiting is None:
                return
            if time.monotonic() >= deadline_s:
                if state.despite is not None and await self._completes():
                    self.notes.append(state.despite)
                    return
                cause = "a longer --ready-timeout may help" if state.answers else await self._cause() or _NO_SERVER
                after = f"is not ready after {self._options.ready_timeout_s:g} s"
                raise RunError(f"{self._server} {after}: {state.waiting}; {cause}")
            await asyncio.sleep(0.2)

    async def served(self) -> Served:
        """The model to request. Raises RunError if the server serves none, UsageError if not the one asked for."""
        asked = self._options.model
        try:
            models = _models_in(await self._models(_ASK_TIMEOUT_S))
        except _NoModelsError as error:
            if asked is not None:
                return Served(asked, self._options.max_model_len)
            where = self._server.endpoint("models")
            raise RunError(f"{where} {_cut(self._redacted(str(error)))}; or name the model with --model") from None
        if asked is not None and asked not in models:
            raise UsageError(f"{self._server} does not serve {asked!r}; it serves {_listed(sorted(models))}")
        different = _distinct_models(models)
        if asked is None and len(different) > 1:
            raise UsageError(f"{self._server} serves several models: {_listed(different)}; say which with --model")
        name = asked or different[0]
        limit = self._options.max_model_len or models[name].get("max_model_len")
        return Served(name, limit, models[name].get("owned_by") == MADE_UP, frozenset(models))

    async def reset_prefix_cache(self) -> bool:
        """Empty the server's prefix cache. Returns False if the server cannot."""
        for path in RESET_PATHS:
            try:
                answer = await self._ask("POST", self._server.page(path), _OTHER_BYTES)
            except TransportError:
                return False
            if answer.status == 200:
                return True
        return False

    async def version(self) -> str | None:
        """The version that the server names at /version, as vLLM does; None if it names none."""
        try:
            answer = await self._ask("GET", self._server.page("version"), _OTHER_BYTES)
            version = msgspec.json.decode(answer.body)["version"] if answer.status == 200 else None
        except (TransportError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return self._redacted(version)[:LONGEST_VERSION] if isinstance(version, str) and version else None

    async def metrics(self) -> str | None:
        """The text of /metrics, or None if the server has none that can be read."""
        try:
            answer = await self._ask("GET", self._server.page("metrics"), _METRICS_BYTES)
        except AnswerTooLargeError as error:
            note = warning("metrics-unread", why=str(error))
            if note not in self.notes:
                self.notes.append(note)
            return None
        except TransportError:
            return None
        return answer.text if answer.status == 200 else None

    async def _ask(
        self,
        method: str,
        url: str,
        limit_bytes: int | None,
        timeout_s: float = _ASK_TIMEOUT_S,
        body: bytes | None = None,
    ) -> Answer:
        return await self._asking.ask(method, url, timeout_s, limit_bytes, body)

    async def _models(self, timeout_s: float) -> Answer:
        """The answer of /v1/models. Raises _NoModelsError, with the reason, if there is none."""
        try:
            return await self._ask("GET", self._server.endpoint("models"), _MODELS_BYTES, timeout_s)
        except TransportError as error:
            raise _NoModelsError(f"gives no answer ({_reason(error)})") from None

    async def _state(self, timeout_s: float) -> _Ready:
        """Ask once. Raises RunError for what does not pass by waiting."""
        slow = False
        try:
            status = (await self._ask("GET", self._server.page("health"), None, timeout_s)).status
        except TransportError as error:
            if remedy := certificate_remedy(str(error)):
                raise RunError(f"{self._server}: {error}; {remedy}") from None
            slow, status = isinstance(error, IdleTimeoutError), 0
            if not slow:
                return _Ready(self._redacted(_reason(error)))
        if 200 <= status < 300:
            return _Ready()
        passing = slow or status >= 500 or status in (408, 429)
        return await self._state_without_health(status, passing and status != 501, timeout_s)

    async def _state_without_health(self, health: int, passing: bool, timeout_s: float) -> _Ready:
        """Judge by /v1/models. ``health``: status of /health, 0 without an answer; ``passing``: it may become good."""
        problem, answers = health_in_words(health, timeout_s), bool(health)
        try:
            status = (await self._models(timeout_s)).status
        except _NoModelsError as error:
            return _Ready(f"{problem}, and /v1/models {error}", None, answers)
        if passing:
            despite = warning("not-ready", health=health, timeout_s=timeout_s) if status == 200 else None
            return _Ready(problem, despite, answers)
        if status in _FORBIDDEN and self._options.model is None:
            raise RunError(f"{self._server}: {problem}, /v1/models {status}; {self._key_remedy()}")
        if status >= 500 or status in (408, 429):
            return _Ready(f"{problem}, /v1/models {status}", None, answers)
        return _Ready()

    async def _completes(self) -> bool:
        """Whether a request for one token is answered, in a form that every server takes."""
        try:
            model = self._options.model or next(iter(_models_in(await self._models(_ASK_TIMEOUT_S))))
            target = self._server.target(self._options.endpoint, model)
            answer = await self._ask("POST", target, None, body=_smallest_body(model, self._options))
        except (TransportError, _NoModelsError):
            return False
        return answer.status == 200

    def _key_remedy(self) -> str:
        if self._key is None:
            return f"set {KEY_VARIABLES[0]} (or {KEY_VARIABLES[1]}) to a key that the server accepts"
        named = next(name for name in KEY_VARIABLES if self._environ.get(name, "").strip())
        return f"the server does not accept the key in {named}"

    async def _cause(self) -> str | None:
        """What answers at the address instead of the expected server."""
        if self._options.transport != "direct":
            return None
        return await other_protocol(self._server) or unused_proxy(self._server, self._environ)

    def _redacted(self, text: str) -> str:
        return redacted(text, self._secrets)


def _smallest_body(model: str, options: ClientOptions) -> bytes:
    """A request for one token without a stream, with no field that a server may not know."""
    least = replace(
        options, temperature=None, ignore_eos=False, extra_body={"stream": None, "stream_options": None},
        max_tokens_field="max_tokens" if options.endpoint == "chat" else None,
    )  # fmt: skip
    turn = Turn(row=0, request_id="", turn=0, input_tokens=1, output_tokens=1, content=0, hash_ids=None, prompt="a")
    return RequestBodies(model, least).build(turn)


class _NoModelsError(Exception):
    """Why /v1/models names no model: the rest of a sentence that begins with its URL, and what to do."""


def _models_in(answer: Answer) -> dict[str, dict[str, Any]]:
    """The models by id, each with those of its fields that have the right type. Raises _NoModelsError."""
    if answer.status != 200:
        raise _NoModelsError(_refusal(answer))
    document = parse_document(answer.body)
    if document is None:
        kind = answer.headers.get("content-type", "no content type")
        if "json" in kind or answer.body.lstrip()[:1] in (b"[", b"{"):
            raise _NoModelsError("answers with no JSON object that lists models; check the URL")
        raise _NoModelsError(
            f"answers with {kind}, not JSON: a log-in page or another service? check the URL and the key"
        )
    entries = document.get("data")
    models: dict[str, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"]:
            models.setdefault(entry["id"], _typed(entry))
    if not models:
        raise _NoModelsError("lists no model with an id; check the URL")
    return models


def _typed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are used, without those of another type than the OpenAI API and vLLM give them."""
    typed: dict[str, Any] = {
        name: entry[name] for name in ("root", "parent", "owned_by") if isinstance(entry.get(name), str)
    }
    limit = whole_number(entry.get("max_model_len"), at_least=1)
    return typed if limit is None else typed | {"max_model_len": limit}


def _refusal(answer: Answer) -> str:
    """What a status other than 200 means for the URL that was asked."""
    if 300 <= answer.status < 400:
        where = answer.headers.get("location", "another address")
        return f"answers {answer.status} and points to {where}: give the URL it lies at"
    if answer.status in _FORBIDDEN:
        return f"answers {answer.status}: check EBBENCH_API_KEY (or OPENAI_API_KEY)"
    if answer.status in _NO_SUCH_PAGE:
        return f"answers {answer.status}: is its API at another path? give the URL that precedes /completions"
    words = " ".join(answer.text.split())
    return f"answers {answer.status}" + (f" ({words})" if words else "")


def _cut(text: str) -> str:
    """The beginning of a server's words, without characters that a terminal would obey."""
    shown = text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]}…"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in shown
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(_cut(name) for name in names[:_NAMES_SHOWN]) + more


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


# Reads a server's metrics during a run, in long form: one row per sample that changed.

_Key = tuple[str, str]


class Scraper:
    """Reads /metrics every ``interval_s`` seconds and keeps the samples that changed."""

    def __init__(self, server: ServerQueries, interval_s: float) -> None:
        self._server, self._interval_s = server, interval_s
        self._last: dict[_Key, float] = {}
        self._rows: list[tuple[int, str, str, float]] = []

    async def run(self) -> None:
        """Read until cancelled."""
        while await self.once():
            await asyncio.sleep(self._interval_s)

    async def once(self) -> bool:
        """Read once. Returns False if the server has no such page; a later read that fails is left out."""
        text = await self._server.metrics()
        if text is None:
            return bool(self._last)
        now_ns = time.monotonic_ns()
        for (name, labels), value in parse(text).items():
            if self._last.get((name, labels)) != value:
                self._last[name, labels] = value
                self._rows.append((now_ns, name, labels, value))
        return True

    def table(self, start_ns: int) -> pa.Table:
        """All samples so far, times relative to ``start_ns``; samples from before the run have negative times."""
        columns = {
            "time_ns": [time_ns - start_ns for time_ns, _, _, _ in self._rows],
            "name": [name for _, name, _, _ in self._rows],
            "labels": [labels for _, _, labels, _ in self._rows],
            "value": [value for _, _, _, value in self._rows],
        }
        return pa.table(columns, schema=SERVER_METRICS)


_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\s*\{(.*)\}\s*|\s+)(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def parse(text: str) -> dict[_Key, float]:
    """Finite samples of a Prometheus text page by name and labels, without ``_created`` timestamps.

    NaN and infinity say that there is no value yet. A page that cannot be read has no samples. The parser of
    prometheus_client takes six times as long, which competes with the workers every time a page is read, and 25 ms to
    load, since it comes with a server.
    """
    samples: dict[_Key, float] = {}
    for line in filter(None, map(str.strip, text.split("\n"))):
        if line.startswith("#"):
            continue
        try:
            name, labels, written = _SAMPLE.fullmatch(line).groups()  # type: ignore[union-attr]
            value, key = finite_number(float(written)), (name, _labels(labels or ""))
        except (AttributeError, ValueError):
            return {}
        if value is not None and not name.endswith("_created"):
            samples[key] = value
    return samples


@lru_cache(maxsize=4096)
def _labels(written: str) -> str:
    """Labels as sorted JSON. Raises ValueError for what are none."""
    if _LABEL.sub("", written).strip():
        raise ValueError(written)
    values = {
        name: re.sub(r"\\[n\"\\]", lambda found: _ESCAPED[found[0]], value) for name, value in _LABEL.findall(written)
    }
    return msgspec.json.encode(values, order="sorted").decode()


# What a server says of its own settings in /metrics: vLLM its KV cache, vllm_eb its policy.

POLICY = "policy"
_POLICY_INFO, _CACHE_INFO = "vllm_eb_info", "vllm:cache_config_info"


def _count(text: str) -> int | None:
    return whole_number(finite_number(text), at_least=1, at_most=2**53)


_OF_CACHE: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "num_gpu_blocks": ("num_kv_blocks", _count),
    "block_size": ("block_size", _count),
    "kv_cache_size_tokens": ("kv_cache_tokens", _count),
    "cache_dtype": ("kv_cache_dtype", str),
    "enable_prefix_caching": ("enable_prefix_caching", {"True": True, "False": False}.__getitem__),
    "gpu_memory_utilization": ("gpu_memory_utilization", finite_number),
}
"""vLLM's labels, with our names and types of their values."""


def reported_settings(samples: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The settings in ``samples``, pairs of a metric's name and its labels as JSON; empty if there are none.

    A setting in which the engines of a server differ is left out.
    """
    values_by_name: dict[str, set[Any]] = {}
    for name, labels in samples:
        if name == _POLICY_INFO:
            values_by_name.setdefault(POLICY, set()).add(msgspec.json.decode(labels).get("policy"))
        elif name == _CACHE_INFO:
            for ours, value in _cache_settings(msgspec.json.decode(labels)):
                values_by_name.setdefault(ours, set()).add(value)
    return {name: values.pop() for name, values in values_by_name.items() if len(values) == 1 and values != {None}}


def _cache_settings(labels: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    for theirs, (ours, kind) in _OF_CACHE.items():
        with contextlib.suppress(KeyError):  # another version of vLLM, or not known yet ("None")
            if (value := kind(labels[theirs])) is not None:
                yield ours, value


def read_reports(url: str, options: ClientOptions, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Ask the server at ``url``, once it is ready; empty if it has no /metrics. Raises RunError if it is not ready."""

    async def ask() -> str | None:
        async with ServerQueries(ServerUrl.parse(url), options, environ) as server:
            await server.ready()
            return await server.metrics()

    return reported_settings(parse(run_to_end(ask) or ""))
