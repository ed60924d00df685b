"""Caveats of a measurement as data, and the only place that puts them in words.

A warning is stored as a code and the values it rests on, so that runs can be grouped by it; ``str`` of it gives
the sentence that is shown. Runs stored by earlier versions have the sentence itself, which is shown as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

WARM_CACHE, OTHER_MODEL = "warm-cache", "other-model"
"""Codes of warnings that the figures of a server are not of what was asked for: cached prompts, another model."""
KV_CACHE = "kv-cache"
"""Code of the warning that requests waited for memory, or were preempted."""

Texts = Mapping[str, str | Callable[..., str]]
"""Sentences by code: a format string, or a function, of the values."""


class Fact(msgspec.Struct, frozen=True):
    """Something to be told: a stable ``code`` and its ``values``; units are in their names."""

    code: str
    values: dict[str, Any] = {}

    def __hash__(self) -> int:
        return hash((self.code, str(self.values)))

    def worded(self, texts: Texts) -> str:
        """The sentence of it."""
        text = texts.get(self.code, self.code)
        try:
            return text.format(**self.values) if isinstance(text, str) else text(**self.values)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):  # values of a damaged file
            return f"{self.code} {self.values}"


def fact(code: str, **values: Any) -> Fact:
    """The fact of that code with its values."""
    return Fact(code, values)


class RunWarning(Fact, frozen=True, omit_defaults=True):
    """One caveat of a measurement. ``message`` and ``remedy``: what runs of earlier versions say instead of values."""

    message: str = ""
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """What is wrong, without the way out."""
        return self.message or self.worded(TEXTS)

    @property
    def way_out(self) -> str:
        """What to do about it; empty if nothing is known."""
        return self.remedy or (self.worded(WAYS_OUT) if self.code in WAYS_OUT and not self.message else "")

    def __str__(self) -> str:
        return f"{self.sentence} {self.way_out}".strip()

    def __hash__(self) -> int:
        return hash((self.code, self.message, str(self.values)))


def warning(code: str, **values: Any) -> RunWarning:
    """The caveat of that code with its values."""
    return RunWarning(code, values)


def _label(stated: bool) -> str:
    origin = "stated by you and not verified" if stated else "taken by default since none was stated"
    return (
        "The server schedules by its own settings and does not report them; the policy is only the label of this run, "
        f"{origin}."
    )


def _state_it(stated: bool) -> str:
    return "" if stated else "Give the policy it was started with as --policy."


def _stated_limits(given: Mapping[str, int]) -> str:
    options = " and ".join(f"--{name.replace('_', '-')} {value:,}" for name, value in given.items())
    return f"{options} changed nothing: the server runs already, with limits of its own that it does not report."


def _k_always_met(open_requests: int, max_num_seqs: int, k: int) -> str:
    return (
        f"At most {open_requests:,} requests are open, so {max_num_seqs - open_requests:,} of {max_num_seqs:,} slots "
        f"are always idle and k={k} never delays a refill: the policy behaves like v0."
    )


def _few_requests(completed: int, needed: int, shown: str, p90_needs: int, **_: Any) -> str:
    shown = f"{shown} instead" if shown else f"no percentile, since p90 takes {p90_needs}"
    return f"{completed:,} completed requests are too few for p99, which takes {needed}: tables show {shown}."


def _enough(
    needed: int, option: str, asked: int = 0, per_session: float = 1.0, log_sessions: int | None = None, **_: Any
) -> str:
    if option == "log":
        return f"p99 takes a log of {needed} requests or more."
    if option == "duration":
        return f"Use --duration {asked} or longer."
    if option == "both":
        return f"Use --num-prompts {asked} or more, and a --duration in which so many complete."
    several = f": that many conversations, {per_session:.1f} requests in each" if per_session != 1 else ""
    return f"Use --num-prompts {asked} or more{several}{_read_again(asked, log_sessions)}."


def _read_again(asked: int, log_sessions: int | None) -> str:
    if log_sessions is None or log_sessions >= asked:
        return ""
    return f"; the log holds {log_sessions:,} and is then read again"


def _longer(option: str, asked: int, log_sessions: int | None = None, closed_loop: bool = False, **_: Any) -> str:
    otherwise = " or a lower --max-concurrency" if closed_loop else ""
    if option == "log":
        return f"A log of {asked:,} sessions or more would help{otherwise}."
    return f"Use --num-prompts {asked} or more{otherwise}{_read_again(asked, log_sessions)}."


def _short_steady_window(share: float, **_: Any) -> str:
    return f"Only {100 * share:.0f} % of the run is steady; warm-up and drain weigh on the whole-run throughput."


def _rebuilt(recorded: int, planned: int, damaged_shards: int) -> str:
    left_out = f", without {damaged_shards} damaged shard(s)" if damaged_shards else ""
    records = f"{recorded} of {planned} requests have a record"
    return f"This run was cut off and rebuilt from its shards{left_out}: {records}."


def _kv_cache(
    full_share: float | None,
    running: float,
    slots: int | None,
    preemptions: int,
    repeated_tokens: int | None,
    repeated_share: float | None,
) -> str:
    parts = []
    if full_share is not None:
        seqs = "sequences running" if slots is None else f"of {slots:,} slots in use"
        parts.append(f"requests waited for memory {100 * full_share:.1f} % of the time, with {running:,.0f} {seqs}")
    if preemptions:
        text = f"{preemptions:,} preemption{'' if preemptions == 1 else 's'}"
        if repeated_tokens is not None and repeated_share is not None:
            again = f"{repeated_tokens:,} tokens computed again"
            text += f", {again} ({100 * repeated_share:.1f} % of the time)"
        parts.append(text)
    return f"KV cache full: {'; '.join(parts)}."


def _api_server_limit(busy: float, processes: int) -> str:
    return f"vLLM's API server is busy for {100 * busy:.0f} % of the time: it limits this run, rather than the GPU."


def _more_processes(busy: float, processes: int) -> str:
    more = f"--api-server-count {processes + 1}"
    return f"vLLM starts more processes with {more}, which is simulated with the same option."


def _warm_cache(
    hit_share: float | None, planned_share: float = 0.0, met_share: float = 0.0, last: str = "", text: bool = False
) -> str:
    if not last:
        return (
            f"{100 * (hit_share or 0.0):.0f} % of the prompt tokens came from the server's prefix cache, but this "
            f"run's prompts repeat only {100 * planned_share:.0f} %: the server had cached them before, which makes it "
            "faster than for new prompts; reset its prefix cache or give another --seed"
        )
    hits = "it reports no hits" if hit_share is None else f"{100 * hit_share:.0f} % of the prompt tokens were hits"
    return (
        f"{100 * met_share:.0f} % of these prompts were sent to this server before, last on {last}, and nothing "
        f"emptied its prefix cache ({hits}): unless it was restarted since, TTFT and throughput are those of cached "
        f"prompts and not comparable with a first run; restart it{'' if text else ', or give another --seed'}"
    )


def _other_model(answers: Mapping[str, int], asked: str, completed: int) -> str:
    others = sum(answers.values())
    if others == completed and len(answers) == 1 and " and " not in (name := next(iter(answers))):
        return (
            f"every answer names {name!r} as its model, not {asked!r} as asked for: an alias of it, or another model "
            "that these figures are then of"
        )
    named = ", ".join(f"{count:,} from {name!r}" for name, count in Counter(answers).most_common(3))
    more = f" and {len(answers) - 3} more" if len(answers) > 3 else ""
    return (
        f"{others:,} of {completed:,} answers did not come from {asked!r} alone, as asked for: {named}{more}. These "
        "figures mix models: a router in front of the server falls back, or balances among several; measure one model"
    )


TEXTS: Texts = {
    "api-server": (
        "These requests and answers keep {needed:.1f} processes of vLLM's API server busy on a data-centre host "
        "({token_us:g} us per token); vLLM starts {processes}. They are left out here: a real server answers later, or "
        "fewer requests."
    ),
    "api-server-limit": _api_server_limit,
    "budget-below-seqs": (
        "At most {budget} of up to {seqs} sequences decode per step under budget={budget}; vLLM refuses a token budget "
        "below --max-num-seqs."
    ),
    "directory-lost": (
        "The output directory was removed or replaced during the run and made again; what else was in it is gone."
    ),
    "few-requests": _few_requests,
    "k-always-met": _k_always_met,
    KV_CACHE: _kv_cache,
    "never-active-enough": (
        "At most {active:,} sequences are active, so with min_active={min_active} EB+ never chooses and stays in mixed "
        "batches, as v1."
    ),
    "no-steady-window": "The load never reached 95 % of its target, so there is no steady throughput.",
    "one-token-answers": (
        "{single:,} of {answers:,} answers have one token and so no TPOT: they count as within tpot:{tpot_ms:g}."
    ),
    OTHER_MODEL: _other_model,
    "policy-is-a-label": _label,
    "rebuilt": _rebuilt,
    "short-steady-window": _short_steady_window,
    "stated-limits": _stated_limits,
    WARM_CACHE: _warm_cache,
}
"""What is wrong, by code."""

WAYS_OUT: Texts = {
    "api-server": "Add --api-server {api_server}, with --api-server-count for several processes.",
    "api-server-limit": _more_processes,
    "budget-below-seqs": "Use budget={max_num_seqs} or more, or lower --max-num-seqs to {budget}.",
    "few-requests": _enough,
    "k-always-met": "Give --max-num-seqs {open_requests} to wait for {k} departures.",
    KV_CACHE: (
        "More memory for it (--gpu-memory-utilization, --kv-cache-dtype fp8, more GPUs) or less load would change "
        "these figures."
    ),
    "never-active-enough": "Use min_active={active} or less, or more open requests.",
    "no-steady-window": _longer,
    "policy-is-a-label": _state_it,
    "rebuilt": "Measure it again for figures to rely on.",
    "short-steady-window": _longer,
    "stated-limits": "Start the server with them.",
}
"""What to do about it, by code."""
