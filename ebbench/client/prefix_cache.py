"""Share of prompt tokens that a server found in its prefix cache, and whether the plan explains it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from ebbench.client.sent_before import MetBefore
from ebbench.records.content import block_tokens

_QUERIES, _HITS = re.compile(r"prefix_cache_queries(_total)?$"), re.compile(r"prefix_cache_hits(_total)?$")
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
    queries, hits = _growth(server_metrics, _QUERIES), _growth(server_metrics, _HITS)
    # A server that restarted counts from zero again, so its counters may fall.
    return (hits / queries, "metrics") if queries > 0 and 0 <= hits <= queries else (None, "")


def _growth(metrics: pa.Table, name: re.Pattern[str]) -> float:
    """Growth of the counters of this name from first to last sample, summed over all labels."""
    series: dict[tuple[str, str], list[float]] = {}
    for row in metrics.to_pylist():
        if name.search(row["name"]):
            series.setdefault((row["name"], row["labels"]), []).append(row["value"])
    return sum(values[-1] - values[0] for values in series.values())


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
        again = min(tokens, known.get(row["content"], 0))
        blocks = row["hash_ids"] or ()
        held = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        repeated += max(again, min(tokens, held * size))
        total += tokens
        known[row["content"]] = max(known.get(row["content"], 0), tokens + row["output_tokens"])
        seen.update(blocks)
    return repeated / total if total else 0.0


def unplanned_hits(rate: float | None, plan: pa.Table) -> str | None:
    """A warning if more prompt tokens were cached than the plan repeats; else None."""
    if rate is None or plan.column("prompt").null_count < plan.num_rows:
        return None
    planned = repeated_share(plan)
    if rate <= planned + _TOLERANCE:
        return None
    return (
        f"{100 * rate:.0f} % of the prompt tokens came from the server's prefix cache, but this run's prompts repeat "
        f"only {100 * planned:.0f} %: the server had cached them before, which makes it faster than for new prompts; "
        "reset its prefix cache or give another --seed"
    )


def met_before(met: MetBefore | None, rate: float | None, plan: pa.Table) -> str | None:
    """A warning if the server was sent these prompts before, nothing emptied its cache, and its hits do not show it.

    ``rate``: share of the prompt tokens found cached, None if the server does not report it. For synthetic prompts
    a known rate says more (:func:`unplanned_hits`); of real text nobody knows how much it repeats.
    """
    text = plan.column("prompt").null_count < plan.num_rows
    if met is None or (rate is not None and not (text and rate > _TOLERANCE)):
        return None
    hits = "it reports no hits" if rate is None else f"{100 * rate:.0f} % of the prompt tokens were hits"
    when = datetime.fromtimestamp(met.unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    remedy = "" if text else ", or give another --seed"
    return (
        f"{100 * met.share:.0f} % of these prompts were sent to this server before, last on {when}, and nothing "
        f"emptied its prefix cache ({hits}): unless it was restarted since, TTFT and throughput are those of cached "
        f"prompts and not comparable with a first run; restart it{remedy}"
    )
