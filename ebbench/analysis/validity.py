"""What speaks against a run: reasons that make it INVALID, failed requests by cause with a remedy, and caveats.

An INVALID run is written and shown, but not gated or compared. Caveats of several runs are said once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.analysis.columns import MISSING, STATUSES, RequestColumns
from ebbench.analysis.metrics import Metrics
from ebbench.records.schema import ABANDONED, EARLIER_TURN_ABANDONED, EARLIER_TURN_FAILED
from ebbench.records.warnings import ABOUT_SERVER, KV_CACHE, RunWarning, in_ranges, warning, warning_shape
from ebbench.spec.client import lag_limit_ms
from ebbench.spec.server import VIRTUAL_TIME

FAILURE_COLUMNS = ("status", "phase", "error_class", "error_body")
"""Columns of the requests table that :func:`failures_by_cause` reads."""

LONGEST_EXAMPLE = 200  # characters
_ADVICE = re.compile(r"\((Retry-After|Location|Content-Type): [^)]*\) ")
"""What the client puts before the body of a refusal: the headers that say what to do."""


@dataclass(frozen=True)
class Failure:
    """Requests with the same cause of failure. ``example``: the most frequent message, shortened; empty without one.

    ``remedy``: options or steps that may help; empty if none is known.
    """

    error_class: str
    count: int
    example: str
    remedy: str

    def __str__(self) -> str:
        """``60 x error_frame: Token id 29783 is out of vocabulary -> give --vocab-size ...``."""
        message = f"{self.count:,} x {self.error_class}" + (f": {self.example}" if self.example else "")
        return f"{message} -> {self.remedy}" if self.remedy else message


@dataclass(frozen=True)
class _Cause:
    """A known cause, recognised by two patterns: of the error class and of the message."""

    error_class: str
    message: str
    remedy: str

    def explains(self, error_class: str, message: str) -> bool:
        return bool(re.fullmatch(self.error_class, error_class) and re.search(self.message, message, re.IGNORECASE))


_REFUSED_FIELD = r"(un(supported|known|recogni[sz]ed|expected)|not (permitted|supported|allowed)|extra|additional)"
_LEAVE_OUT = "--extra-body '{{\"{}\": null}}'"
_OTHER_LIMIT = "--max-tokens-field max_tokens (or max_completion_tokens, which chat sends by default)"
_SERVER_LOG = "the server's log says why"
_CAUSES = (
    _Cause(".*", r"out of vocabulary|vocab(ulary)? size", "give --vocab-size, no larger than the model's vocabulary"),
    _Cause(
        ".*",
        r"maximum (context|model) length|max_model_len|longer than the maximum|too long|available context"
        r"|finish reason '(length|limit|max_(output_)?tokens)'",
        "give --max-model-len as the server has it, with --drop-too-long",
    ),
    _Cause("http_404", r"model", "give --model as the server's /v1/models names it"),
    _Cause("http_40[45]", "", "another --endpoint (completions, chat, ...; see --help), or another URL"),
    _Cause("http_40[13]", "", "set EBBENCH_API_KEY (or OPENAI_API_KEY) to a key that the server accepts"),
    _Cause("http_429", "", "a lower --request-rate or --max-concurrency"),
    _Cause("http_503", "", "a lower load, or wait until the server is ready (--ready-timeout)"),
    _Cause(
        "http_[45].*",
        r"(?=.*(prompt|input)).*((be|expected) an? (valid )?string|cannot unmarshal (array|number))",
        "the server takes no token ids: give --endpoint chat, which sends words",
    ),
    _Cause("http_4.*", r"chat template", "--endpoint completions: the model has no chat template"),
    _Cause("http_4.*", r"priority", "a server started with --scheduling-policy priority, or leave the priorities out"),
    _Cause("http_4.*", r"ignore_eos", "--no-ignore-eos: the server does not know ignore_eos"),
    _Cause("http_4.*", r"temperature", f"--temperature 1, or leave it out with {_LEAVE_OUT.format('temperature')}"),
    _Cause(
        "http_4.*",
        r"stream_options",
        f"leave it out with {_LEAVE_OUT.format('stream_options')}, if the server reports usage without being asked",
    ),
    _Cause("http_4.*", rf"(?=.*{_REFUSED_FIELD}).*max_(completion_)?tokens", _OTHER_LIMIT),
    _Cause(
        "http_4.*",
        rf"{_REFUSED_FIELD}.*(param|argument|field|input|propert)",
        f"try --no-ignore-eos (ignore_eos is no field of OpenAI's); leave another out with {_LEAVE_OUT.format('NAME')}",
    ),
    _Cause(
        "http_400",
        "^$",
        "the server does not say why: it may refuse ids that are no UUID (--no-request-ids), or a field "
        "(--extra-body, --temperature)",
    ),
    _Cause("http_4.*", "", "the server refuses the request: check --endpoint, --extra-body and --temperature"),
    _Cause("http_3.*", r"completions/\)", "a proxy wants a slash at the end, which the API has not: change its rule"),
    _Cause("http_3.*", "", "the server points to another URL: give that one as --engine"),
    _Cause("http_5.*", "", _SERVER_LOG),
    _Cause("connect_.*", r"certificate", "give the certificate authority with --ca-file, or in SSL_CERT_FILE"),
    _Cause(
        "client_limit", "too many open files", "a limit of this machine: raise it with `ulimit -n`, or more --workers"
    ),
    _Cause(
        "client_limit",
        "assign requested address",
        "this machine has no free port left to the server: a lower load, or --connections other than per-request",
    ),
    _Cause("client_limit", "", "a limit of this machine, not of the server: check its memory and its limits"),
    _Cause("connect_timeout", "", "a longer --connect-timeout, or a lower load"),
    _Cause("connect_error", "", "check that the server runs at this URL"),
    _Cause("(idle|first_token)_timeout", "", "a longer --idle-timeout, or a lower load"),
    _Cause("total_timeout", "", "a longer --total-timeout, or a lower load"),
    _Cause(
        "no_usage", "", "let the server report usage in streams, or give --tokenizer FILE: tokens are then an estimate"
    ),
    _Cause("not_json", "", "the server must answer with JSON: check --endpoint and the URL"),
    _Cause("bad_usage", "", "a fault of the server or of a proxy before it"),
    _Cause("compressed_stream", "", "switch off compression of text/event-stream in the server or the proxy before it"),
    _Cause("short_output", "", "--no-ignore-eos, if the server cannot ignore the end-of-sequence token"),
    _Cause("long_output", "", f"if the server did not take the limit: {_OTHER_LIMIT}"),
    _Cause("not_a_stream", r"<html|<!doctype", "a log-in page or another service answers: check the URL and the key"),
    _Cause("not_a_stream", "", "the server must stream its answers (text/event-stream)"),
    _Cause("error_frame|aborted|truncated|connection_(reset|closed)", "", _SERVER_LOG),
    _Cause(EARLIER_TURN_FAILED, "", "see the failures of the turns before them"),
    _Cause("worker_lost", "", "a client process died: check whether memory ran out"),
    _Cause("node_lost", "", "a client node was lost: check that machine and its network, or use fewer nodes"),
    _Cause("out_of_memory", "", "a device or topology with more memory, or smaller --max-num-seqs"),
    _Cause("client_error", "", "a bug in ebbench: please report it with the command"),
)


def failures_by_cause(requests: pa.Table, phase: str = "") -> tuple[Failure, ...]:
    """Requests that did not complete, grouped by error class and cause, the most frequent first.

    ``requests`` has FAILURE_COLUMNS; ``phase``: only this phase, empty: all. Every request that is not ``ok`` is in
    exactly one group; requests without an error class are grouped by status. Requests whose clients hung up, and those
    that were not sent because of that, did what the plan says and are no failures.
    """
    chosen = pc.invert(pc.is_in(requests["status"].cast(pa.string()), value_set=pa.array(["ok", ABANDONED])))
    planned = pc.equal(pc.fill_null(requests["error_class"].cast(pa.string()), ""), EARLIER_TURN_ABANDONED)
    chosen = pc.and_(chosen, pc.invert(planned))
    if phase:
        chosen = pc.and_(chosen, pc.equal(requests["phase"], phase))
    failed = requests.select(list(FAILURE_COLUMNS)).filter(chosen)
    if not failed.num_rows:
        return ()
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for error_class, message, count in _distinct(failed):
        remedy = next((cause.remedy for cause in _CAUSES if cause.explains(error_class, message)), "")
        groups.setdefault((error_class, remedy), []).append((message, count))
    failures = [
        Failure(error_class, sum(count for _, count in messages), _example(messages), remedy)
        for (error_class, remedy), messages in groups.items()
    ]
    return _ordered(failures)


def merge_failures(several: Iterable[Sequence[Failure]]) -> tuple[Failure, ...]:
    """The failures of several runs merged; a merged failure keeps the first example."""
    merged: dict[tuple[str, str], Failure] = {}
    for failure in (failure for failures in several for failure in failures):
        key = (failure.error_class, failure.remedy)
        before = merged.get(key)
        count, example = (before.count, before.example) if before else (0, "")
        merged[key] = replace(failure, count=count + failure.count, example=example or failure.example)
    return _ordered(merged.values())


def _ordered(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The most frequent first; last those that only follow from other failures."""

    def place(failure: Failure) -> tuple[bool, int, str]:
        return failure.error_class == EARLIER_TURN_FAILED, -failure.count, failure.error_class

    return tuple(sorted(failures, key=place))


