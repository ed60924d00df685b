"""Send a plan to a server and return the measurements: the entry point of the load generator.

Requests and their times come from the plan, everything else from :class:`~ebbench.spec.client.ClientOptions`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.dialects import DIALECTS
from ebbench.client.messages import Stop, WorkerDone
from ebbench.client.power import PowerSampler, open_power
from ebbench.client.prefix_cache import drafts, hit_rate, met_before, note_prompts, unplanned_hits
from ebbench.client.progress import Tally
from ebbench.client.request_sender import RequestSender
from ebbench.client.response import StreamedResponse, response_to
from ebbench.client.senders import Interrupts, local_senders
from ebbench.client.server_queries import Scraper, Served, ServerQueries, reported_settings, run_to_end
from ebbench.client.session_plan import MachineLoad, PlanPart, check_attachments, rows_too_long, unique_ids
from ebbench.client.telemetry import telemetry
from ebbench.client.verdict import (
    client_warnings,
    invalid_reasons,
    loop_lag_p99_ms,
    other_models_warning,
    send_lag_p99_ms,
)
from ebbench.config.server_url import ServerUrl
from ebbench.errors import RunError, UsageError
from ebbench.network.credentials import redacted
from ebbench.process.alarm import behind_others
from ebbench.process.termination import held
from ebbench.records.plan import Observer, Plan, block_tokens, primed
from ebbench.records.schema import SERVER_METRICS
from ebbench.records.warnings import ESTIMATED, ESTIMATED_TOKENS, RunWarning, warning
from ebbench.spec.client import ClientOptions, lag_limit_ms, secrets, spacing_ns
from ebbench.workloads.tokens import TokenizerCount, load_tokenizer

if TYPE_CHECKING:
    from ebbench.client.nodes import ClientNode, Senders

# Warm-up: requests before the start with the plan's lengths and other content, and then, once the prefix cache was
# emptied, those that put what the plan takes for held into it; none of them is recorded.

_AT_ONCE = 64


async def warm_up(load: MachineLoad, plan: Plan, environ: Mapping[str, str]) -> None:
    """Send ``options.warmup`` requests. Raises RunError if all of them fail: the run would fail too."""
    answers = await _sent(load, [_turn(plan, number) for number in range(load.options.warmup)], environ)
    failed = [answer for answer in answers if answer.error_class is not None]
    if failed and len(failed) == len(answers):
        _refuse(failed[0], "every warm-up request failed", load.options, environ)


async def prime(load: MachineLoad, plan: Plan, environ: Mapping[str, str]) -> None:
    """Put what the plan takes for held into the server's prefix cache. Raises RunError if a request for it fails."""
    names = ("content", "hash_ids", "input_tokens", "output_tokens")
    turns = [
        Turn(row=0, request_id="", turn=0, prompt=None, block_tokens=block_tokens(plan.table), **row)
        for row in primed(plan.table).select(names).to_pylist()
    ]
    answers = await _sent(load, turns, environ)
    if failed := [answer for answer in answers if answer.error_class is not None]:
        what = f"{len(failed)} of {len(answers)} requests that fill the prefix cache before the run failed"
        _refuse(failed[0], what, load.options, environ)


def _refuse(answer: StreamedResponse, what: str, options: ClientOptions, environ: Mapping[str, str]) -> NoReturn:
    body = redacted(answer.error_body, secrets(options, environ))[:200]
    raise RunError(f"{what} ({answer.error_class}: {body})")


async def _sent(load: MachineLoad, turns: Sequence[Turn], environ: Mapping[str, str]) -> list[StreamedResponse]:
    """The answers to requests that are not recorded."""
    if not turns:
        return []
    bodies, gate = RequestBodies(load.model, load.options), asyncio.Semaphore(_AT_ONCE)
    async with RequestSender(load.target, load.options, environ) as sender:

        async def send(number: int) -> StreamedResponse:
            streamed = response_to(DIALECTS[load.options.endpoint], keep_text=False)
            async with gate:
                await sender.send(f"warmup-{number}", bodies.build(turns[number]), streamed)
            return streamed

        return await asyncio.gather(*(send(number) for number in range(len(turns))))


