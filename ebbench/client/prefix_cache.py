"""What a server reports of a run: its drafts, and the share of prompt tokens that its prefix cache held, with whether
this or an earlier plan explains that."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ebbench.records.plan import block_tokens
from ebbench.records.warnings import WARM_CACHE, RunWarning, warning

# Remembers which prompts were sent to which server: its prefix cache may still hold them.
#
# One line per run of this user, in `$XDG_STATE_HOME/ebbench/prompts-sent.jsonl`, by default under `~/.local/state`.

MOST_LINES = 2_000
"""Older half dropped beyond this: a line has about 150 bytes."""


class SentPrompts(msgspec.Struct):
    """The prompts of one run. ``key`` identifies where they come from, ``count`` is how many of them it sent."""

    server: str
    model: str
    key: str
    count: int
    unix_s: int


class MetBefore(NamedTuple):
    """Share of a plan's prompts that a server was sent before, and when last (seconds since 1970)."""

    share: float
    unix_s: int


def prompts_key(plan: pa.Table) -> tuple[str, int]:
    """What the prompts of a plan come from, and how many there are.

    Synthetic prompts of one seed are the same whatever the load, the first n of any number of them; so their seed's
    stream of contents is the key. Real text and recorded blocks are the same only in the same plan.
    """
    for name in ("prompt", "hash_ids"):
        column = plan.column(name)
        if column.null_count < len(column):
            sink = hashlib.sha256()
            for text in column.to_pylist():
                sink.update(repr(text).encode())
            return sink.hexdigest()[:16], len(column)
    contents = pc.unique(plan.column("content")).to_numpy()
    return f"seed-{int(contents.min()) >> 32:x}", len(contents)