def _distinct(failed: pa.Table) -> Iterator[tuple[str, str, int]]:
    """Error class, message and count, in order of first appearance."""
    classes = pc.coalesce(failed["error_class"].cast(pa.string()), failed["status"].cast(pa.string()))
    pairs = pa.table({"class": classes, "body": failed["error_body"].cast(pa.string())})
    counted = pairs.group_by(["class", "body"], use_threads=False).aggregate([([], "count_all")])
    for row in counted.to_pylist():
        # OpenAI's ``error.message``, FastAPI's ``detail``, or the text itself.
        text = (row["body"] or "").strip()
        advice = mark[0] if (mark := _ADVICE.match(text)) else ""
        text = text[len(advice) :]
        if text.startswith("{"):
            with suppress(msgspec.DecodeError, RecursionError):  # not JSON, or cut at the maximum length
                text = _message_in(msgspec.json.decode(text)) or text
        yield row["class"], " ".join(f"{advice}{text}".split()), row["count_all"]


def _example(messages: Sequence[tuple[str, int]]) -> str:
    """The most frequent message (of equals the first), on one line."""
    counts: dict[str, int] = {}
    for message, count in messages:
        counts[message] = counts.get(message, 0) + count
    example = max(counts, key=lambda message: (bool(message), counts[message]))
    return example if len(example) <= LONGEST_EXAMPLE else f"{example[:LONGEST_EXAMPLE].rstrip()}…"