def _turn(plan: Plan, number: int) -> Turn:
    """Lengths of the plan's request ``number`` with content of its own, so that no prefix of the run gets cached."""
    row = number % plan.table.num_rows
    lengths = {name: plan.table.column(name)[row].as_py() for name in ("input_tokens", "output_tokens")}
    return Turn(row=row, request_id="", turn=0, content=-1 - number, hash_ids=None, prompt=None, **lengths)


# What a run's connections cost: how many there were, and whether requests waited for a server to accept theirs.

_OVERTAKEN_BY = 3
"""A request waited for its connection if so many later ones, on connections in use, were answered before it."""
_SLOWER_NS = 50_000_000
_FEWEST = 3
_TIMES_AS_OFTEN = 3.0
"""How much more often that must happen to first requests than to others, which a priority can let wait, too."""


def connection_totals(workers: Iterable[WorkerDone | None]) -> dict[str, int]:
    """Sums over the workers: connections opened, and the most that each held and used at a time."""
    counts = [done.connections for done in workers if done is not None]
    return {name: sum(getattr(count, name) for count in counts) for name in ("opened", "most_held", "most_used")}


def slow_first_uses(requests: pa.Table, first_rows: Sequence[int]) -> tuple[RunWarning, ...]:
    """A warning if requests that were the first on their connection waited while others overtook them; else empty.

    ``first_rows``: the rows of ``requests`` on whose connections no response had come before.
    """
    sent_ns, answered_ns = _times(requests)
    first = np.zeros(len(sent_ns), np.bool_)
    first[list(first_rows)] = True
    first, later = first & (sent_ns >= 0), ~first & (sent_ns >= 0)
    slow = _overtaken(sent_ns, answered_ns, first, later)
    if len(slow) < _FEWEST:
        return ()
    slow_others = len(_overtaken(sent_ns, answered_ns, later, later))
    if len(slow) / int(first.sum()) < _TIMES_AS_OFTEN * slow_others / max(1, int(later.sum())):
        return ()
    waits_s = (answered_ns - sent_ns)[slow] / 1e9
    waited = {"longest_s": float(waits_s.max()), "median_s": float(np.median(waits_s))}
    return (warning("few-connections", requests=len(slow), **waited),)