def note_prompts(server: str, model: str, plan: pa.Table, environ: Mapping[str, str] = os.environ) -> MetBefore | None:
    """Note that a server was sent a plan's prompts; returns what was noted before, None if nothing.

    Without a writable folder nothing is known, and nothing noted.
    """
    key, count = prompts_key(plan)
    now = SentPrompts(server, model, key, count, int(time.time()))
    path = record_path(environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            lines = file.read().splitlines()
            if len(lines) >= MOST_LINES:
                lines = lines[len(lines) // 2 :]
                file.truncate(0)
                file.write(b"\n".join(lines) + b"\n")
            file.write(msgspec.json.encode(now) + b"\n")
    except OSError:
        return None
    before = [
        sent for sent in map(_decoded, lines) if sent and (sent.server, sent.model, sent.key) == (server, model, key)
    ]
    if not before:
        return None
    return MetBefore(min(1.0, max(sent.count for sent in before) / count), max(sent.unix_s for sent in before))


def record_path(environ: Mapping[str, str]) -> Path:
    """The file that is written to."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ebbench" / "prompts-sent.jsonl"


def _decoded(line: bytes) -> SentPrompts | None:
    try:
        return msgspec.json.decode(line, type=SentPrompts)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


_QUERIES, _HITS = re.compile(r"prefix_cache_queries(_total)?$"), re.compile(r"prefix_cache_hits(_total)?$")
_DRAFTS = re.compile(r"spec_decode_num_drafts(_total)?$")
_DRAFTED = re.compile(r"spec_decode_num_draft_tokens(_total)?$")
_ACCEPTED = re.compile(r"spec_decode_num_accepted_tokens_per_pos(_total)?$")
_TOLERANCE = 0.02
"""Share of the prompt tokens by which hits may exceed what the plan repeats: system prompts, chat templates."""


def hit_rate(requests: pa.Table, server_metrics: pa.Table) -> tuple[float | None, str]:
    """Share of the prompt tokens that the prefix cache held, and where the figure is from: ``usage``, ``metrics``.

    ``usage``: prompt_tokens_details of the completed requests. ``metrics``: the server's counters over the run, which
    include other clients' requests. (None, "") if the server reports neither.
    """
    done = requests.filter(
        pc.and_(pc.equal(requests.column("status"), "ok"), pc.is_valid(requests.column("cached_tokens")))
    )
    prompt_tokens = pc.sum(done.column("input_tokens")).as_py()
    if prompt_tokens:
        return float(pc.sum(done.column("cached_tokens")).as_py()) / prompt_tokens, "usage"
    queries, hits = sum(_growths(server_metrics, _QUERIES).values()), sum(_growths(server_metrics, _HITS).values())
    # A server that restarted counts from zero again, so its counters may fall.
    return (hits / queries, "metrics") if queries > 0 and 0 <= hits <= queries else (None, "")


def drafts(requests: pa.Table, server_metrics: pa.Table) -> dict[str, Any]:
    """The tokens that a server drafted and accepted during a run, as facts of the run
    (:mod:`ebbench.analysis.summary`); empty if it reports none.

    By its answers if all that completed tell it, else by its own counters, which include other clients' requests, else
    by the answers that do.
    """
    done = requests.filter(pc.equal(requests["status"], "ok"))
    with_drafts = (
        done.filter(pc.is_valid(done["accepted_tokens"])) if "accepted_tokens" in done.column_names else done[:0]
    )
    counted = _counted_drafts(server_metrics)
    if with_drafts.num_rows and (with_drafts.num_rows == done.num_rows or not counted):
        return {"speculative": _told_drafts(with_drafts) | {"source": "answers", "answers": with_drafts.num_rows}}
    return {"speculative": counted | {"source": "metrics"}} if counted else {}


def _told_drafts(requests: pa.Table) -> dict[str, Any]:
    """Sums over answers. Those of a field that one of them lacks are unknown."""
    steps, drafted, accepted = (
        None if requests[name].null_count else int(pc.sum(requests[name]).as_py())
        for name in ("draft_steps", "drafted_tokens", "accepted_tokens")
    )
    histograms = requests["acceptance_histogram"]
    by_count: list[int] = []
    for row in histograms.to_pylist() if not histograms.null_count else ():
        by_count += [0] * (len(row) - len(by_count))
        for place, count in enumerate(row):
            by_count[place] += count
    at_least = [sum(by_count[place:]) for place in range(1, len(by_count))]
    drafted_counts = [] if drafted is None else [drafted]
    return {"steps": steps, "drafted": drafted_counts, "accepted": at_least, "accepted_tokens": accepted}


def _counted_drafts(server_metrics: pa.Table) -> dict[str, Any]:
    """The growth of the server's counters during the run; empty if it has none."""
    steps, drafted = (sum(_growths(server_metrics, name).values()) for name in (_DRAFTS, _DRAFTED))
    accepted: dict[int, float] = {}
    for labels, growth in _growths(server_metrics, _ACCEPTED).items():
        if (position := str(msgspec.json.decode(labels).get("position", ""))).isdigit():
            accepted[int(position)] = accepted.get(int(position), 0.0) + growth
    counts = [accepted[position] for position in sorted(accepted)]
    if steps <= 0 or not counts or min(counts) < 0:  # a server that restarted counts from zero again
        return {}
    return {"steps": int(steps), "drafted": [int(drafted)], "accepted": [int(count) for count in counts]}


def _growths(metrics: pa.Table, name: re.Pattern[str]) -> dict[str, float]:
    """Growth of the counters of this name from first to last sample, by labels."""
    series: dict[tuple[str, str], list[float]] = {}
    for row in metrics.to_pylist():
        if name.search(row["name"]):
            series.setdefault((row["name"], row["labels"]), []).append(row["value"])
    growth_by_labels: dict[str, float] = {}
    for (_, labels), values in series.items():
        growth_by_labels[labels] = growth_by_labels.get(labels, 0.0) + values[-1] - values[0]
    return growth_by_labels


def repeated_share(plan: pa.Table) -> float:
    """Share of the prompt tokens that repeat an earlier prompt or output of the plan: the upper bound of the hit rate.

    Prompts repeat by session (they continue the same content) or by ``hash_ids``. Real text counts as not
    repeated, since its repetitions are unknown.
    """
    known: dict[int, int] = {}
    seen: set[int] = set()
    repeated = total = 0
    size = block_tokens(plan)
    for row in plan.select(["content", "hash_ids", "input_tokens", "output_tokens"]).to_pylist():
        tokens = row["input_tokens"]
        own_repeats = min(tokens, known.get(row["content"], 0))
        blocks = row["hash_ids"] or ()
        first_new = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        repeated += max(own_repeats, min(tokens, first_new * size))
        total += tokens
        known[row["content"]] = max(known.get(row["content"], 0), tokens + row["output_tokens"])
        seen.update(blocks)
    return repeated / total if total else 0.0


def unplanned_hits(rate: float | None, plan: pa.Table) -> RunWarning | None:
    """A warning if more prompt tokens were cached than the plan repeats; else None."""
    if rate is None or plan.column("prompt").null_count < plan.num_rows:
        return None
    planned = repeated_share(plan)
    if rate <= planned + _TOLERANCE:
        return None
    return warning(WARM_CACHE, hit_share=rate, planned_share=planned)


def met_before(met: MetBefore | None, rate: float | None, plan: pa.Table) -> RunWarning | None:
    """A warning if the server was sent these prompts before, nothing emptied its cache, and its hits do not show it.

    ``rate``: share of the prompt tokens found cached, None if the server does not report it. For synthetic prompts
    a known rate says more (:func:`unplanned_hits`); of real text nobody knows how much it repeats.
    """
    text = plan.column("prompt").null_count < plan.num_rows
    if met is None or (rate is not None and not (text and rate > _TOLERANCE)):
        return None
    when = datetime.fromtimestamp(met.unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return warning(WARM_CACHE, hit_share=rate, met_share=met.share, last=when, text=text)