def _message_in(value: object) -> str:
    """The message inside a decoded error; empty if there is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # FastAPI: one entry per field
        return "; ".join(filter(None, map(_message_in, value)))
    if not isinstance(value, dict):
        return ""
    message = next(
        (inner for key in ("error", "message", "detail", "msg") if (inner := _message_in(value.get(key)))), ""
    )
    field = value.get("param") or value.get("loc")
    name = field[-1] if isinstance(field, list) and field else field
    return f"{message} ({name})" if message and isinstance(name, str) and name not in message else message


Owner = Callable[[Collection[int]], str]
"""What stands before a caveat of the runs at these places; "" if it holds for all runs."""


def of_device(engine: str, warnings: Iterable[RunWarning]) -> tuple[RunWarning, ...]:
    """The warnings of a run that are about its device: what it estimates, simplifies or leaves out.

    All warnings of a simulated engine count as its device's (units of another pool, images, a server that would not
    start). Of a real engine those about the server count, such as answers of another model and cached prompts, and not
    those about its client and this one run. What a full KV cache cost counts on both.
    """
    codes = {"device", "engine", KV_CACHE} if engine in VIRTUAL_TIME else {"device", KV_CACHE, *ABOUT_SERVER}
    return tuple(said for said in warnings if {said.about, said.code} & codes)


def told_once(
    told_by_run: Sequence[Iterable[RunWarning]], owner: Owner, worded: Callable[[RunWarning], str] = str
) -> list[str]:
    """The caveats of runs, each once, preceded by ``owner``'s name for the runs that have it.

    Caveats that differ only in numbers are merged, with the range of each number.
    """
    alike: dict[Any, list[tuple[RunWarning, int]]] = {}
    for place, warnings in enumerate(told_by_run):
        for said in warnings:
            alike.setdefault((said.code, said.message, warning_shape(said.values)), []).append((said, place))
    return [
        owner({place for _, place in told}) + worded(in_ranges([said for said, _ in told])) for told in alike.values()
    ]


def by_policy(runs: Sequence[str]) -> Owner:
    """Names the policies of the runs that have a caveat, unless all have; ``runs``: the policy of each run."""

    def owner(places: Collection[int]) -> str:
        names = dict.fromkeys(runs[place] for place in sorted(places))
        return "" if len(names) == len(set(runs)) else f"{', '.join(names)}: "

    return owner


def by_settings(runs: Sequence[Mapping[str, str]], words: Callable[[str, str], str], of: str) -> Owner:
    """Names the settings that the runs with a caveat have and others lack; ``runs``: the settings of each run, by name.

    No more settings are named than it takes, the first ones first. ``words``: a setting's name and values in words.
    ``of``: what is counted where no choice of values has exactly these runs, such as ``cells``.
    """

    def owner(places: Collection[int]) -> str:
        if len(places) == len(runs):
            return ""
        chosen: dict[str, list[str]] = {}
        for name in runs[0]:
            values = list(dict.fromkeys(runs[place][name] for place in sorted(places)))
            if len(values) < len({run[name] for run in runs}):  # other runs have other values
                chosen[name] = values
            having = {place for place, run in enumerate(runs) if all(run[own] in chosen[own] for own in chosen)}
            if having == set(places):
                return f"{', '.join(words(own, ' or '.join(values)) for own, values in chosen.items())}: "
        return f"{len(places)} of {len(runs)} {of}: "

    return owner


FAILURE_LIMIT = 0.01
"""Share of the planned requests from which on failures make a run INVALID."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of the validity check besides the measurements.

    ``paced_sends``: requests are sent at scheduled times, so that lateness is the client's; False in virtual time and
    with a concurrency cap, which makes requests wait. ``failure_limit``: share of planned requests that may fail.
    ``lag_limit_ms``: allowed p99 lateness; None: the value of :func:`lag_limit_ms` for these requests.
    """

    interrupted: bool = False
    paced_sends: bool = True
    failure_limit: float = FAILURE_LIMIT
    lag_limit_ms: float | None = None


def invalid_reasons(
    requests: pa.Table, plan: pa.Table, columns: RequestColumns, metrics: Metrics, conditions: Conditions
) -> tuple[RunWarning, ...]:
    """All reasons why the run is INVALID; empty for a valid run."""
    reasons = [
        *_accounting(requests, plan, columns),
        *_failures(requests, metrics, conditions.failure_limit),
        *(_lateness(requests, columns, conditions.lag_limit_ms) if conditions.paced_sends else []),
    ]
    if conditions.interrupted:
        reasons.append(warning("interrupted"))
    return tuple(reasons)


def _accounting(requests: pa.Table, plan: pa.Table, columns: RequestColumns) -> list[RunWarning]:
    reasons = []
    planned, recorded = plan.column("request_id"), requests.column("request_id")
    if requests.num_rows != plan.num_rows:
        reasons.append(warning("requests-missing", planned=plan.num_rows, recorded=requests.num_rows))
    repeated = requests.num_rows - pc.count_distinct(recorded).as_py()
    if repeated:
        reasons.append(warning("requests-repeated", requests=repeated))
    unplanned = pc.sum(pc.invert(pc.is_in(recorded, value_set=planned.combine_chunks()))).as_py() or 0
    if unplanned:
        reasons.append(warning("requests-unplanned", requests=unplanned))
    unknown = sorted(set(columns.status.tolist()) - set(STATUSES))
    if unknown:
        reasons.append(warning("status-unknown", statuses=unknown))
    claimed, ok = columns.status == "ok", columns.ok
    untimed = int((claimed & ~ok).sum())
    if untimed:
        reasons.append(warning("times-missing", requests=untimed))
    # null: an answer that has no tokens (embeddings, rerank)
    silent = int((ok & pc.fill_null(pc.less(requests["output_tokens"], 1), False).to_numpy()).sum())
    if silent:
        reasons.append(warning("tokens-missing", requests=silent))
    ordered = (columns.intended <= columns.first_token) & (columns.first_token <= columns.last_token)
    backwards = int((ok & ~ordered).sum())
    if backwards:
        reasons.append(warning("times-backwards", requests=backwards))
    return reasons


def _failures(requests: pa.Table, metrics: Metrics, limit: float) -> list[RunWarning]:
    if not metrics.planned:
        return [warning("nothing-planned")]
    followers = pc.sum(pc.equal(requests.column("error_class"), EARLIER_TURN_FAILED)).as_py() or 0
    failed = metrics.counts["failed"] + metrics.counts["timed_out"] + followers
    if failed == metrics.planned:
        return [warning("all-failed", planned=metrics.planned)]
    if failed > limit * metrics.planned:
        counts = {"failed": failed, "planned": metrics.planned, "after_failed_turns": followers}
        return [warning("many-failed", **counts, limit=limit)]
    return []


def _lateness(requests: pa.Table, columns: RequestColumns, asked_ms: float | None) -> list[RunWarning]:
    """The client did not keep its schedule: its p99 lag is above the limit."""
    sent = (columns.sent != MISSING) & (columns.intended != MISSING)
    if not sent.any() or not columns.ok.any():
        return []
    p99_ms = float(np.percentile((columns.sent - columns.intended)[sent], 99)) / 1e6
    limit_ms = lag_limit_ms(requests, asked_ms)
    if p99_ms <= limit_ms:
        return []
    return [warning("client-late", p99_lag_ms=p99_ms, limit_ms=limit_ms)]