def _times(requests: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """When each request was sent and when its answer began, else when it ended (ns); -1 for one never sent."""
    sent, first, end = (requests.column(name).to_numpy() for name in ("sent_ns", "first_byte_ns", "end_ns"))
    begun = np.where(np.isnan(first.astype(float)), end.astype(float), first.astype(float))
    return np.nan_to_num(sent.astype(float), nan=-1).astype(np.int64), np.nan_to_num(begun, nan=-1).astype(np.int64)


def _overtaken(
    sent_ns: npt.NDArray[np.int64],
    answered_ns: npt.NDArray[np.int64],
    which: npt.NDArray[np.bool_],
    others: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Rows of ``which`` that _OVERTAKEN_BY of ``others`` overtook: sent later, answered _SLOWER_NS or more before."""
    order = np.flatnonzero(others)[np.argsort(sent_ns[others], kind="stable")]
    sent, answered = sent_ns[order], answered_ns[order]
    rows = []
    for row in np.flatnonzero(which & (answered_ns - sent_ns > _SLOWER_NS)):
        begin, end = np.searchsorted(sent, (sent_ns[row] + 1, answered_ns[row]))
        if np.count_nonzero(answered[begin:end] < answered_ns[row] - _SLOWER_NS) >= _OVERTAKEN_BY:
            rows.append(row)
    return np.array(rows, np.int64)


class DriveResult(NamedTuple):
    """Measurements of a plan, and what qualifies them.

    ``requests``: one row per planned request, in plan order (schema REQUESTS; with ``keep_text`` also a column
    ``text``). ``server_metrics``: schema SERVER_METRICS, empty if the server has no /metrics. ``invalid``: reasons that
    make the run invalid and that only the client knows; the analysis derives the others from the table. ``facts``:
    entries for the manifest.
    """

    requests: pa.Table
    warnings: tuple[RunWarning, ...]
    server_metrics: pa.Table
    invalid: tuple[RunWarning, ...]
    interrupted: bool
    facts: Mapping[str, Any]


def drive(
    url: str,
    plan: Plan,
    options: ClientOptions | None = None,
    observer: Observer | None = None,
    on_batch: Callable[[pa.Table], None] | None = None,
    environ: Mapping[str, str] = os.environ,
    label: str = "endpoint",
) -> DriveResult:
    """Send ``plan`` to the server at ``url``, by the API that ``options.endpoint`` names, and wait for all responses.

    ``observer`` receives progress under ``label``; ``on_batch`` receives finished requests while the run goes on, as
    tables in the REQUESTS schema. After the first SIGINT no request is sent and open requests may finish; the second
    SIGINT aborts them. Signals are handled only if the caller is the main thread.

    Raises UsageError if the plan does not fit the server, RunError if the server cannot be reached, KeyboardInterrupt
    after a signal before the first request.
    """
    options = options or ClientOptions()
    server = checked_url(url, options)

    with held():
        try:
            return run_to_end(lambda: _drive(server, plan, options, observer, on_batch, environ, label))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None  # interrupted before the first request


def checked_url(url: str, options: ClientOptions) -> ServerUrl:
    """The server at ``url``. Raises UsageError if the URL names another endpoint than the options."""
    server = ServerUrl.parse(url)
    if server.named not in (None, options.endpoint):
        raise UsageError(f"{url} is the URL of {server.named}: give --endpoint {server.named}, or the URL without it")
    return server


class _Ready(NamedTuple):
    """A server that the plan can be sent to, and what is sent."""

    served: Served
    version: str | None
    load: MachineLoad
    cache_reset: bool


async def _made_ready(
    server: ServerQueries, url: ServerUrl, plan: Plan, options: ClientOptions, environ: Mapping[str, str]
) -> _Ready:
    """Wait for the server, check the plan against it, warm it up and empty its prefix cache, as the options say."""
    await server.ready()
    served, version = await server.served(), await server.version()
    check_attachments(plan.table, options.endpoint, served.names)
    only_prompts = DIALECTS[options.endpoint].whole
    load = MachineLoad(
        url=url,
        model=served.model,
        options=options,
        id_prefix=options.id_prefix if options.id_prefix is not None else f"{token_hex(4)}-",
        phases=plan.phases,
        max_concurrency=plan.max_concurrency,
        dropped=rows_too_long(plan.table, served.max_model_len, options.drop_too_long, only_prompts),
        spacing_ns=spacing_ns(options),
    )
    await warm_up(load, plan, environ)
    reset = options.reset_prefix_cache and await server.reset_prefix_cache()
    await prime(load, plan, environ)
    return _Ready(served, version, load, reset)


async def _nodes(
    stack: AsyncExitStack, url: ServerUrl, options: ClientOptions, environ: Mapping[str, str]
) -> Sequence[ClientNode]:
    """One client on each node of a Ray cluster; they end with ``stack``."""
    from ebbench.client.nodes import client_nodes

    return await stack.enter_async_context(client_nodes(str(url), options, environ))


async def _drive(
    url: ServerUrl,
    plan: Plan,
    options: ClientOptions,
    observer: Observer | None,
    on_batch: Callable[[pa.Table], None] | None,
    environ: Mapping[str, str],
    label: str,
) -> DriveResult:
    table, renamed = unique_ids(plan.table)
    plan = replace(plan, table=table)
    async with AsyncExitStack() as stack:
        interrupts = Interrupts()
        stack.enter_context(interrupts.signals)
        nodes = await _nodes(stack, url, options, environ) if options.on_nodes else None
        server = await stack.enter_async_context(ServerQueries(url, options, environ))
        ready = await _made_ready(server, url, plan, options, environ)
        part, made_up = PlanPart(np.arange(len(plan)), table, ready.load), ready.served.made_up
        counter = _counter(options, server)
        dialect = DIALECTS[options.endpoint]
        tally = Tally(
            table, observer, on_batch, label, options.keep_text, thinking=dialect.thinks, estimates=counter is not None
        )
        scraper = Scraper(server, options.metrics_interval_s) if options.metrics_interval_s else None
        power = open_power(str(url), options.power, environ, made_up=made_up)
        async with _senders(nodes, part, environ) as senders:
            watching = telemetry(options, ready.load.model, len(plan), lambda: tally.open_requests)
            # The workers send and read at their moments; what they report can wait for them.
            aside = behind_others() if options.workers != 0 else contextlib.nullcontext()
            with aside, power or contextlib.nullcontext(), watching as seen:
                tally.followers.append(seen.add)
                await _run(senders, tally, scraper, plan.release_for_s, interrupts)
                tally.followers.clear()
            requests = tally.complete(senders)
    limit_ms = lag_limit_ms(requests, options.lag_limit_ms)
    findings = senders.findings(limit_ms)
    server_metrics = scraper.table(tally.start_ns) if scraper else SERVER_METRICS.empty_table()
    facts = {
        **_asked_facts(ready.load),
        **_client_facts(senders.workers(), requests, limit_ms, tally.start_ns, power),
        **findings.facts,
        **_server_facts(ready, requests, server_metrics, tally.other_models),
        **_estimates(requests, counter),
    }
    return DriveResult(
        requests=requests,
        warnings=(
            *client_warnings(requests, table, renamed, len(ready.load.dropped), tally.odd_numbers),
            *server.notes,
            *slow_first_uses(requests, tally.first_on_connection),
            *_power_warnings(facts),
            *seen.warnings,
            *findings.warnings,
            *_about_server(requests, table, facts, environ, made_up=made_up),
        ),
        server_metrics=server_metrics,
        invalid=(*findings.invalid, *invalid_reasons(limit_ms, senders.workers())),
        interrupted=tally.interrupted,
        facts=facts,
    )


def _asked_facts(load: MachineLoad) -> dict[str, Any]:
    """Which server was asked, and how."""
    options = load.options
    facts = {
        "server": str(load.url),
        "client_transport": options.transport,
        "endpoint": options.endpoint,
        "request_id_prefix": load.id_prefix,
    }
    return facts if options.host_label is None else facts | {"host_label": options.host_label}


def _server_facts(
    ready: _Ready, requests: pa.Table, server_metrics: pa.Table, other_models: Mapping[str, int]
) -> dict[str, Any]:
    """What the server said of itself, and what its answers and metrics show."""
    rate, source = hit_rate(requests, server_metrics)
    return {
        "served_model": ready.served.model,
        "prefix_cache_reset": ready.cache_reset,
        "prefix_hit_rate": rate,
        "prefix_hit_source": source,
        **drafts(requests, server_metrics),
        "server_reports": _reported(server_metrics),
        **({"server_version": ready.version} if ready.version else {}),
        **({"other_models": dict(other_models)} if other_models else {}),
    }


def _about_server(
    requests: pa.Table, plan: pa.Table, facts: Mapping[str, Any], environ: Mapping[str, str], *, made_up: bool
) -> tuple[RunWarning, ...]:
    """Warnings that other figures were measured than asked for: of cached prompts, or of other models.

    ``made_up``: it is ebbench's fake server, which caches nothing.
    """
    completed, rate = pc.sum(pc.equal(requests["status"], "ok")).as_py() or 0, facts["prefix_hit_rate"]
    cache = facts["server_reports"].get("enable_prefix_caching") is not False
    kept = completed and cache and not (made_up or facts["prefix_cache_reset"])
    met = note_prompts(facts["server"], facts["served_model"], plan, environ) if kept else None
    warnings = (
        unplanned_hits(rate, plan),
        met_before(met, rate, plan),
        other_models_warning(facts.get("other_models", {}), facts["served_model"], completed),
        warning(ESTIMATED_TOKENS, completed=completed, **facts[ESTIMATED]) if ESTIMATED in facts else None,
    )
    return tuple(filter(None, warnings))


def _counter(options: ClientOptions, server: ServerQueries) -> TokenizerCount | None:
    """The tokenizer that counts what the server does not; where it is not available, a note says so."""
    counter = load_tokenizer(options.tokenizer)
    if counter is None and options.tokenizer is not None:
        server.notes.append(warning("tokenizer-absent", tokenizer=options.tokenizer))
    return counter


def _estimates(requests: pa.Table, counter: TokenizerCount | None) -> dict[str, Any]:
    """The fact that output tokens were counted by the client, with what and in how many answers."""
    done = requests.filter(pc.equal(requests["status"], "ok"))
    count = 0 if counter is None else pc.sum(done["estimated_tokens"]).as_py() or 0
    return {ESTIMATED: {"answers": count, "by": counter.description}} if counter is not None and count else {}


def _reported(server_metrics: pa.Table) -> dict[str, Any]:
    names, labels = (server_metrics[column].to_pylist() for column in ("name", "labels"))
    return reported_settings(zip(names, labels, strict=True))


def _senders(
    nodes: Sequence[ClientNode] | None, part: PlanPart, environ: Mapping[str, str]
) -> AbstractAsyncContextManager[Senders]:
    """The workers of this machine, or those of ``nodes``."""
    if nodes is None:
        return local_senders(part, environ)
    from ebbench.client.nodes import node_senders

    return contextlib.nullcontext(node_senders(nodes, part, environ))


def _client_facts(
    workers: Mapping[int, WorkerDone | None],
    requests: pa.Table,
    lag_limit_ms: float,
    start_ns: int,
    power: PowerSampler | None,
) -> dict[str, Any]:
    """Entries for the manifest about the load generator: workers, their CPU time (s), lags, start, and GPU power."""
    facts: dict[str, Any] = {
        "client_workers": len(workers),
        "client_cpu_s": sum(done.cpu_s for done in workers.values() if done is not None),
        "send_lag_p99_ms": send_lag_p99_ms(requests),
        "loop_lag_p99_ms": loop_lag_p99_ms(workers.values()),
        "lag_limit_ms": lag_limit_ms,
        "client_connections": connection_totals(workers.values()),
        "start_monotonic_ns": start_ns,
    }
    if power is not None:
        facts["gpu_power"] = power.facts(start_ns, start_ns + (pc.max(requests["end_ns"]).as_py() or 0))
    return facts


def _power_warnings(facts: Mapping[str, Any]) -> tuple[RunWarning, ...]:
    """Why power and energy are missing although the GPUs were read."""
    absent = facts.get("gpu_power", {}).get("absent")
    return () if absent is None else (warning("power-absent", why=absent),)


async def _run(
    senders: Senders, tally: Tally, scraper: Scraper | None, release_for_s: float | None, interrupts: Interrupts
) -> None:
    """Start the workers once all are ready, wait for the last; release no session after ``release_for_s``."""
    await senders.ready()
    scraping = asyncio.create_task(scraper.run()) if scraper else None
    interrupts.stop(senders.send_all)
    start_ns = time.monotonic_ns() + senders.lead_ns
    tally.start_ns = start_ns
    await senders.begin(start_ns)
    ending = None if release_for_s is None else asyncio.create_task(_stop_at(senders, start_ns, release_for_s))
    await senders.listen(tally.add)
    if ending is not None:
        ending.cancel()
    interrupts.close()
    tally.interrupted = interrupts.interrupted
    if scraper is not None and scraping is not None:
        scraping.cancel()
        await scraper.once()


async def _stop_at(senders: Senders, start_ns: int, after_s: float) -> None:
    """Stop the release of sessions in all workers ``after_s`` seconds after the start."""
    await asyncio.sleep(after_s - (time.monotonic_ns() - start_ns) / 1e9)
    senders.send_all(Stop(abort=False, finish_sessions=True))
