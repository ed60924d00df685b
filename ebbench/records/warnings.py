"""Caveats of a measurement as data, and the only place that puts them in words.

A warning is stored as a code and the values it rests on, so that runs can be grouped by it; ``str`` of it gives
the sentence that is shown. Runs stored by earlier versions have the sentence itself, which is shown as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

WARM_CACHE, OTHER_MODEL = "warm-cache", "other-model"
"""Codes of warnings that the figures of a server are not of what was asked for: cached prompts, another model."""
ESTIMATED_TOKENS, ESTIMATED = "estimated-tokens", "estimated_tokens"
"""Code of the warning that a client counted output tokens, and the fact in a manifest that says how."""
ABOUT_SERVER = frozenset({WARM_CACHE, OTHER_MODEL, ESTIMATED_TOKENS})
"""Codes of warnings that figures measured on a server are not what they seem."""
HOST_UNFITTED, HOST_DOUBTED, MIXING_UNMEASURED = "host-unfitted", "host-doubted", "mixing-unmeasured"
"""Codes of a device's warnings whose size depends on the run."""
LIBRARY_ABSENT = "library-absent"
"""Code of the hint that a library may have what was not measured, and is not installed."""
KV_CACHE = "kv-cache"
"""Code of the warning that requests waited for memory, or were preempted."""
SERVER_BUSY, SERVER_SIMULATED, SERVER_LIMITS = "api-server", "api-server-simulated", "api-server-limit"
API_SERVER_LOAD = frozenset({SERVER_BUSY, SERVER_SIMULATED, SERVER_LIMITS})
"""Codes of warnings: an API server would be busy and is left out, or is simulated therefore; or it limits the run."""

SEEN: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "older-vllm": {"TPOT": (-0.08, -0.02)},
    "older-vllm-queue": {"throughput": (0.0, 0.8), "TTFT": (-0.75, -0.1), "TPOT": (-0.6, -0.1)},
    "older-vllm-experts": {"TPOT": (-0.3, 0.0)},
    "experts-few-sequences": {"TPOT": (-0.28, 0.0)},
    "experts-first-tokens": {"TTFT": (-0.6, 0.0)},
    "first-tokens-without-graphs": {"TTFT": (-0.6, -0.09)},
    "front-end-decides": {"TTFT": (-0.62, 0.13)},
}
"""How far off figures were against measured servers, by code of the caveat that says so: shares, ours over theirs less
one. ``ebbench fidelity`` compares them with every row of its sources."""

Texts = Mapping[str, str | Callable[..., str]]
"""Sentences by code: a format string, or a function, of the values."""


class Fact(msgspec.Struct, frozen=True):
    """Something to be told: a stable ``code`` and its ``values``; units are in their names."""

    code: str
    values: dict[str, Any] = {}

    def __hash__(self) -> int:
        return hash((self.code, str(self.values)))

    def worded(self, texts: Texts) -> str:
        """The sentence of it; code and values where they do not fit, as in a damaged file."""
        try:
            text = texts[self.code]
            return text.format(**self.values) if isinstance(text, str) else text(**self.values)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            return f"{self.code} {self.values}"

    def to_dict(self, text: str) -> dict[str, Any]:
        """``code``, ``values`` and the ``text`` that is shown, for JSON and Parquet."""
        return {"code": self.code, "values": self.values, "text": text}


def fact(code: str, **values: Any) -> Fact:
    """The fact of that code with its values."""
    return Fact(code, values)


class RunWarning(Fact, frozen=True, omit_defaults=True):
    """One caveat of a measurement. ``message`` and ``remedy``: what runs of earlier versions say instead of values.

    ``about``: ``plan``, ``device`` or ``engine``, if it is of one of these rather than of the run.
    """

    about: str = ""
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


def stored_warning(value: Any) -> RunWarning:
    """A warning as it was stored; earlier versions stored the sentence alone. Raises msgspec.ValidationError."""
    return RunWarning("", message=value) if isinstance(value, str) else msgspec.convert(value, RunWarning)


def shown_text(told: str | Mapping[str, Any]) -> str:
    """The text of a :meth:`Fact.to_dict`; results stored by earlier versions have the text alone."""
    return told if isinstance(told, str) else str(told["text"])


def told_columns(told: Mapping[str, Iterable[str | Mapping[str, Any]]]) -> dict[str, list[str]]:
    """Codes, and values as JSON, of lists of :meth:`Fact.to_dict` by name, for Parquet: ``warnings`` gives
    ``warning_codes`` and ``warning_values``. What has only a text has an empty code."""
    columns: dict[str, list[str]] = {}
    for name, entries in told.items():
        known: list[Mapping[str, Any]] = [
            entry if isinstance(entry, Mapping) else {"code": "", "values": {}} for entry in entries
        ]
        columns[f"{name[:-1]}_codes"] = [entry["code"] for entry in known]
        columns[f"{name[:-1]}_values"] = [msgspec.json.encode(entry["values"]).decode() for entry in known]
    return columns


def warning_shape(value: Any) -> Any:
    """What warnings that differ only in numbers have in common, as a key."""
    if isinstance(value, Mapping):
        return tuple((name, warning_shape(inner)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(warning_shape, value))
    return "#" if isinstance(value, int | float) and not isinstance(value, bool) else value


def in_ranges(alike: Sequence[RunWarning]) -> RunWarning:
    """One warning for several of one shape, with the range of each number."""
    return msgspec.structs.replace(alike[0], values=_range_of([told.values for told in alike]))


def _range_of(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _range_of([entry[name] for entry in values]) for name in first}
    if isinstance(first, list | tuple):
        return [_range_of(column) for column in zip(*values, strict=True)]
    if min(values, key=str) == max(values, key=str):
        return first
    return _Range(min(values), max(values))


class _Range(float):
    """A number that differs among runs: text shows both ends, a calculation applies to both; it equals no number and is
    above or below another as its higher end is. This way the sentences about one run serve for several.
    """

    ends: tuple[float, float]

    def __new__(cls, low: float, high: float) -> _Range:
        made = super().__new__(cls, high)
        made.ends = low, high
        return made

    def __format__(self, spec: str) -> str:
        low, high = (format(end, spec) for end in self.ends)
        return low if low == high else f"{low} to {high}"

    def __str__(self) -> str:
        return format(self, "")

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = float.__hash__

    def _with(self, other: float, operation: Callable[[float, float], float]) -> _Range:
        others = other.ends if isinstance(other, _Range) else (other, other)
        return _Range(*sorted(map(operation, self.ends, others)))

    def __add__(self, other: float) -> _Range:
        return self._with(other, lambda end, by: end + by)

    __radd__ = __add__

    def __sub__(self, other: float) -> _Range:
        return self._with(other, lambda end, by: end - by)

    def __rsub__(self, other: float) -> _Range:
        return self._with(other, lambda end, by: by - end)

    def __mul__(self, other: float) -> _Range:
        return self._with(other, lambda end, by: end * by)

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> _Range:
        return self._with(other, lambda end, by: end / by)


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


def _use_more_prompts(
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
    left_out = f", without {counted(damaged_shards, 'damaged shard')}" if damaged_shards else ""
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
    if set(answers) == {asked}:  # the name asked for is only in the count where a request named an adapter
        return (
            f"{others:,} of {completed:,} answers to requests for an adapter name {asked!r} itself as their model: the "
            "server does not have these adapters, or names its base model for them"
        )
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


def _host_unfitted(
    device: str, step_s: float, sequence_s: float, change_low: float | None = None, change_high: float = 0.0
) -> str:
    taken = f"{step_s * 1e3:g} ms and {sequence_s * 1e6:g} us per sequence are taken"
    text = f"the host's time per step on {device} was never fitted: {taken}"
    if change_low is None:
        return text
    change = f"{100 * change_low:+.0f} to {100 * change_high:+.0f} %"
    return f"{text}; with those fitted on other GPUs this run's steps would take {change}"


def _unused_numbers(
    unused: Sequence[str], times: str, model: str, file: str, device: str, published_for: Sequence[str]
) -> str:
    source, instead = {
        "tables": (
            f"step times are the kernel tables of the bundled {device}, the name in {file}",
            "under a name of its own the device is a roofline by them",
        ),
        "linear": (
            f"step times of {model} are the coefficients published for {', '.join(published_for)}, which {file} names "
            "in calibration_names",
            "without that the device is a roofline by them",
        ),
        "roofline": (
            f"step times of {model} are a roofline by the bandwidth and arithmetic rate of {file}", "leave them out",
        ),
        "measured": (f"step times are the measured ones that {file} names", "leave them out"),
    }[times]  # fmt: skip
    *others, last = unused
    named = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"{source}: its {named} not used; {instead}"


def _mixing_unmeasured(device: str, taken: str, share: float | None = None, leaning: str = "") -> str:
    text = (
        f"attention of mixed batches was not measured on {device}: {taken} is taken, and whether mixed or exclusive "
        "batches are faster rests on it"
    )
    if share is None:
        return text
    return f"{text}; mixed steps take {100 * share:.0f} % of this run's time{f'; {leaning}' if leaning else ''}"


def _host_doubted(seqs: int, host_s: float, gpu_s: float, device: str, doubt: str) -> str:
    host, gpu = f"the host's {host_s * 1e3:.1f} ms per step", f"the GPU's {gpu_s * 1e3:.1f}"
    return f"with {seqs} short sequences {host} decide on {device}, not {gpu}: {doubt}"


def _slower(times: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {ratio:.2f} times" for what, ratio in times.items())


def _fp8_slower(device: str, times: Mapping[str, float], quantization: str | None, by_block: bool) -> str:
    weights = f"with --quantization {quantization}" if quantization else "with weights in FP8"
    why = (
        "; kernels with one scale per tensor or channel are slow there, weights published with one scale per block "
        "(the model's own config.json) may be faster"
    )
    slower = f"some steps take longer than in 16 bits, by the kernel tables of {device}: {_slower(times)}"
    return f"{weights} {slower}{'' if by_block else why}"


def _fewer_gpus_faster(device: str, gpus: int, fewer: int, times: Mapping[str, float]) -> str:
    return (
        f"some steps take longer on {gpus} {device} than on {fewer}, since their collectives cost more than they save: "
        f"{_slower(times)}; {fewer} hold the model, too, and as many GPUs in replicas can carry more"
    )


def _collectives(gpus: int, device: str, link: str, taken: str) -> str:
    return f"collectives among {gpus} {device} over {link} were not measured: {taken}"


def _collectives_lent(gpus: int, device: str, link: str, taken_from: str) -> str:
    # IOG, throughput in the median: +48 % (two GPUs), +16 % (four); of eight -20 %.
    size = "of two and four RTX 4090, whose links they are lent to, servers had 32 and 14 % less throughput than so"
    return _collectives(gpus, device, link, f"those of {taken_from} stand for them; {size}")


def _collectives_formula(gpus: int, device: str, link: str, bytes_per_s: float, latency_s: float, bounds: str) -> str:
    ring = f"their time is that of a ring at {bytes_per_s / 1e9:g} GB/s with {latency_s * 1e6:g} us of latency"
    # Against the tables, 16 KB to 32 MB: four and eight L40S and RTX PRO 6000 -23 to -91 %; NVLink -58 to +127 %.
    size = (
        "too short by a quarter to nine tenths over PCIe between four or more GPUs, half to twice as long over NVLink"
    )
    return _collectives(gpus, device, link, f"{ring}{bounds}; where it can be compared such a time is {size}")


def _attention_scaled(wanted: Sequence[int], device: str, nearest: Sequence[int]) -> str:
    heads = "{} query and {} KV heads of {}"
    return (
        f"attention of {heads.format(*wanted)} was not measured on {device}: that of {heads.format(*nearest)}, scaled; "
        "measured ones are off by 2 % in the median for decodes (one in ten by 16) and by 20 % for prompts (one in ten "
        "by 60) when scaled so from each other, in neither direction"
    )


def _tokens_estimated(bytes_per_token: int, why: str = "") -> str:
    text = f"token counts of text are estimated (one per {bytes_per_token} bytes)"
    return f"{why}; {text}" if why else f"{text}; give --tokenizer for exact ones"


def _source_too_short(source: str, sessions: int, asked: int, again: bool) -> str:
    sent = "they are taken again, each time with new contents" if again else f"{sessions:,} are sent"
    return f"{source} holds {sessions:,} sessions where the plan takes {asked:,}: {sent}"


def _many_failed(failed: int, planned: int, after_failed_turns: int, limit: float) -> str:
    ways = "failed, timed out or came after a turn that did" if after_failed_turns else "failed or timed out"
    return f"{failed} of {planned} requests {ways}, more than {limit:.0%}"


def _shared_times(answers: int, joined_share: float, at_once: int, hidden: int) -> str:
    parts = []
    if joined_share:
        parts.append(
            f"{100 * joined_share:.0f} % of the output tokens came together with others, in one message or one read: "
            "TPOT leaves out those that came with the first, median and percentiles of ITL do not describe generation"
        )
    if at_once:
        parts.append(f"{at_once} of {answers} answers came all at once: no TPOT and no ITL, and no TPOT limit is met")
    if hidden:
        parts.append(
            f"{hidden} of {answers} answers count thinking that was not sent: TTFT includes it, TPOT and ITL are of "
            "the tokens after it"
        )
    return f"Not every token has a time of its own. {'; '.join(parts)}."


def _odd_usage(field: str, answers: int, first: str) -> str:
    treated = "failed" if field == "completion_tokens" else "left out"
    counted, before = ("1 answer", "") if answers == 1 else (f"{answers:,} answers", "the first: ")
    where = "usage" if field == "usage" else f"{field} in the usage"
    return f"{where} of {counted} is no possible number of tokens ({before}{first}): {treated}"


def counted(number: int, noun: str) -> str:
    """``1 pair``, ``2,000 pairs``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed_seeds(seeds: Sequence[int]) -> str:
    """The first seeds in words."""
    return f"seed {', '.join(map(str, seeds[:5]))}{', ...' if len(seeds) > 5 else ''}"


def health_in_words(status: int, timeout_s: float) -> str:
    """What a server's /health says; ``status`` 0: it gives no answer within ``timeout_s``."""
    return f"/health answers {status}" if status else f"/health gives no answer within {timeout_s:.3g} s"


def _not_ready(health: int, timeout_s: float) -> str:
    said = health_in_words(health, timeout_s)
    return f"The server's {said}; a request for one token was answered, so the run went on."


def _rows_left_out(rows: int, dropped: Mapping[str, Mapping[str, int]], kept_with: str) -> str:
    total = sum(count["rows"] for count in dropped.values())
    why = ", ".join(
        f"{count['rows']:,} with {reason} (first: line {count['first_line']:,})" for reason, count in dropped.items()
    )
    remedy = f"; {kept_with} keeps failed requests that have token counts" if kept_with else ""
    return f"{total:,} of {rows:,} rows left out: {why}{remedy}"


def _hits_not_replayed(cached_share: float, sessions: bool) -> str:
    within = "only requests of one session" if sessions else "no requests"
    return (
        f"{100 * cached_share:.1f} % of the prompt tokens were cached when recorded; without hash_ids or messages "
        f"{within} share prefixes here, so that the hit rate of a run can be another"
    )


def _columns_added(column: str, added: Sequence[str]) -> str:
    parts = " + ".join((column, *added))
    return f"prompts have {parts} tokens, as Anthropic's API counts them; --columns input={column} takes that one alone"


def _turns_by_delay(column: str, lengths_add: bool) -> str:
    added = "; their prompts hold the session so far, and their hash_ids are not used" if lengths_add else ""
    return (
        f"later turns start {column} after the turn before has ended{added}. Rates count answers as if they took no "
        "time"
    )


def _drafts_modelled(tokens: int, model: str, layers: int, states: bool = False) -> str:
    own = f"each of {tokens} drafting passes as {layers} of its layers and its head"
    read = "keys read once per sequence" + (", its states read once and written after each token" if states else "")
    return (
        f"steps with drafts are modelled, not measured: {1 + tokens} tokens per decode through the weights of {model}, "
        f"its {read}, {own if layers else 'drafting as free'}"
    )


_LAG_REMEDY = "use more --workers or less load, or allow more with --lag-limit-ms"
_INVALID: Texts = {
    "all-failed": "every request failed",
    "client-late": (
        f"the client fell behind its schedule: p99 lag {{p99_lag_ms:.1f}} ms, limit {{limit_ms:.4g}} ms; {_LAG_REMEDY}"
    ),
    "clocks-apart": (
        "the clocks of the client nodes agree to {error_ms:.1f} ms only, limit {limit_ms:.4g} ms; synchronise them "
        "(NTP, PTP), or allow more with --lag-limit-ms"
    ),
    "cut-off": "cut off before its end",
    "decode-out-of-memory": (
        "decode unit {unit} ran out of memory at {at_s:.2f} s: {held_gib:.1f} GiB of received KV held, "
        "{size_gib:.2f} GiB more to come, room for {capacity_gib:.1f} GiB; lower the concurrency, add decode instances "
        "or turn backpressure on"
    ),
    "event-loop-stalled": (
        f"the client's event loop stalled: p99 lag {{p99_lag_ms:.1f}} ms, limit {{limit_ms:.4g}} ms; {_LAG_REMEDY}"
    ),
    "interrupted": "interrupted before the plan was complete",
    "many-failed": _many_failed,
    "node-lost": "client node {address} was lost ({why}); its unfinished requests are node_lost",
    "not-stored": "not stored: {error}",
    "nothing-planned": "no request was planned",
    "server-died": "{error}",
    "requests-missing": "{planned} requests planned but {recorded} accounted for",
    "requests-repeated": "{requests} request ids accounted for more than once",
    "requests-unplanned": "{requests} requests accounted for that were never planned",
    "status-unknown": lambda statuses: f"unknown request status {', '.join(statuses)}",
    "times-backwards": "{requests} completed requests have times that run backwards",
    "times-missing": "{requests} completed requests lack a start, first-token or last-token time",
    "tokens-missing": "{requests} completed requests have no output token",
    "worker-died": "client worker {worker} died; its requests are lost",
    "worker-failed": "client worker {worker} failed: {error}",
}
"""Why a run is INVALID."""

TEXTS: Texts = {
    **_INVALID,
    SERVER_BUSY: (
        "These requests and answers keep {needed:.1f} processes of vLLM's API server busy on a data-centre host "
        "({token_us:g} us per token); vLLM starts {processes}. They are left out here: a real server answers later, or "
        "fewer requests."
    ),
    SERVER_LIMITS: lambda busy, processes: (
        f"vLLM's API server is busy for {100 * busy:.0f} % of the time: it limits this run, rather than the GPU."
    ),
    SERVER_SIMULATED: (
        "These requests and answers would keep {needed:.2f} processes of vLLM's API server busy on a data-centre host "
        "({token_us:g} us per token); vLLM starts {processes}, so it is simulated."
    ),
    "beyond-server": lambda requests: f"{counted(requests, 'request')} beyond the server's max_model_len left out",
    "budget-below-seqs": (
        "At most {budget} of up to {seqs} sequences decode per step under budget={budget}; vLLM refuses a token budget "
        "below --max-num-seqs."
    ),
    "directory-lost": (
        "The output directory was removed or replaced during the run and made again; what else was in it is gone."
    ),
    "few-connections": (
        "{requests} requests that were the first on their connection waited up to {longest_s:.2g} s (median "
        "{median_s:.2g} s) while later ones, on connections in use, were answered: the server, or a proxy before it, "
        "serves few connections at a time (threads, a limit), so their latencies are not those of generation; give "
        "--connections per-request, or a lower load."
    ),
    "few-requests": _few_requests,
    "ids-renamed": "{requests} request ids occurred more than once and were made unique",
    "k-always-met": _k_always_met,
    KV_CACHE: _kv_cache,
    "metrics-unread": "The server's /metrics is {why} and was not read.",
    "never-active-enough": (
        "At most {active:,} sequences are active, so with min_active={min_active} EB+ never chooses and stays in mixed "
        "batches, as v1."
    ),
    "no-steady-window": "The load never reached 95 % of its target, so there is no steady throughput.",
    "nodes-share-machine": (
        "the {nodes} client nodes share machines ({machines} in all), and nodes of one machine its processors"
    ),
    "not-ready": _not_ready,
    "odd-usage": _odd_usage,
    "one-token-answers": (
        "{single:,} of {answers:,} answers have one token and so no TPOT: they count as within tpot:{tpot_ms:g}."
    ),
    OTHER_MODEL: _other_model,
    "other-tokenizer": (
        "the server counts prompt tokens otherwise than the plan in {differ} of {requests} requests (median "
        "{median_ratio:.2f} times as many); its counts are used"
    ),
    "phases-by-node": (
        "each client node begins a phase when it has released its own sessions of the phase before, so phases do not "
        "change at one time on all nodes"
    ),
    ESTIMATED_TOKENS: (
        "The server reported no token counts for {answers:,} of {completed:,} answers: their output tokens are an "
        "estimate, counted with {by}, and so are TPOT and all figures per token; their prompt tokens are the plan's."
    ),
    "policy-is-a-label": _label,
    "power-absent": "No GPU power and energy for this run: {why}.",
    "rebuilt": _rebuilt,
    "shared-times": _shared_times,
    "short-steady-window": _short_steady_window,
    "spans-lost": "{lost} of {spans} request spans were not accepted by {endpoint}",
    "stated-limits": _stated_limits,
    "tokenizer-absent": (
        "--tokenizer {tokenizer} is not available here, so answers without usage fail; give a local tokenizer.json or "
        "its folder."
    ),
    WARM_CACHE: _warm_cache,
    # How a log was read.
    "block-size-derived": "its hash ids are read as blocks of {block_tokens} tokens, the size that fits all prompts",
    "columns-added": _columns_added,
    "columns-passed-over": (
        lambda columns: f"columns {', '.join(columns)} have similar names and are not used; --columns chooses"
    ),
    "ends-before-starts": (
        "requests that end before they start: {requests:,} (first: line {first_line:,}); their ends are not used"
    ),
    "hits-not-replayed": _hits_not_replayed,
    "last-message-is-answer": (
        "the last message of each request, which the assistant says, is taken as the answer to those before"
    ),
    "longbench-v2": "LongBench v2 is a data set without times; a prompt is its context, question and choices",
    "rows-left-out": _rows_left_out,
    "rows-not-in-order": (
        "rows earlier than the row before: {rows:,} (first: line {first_line:,}); they are put in order"
    ),
    "sessions-start-together": (
        "{files:,} files with a session each: their times count from each session's own start, so that recorded times "
        "let all sessions begin together; --scenario poisson --request-rate R spreads them"
    ),
    "times-are-ends": "its times are those at which requests ended, since it has no durations",
    "turns-by-delay": _turns_by_delay,
    "users-are-no-sessions": (
        "requests of one {column} are not taken as one session; --columns session={column} does that"
    ),
    # Of plans, devices and engines.
    "attention-scaled": _attention_scaled,
    "beyond-capacity": (
        "a real server would not start: vLLM wants room for a request of --max-model-len {max_model_len:,} tokens, and "
        "{model} on {device} holds {capacity_tokens:,}; give it --max-model-len {capacity_tokens} or less (no request "
        "here is longer)"
    ),
    "beyond-positions": (
        "a real server would not start: --max-model-len {max_model_len:,} is more than the {positions:,} positions of "
        "{model}, unless vLLM is told to stretch them (--hf-overrides with rope_scaling)"
    ),
    "collectives-formula": _collectives_formula,
    "collectives-lent": _collectives_lent,
    "costs-of-another-device": "the policy computes from the costs of {costs_of}, but runs on {device}",
    "count-passes": (
        "the {ranks} ranks of an instance compute prompts in the same passes: start vLLM with "
        "--prefill-schedule-interval {interval}, by which they count them"
    ),
    "drafts-modelled": _drafts_modelled,
    "eager-unknown": "--enforce-eager changes nothing here: only kernel tables know what CUDA graphs save",
    "experts-divided": (
        "experts of {model} divided among {gpus} {device} were not measured: those of one GPU, all but their fixed "
        "part divided by {gpus}"
    ),
    "experts-roofline": "experts of {model} were not profiled on {device}: their time is a roofline estimate",
    # Left one out of h100, h200, b200, l40s and rtx-pro-6000: 9 to 18 % (MXFP4, which has three shapes: 18 to 29 %),
    # one in ten by 26 to 64 %, in neither direction. A roofline alone is 1.5 to 9 times too fast for few tokens.
    "experts-scaled": (
        "experts of {model} ({experts}) were not measured on {device}: those of {measured}, scaled by their traffic "
        "and arithmetic; shapes measured there are off by 10 to 20 % in the median when scaled so from each other, "
        "with any batch"
    ),
    # InferenceX, 20 rows with at most 8 open on 4 or 8 GPUs; on fewer GPUs -4 %.
    "experts-few-sequences": (
        "times per token of mixtures of experts with few sequences on four and more GPUs are 13 % too short in the "
        "median (up to 28) against measured servers with this GPU: router and choice of experts are not modelled"
    ),
    # InferenceX: gpt-oss -11 (B200), -19, -25 % in the median (H100, H200; its servers forced Marlin kernels there, the
    # tables have Triton's); MiniMax -13, -28 %, prompts of 922 tokens where no CUDA graph held them -27 to -75 %.
    "experts-first-tokens": (
        "times to first token of mixtures of experts are too short with few open requests: 11 to 28 % in the median "
        "against measured servers with this GPU, 30 to 60 % for short prompts beyond the largest CUDA graph (512 "
        "tokens, unless --max-cudagraph-capture-size says more), whose kernels the host launches one by one"
    ),
    "fewer-bits": (
        "products with weights in {dtype} were not measured on {device}: those in 16 bits stand for their arithmetic, "
        "and for reading them the same share of the bandwidth; too fast with few tokens where unpacking takes time, "
        "too slow with many where the GPU has arithmetic in that type"
    ),
    "fewer-gpus-faster": _fewer_gpus_faster,
    "fp8-block-launch": (
        "FP8 products with one scale per block were timed with their launch on {device}, which CUDA graphs hide: the "
        "launch is taken out, and none is faster than with one scale per tensor"
    ),
    "fp8-by-tensor": (
        "{dtype} kernels were not measured on {device}: those of FP8 with one scale per tensor stand for them"
    ),
    "fp8-slower": _fp8_slower,
    # Runs of earlier versions, which left the front end out.
    "front-end-unmodelled": lambda front_end_ms, share: (
        f"times to first token are too short: on measured servers with this GPU requests took about {front_end_ms:g} "
        f"ms (8 to 20) in front of the engine, which was not modelled: {100 * share:.0f} % of this run's mean"
    ),
    # inference-perf -5 to -31 %, GPUStack's Qwen3-8B with 1 to 8 open -58 to -62, gpt-oss on four B200 +13.
    "front-end-decides": lambda front_end_ms, share: (
        f"times to first token rest on the {front_end_ms:g} ms in front of the engine ({100 * share:.0f} % of their "
        "mean), seen by clients that open a connection for every request: such runs were 29 % too short in the median "
        "against measured servers (13 % too long to 62 too short); --front-end-ms takes your own"
    ),
    "first-tokens-without-graphs": (
        "times to first token of prompts of about 1,000 tokens are 30 to 60 % too short on {gpus} {device} against "
        "measured servers that captured CUDA graphs of decodes only; of prompts of 7,000 tokens 9 to 15 %"
    ),
    HOST_DOUBTED: _host_doubted,
    HOST_UNFITTED: _host_unfitted,
    "shrunk": (
        "Of this probe the requests are kept, without their gaps between tokens (ITL), and no steps: a search has many."
    ),
    "images-as-tokens": (
        "Images count as prompt tokens here; the time of the model's image encoder is not simulated, so TTFT is too "
        "low."
    ),
    "kv-of-mean-request": (
        "layers of {model} keep a window of tokens: since requests share prefixes, its KV cache is taken to "
        "hold {tokens:,} tokens, as it does of requests of the mean length ({mean_tokens:,.0f}); of longer ones more "
        "tokens would fit, of shorter ones fewer"
    ),
    "layers-estimated": (
        "{estimated} of {layers} layers have {what}, which was not measured on {device}: its time is a roofline "
        "estimate, too fast rather than too slow"
    ),
    LIBRARY_ABSENT: "{library} may have what was not measured here: {command}",
    "linear-cost": (
        "linear cost model: step time does not grow with context length; good for the controller, coarse for a device"
    ),
    "log-read-again": (
        "{sessions:,} sessions are taken from a log of {log_sessions:,}: it is read again, each time with new contents"
    ),
    "log-too-short": (
        "the log holds {log_sessions:,} sessions where {asker} for {sessions:,}: {log_sessions:,} are sent, since a "
        "server may have a text that comes again in its prefix cache"
    ),
    "mixed-cost-unpublished": (
        "the mixed-batch cost of {model} on {device} is not published: a mixed step is taken to cost the sum of its "
        "parts, which flatters mixed batching (v1)"
    ),
    MIXING_UNMEASURED: _mixing_unmeasured,
    "model-note": "{model}: {note}",
    "mxfp8-activations": (
        "experts in MXFP4 compute with activations in MXFP8 on {device}, as vLLM's recipe for gpt-oss sets it "
        "(VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1); without it steps of gpt-oss take 10 to 50 % longer"
    ),
    "not-as-served": "{what}: not measured as served on {device}; {taken}",
    # InferenceX (0.10.2) and inference-perf (0.11), TPOT of dense models: -2.5 to -7.8 % in the median.
    "older-vllm": (
        "--vllm-version {vllm_version} sets defaults and KV cache of that version, not its kernels, CUDA graphs and "
        "host: those of 0.19 to 0.24 are 2 to 8 % faster in the median than measured servers of 0.10 and 0.11"
    ),
    # InferenceX, 13 rows: gpt-oss under 0.13, MiniMax under 0.17 with Triton's experts; median -14 %.
    "older-vllm-experts": (
        "times per token of mixtures of experts are 14 % too short in the median (up to 30) on {device} against "
        "measured servers of vLLM 0.13 to 0.17, whose kernels of experts were slower"
    ),
    # GPUStack, 45 runs with all requests at once; on RTX 4090 and, with long random prompts, A100 nothing of it.
    "older-vllm-queue": (
        "where requests wait for a place, measured servers of vLLM 0.9 to 0.11 with this GPU were slower than this run "
        "says: its throughput is too high by 0 to 80 % (one in ten by more, most with prompts of a hundred tokens: "
        "0.11.0 parses the chat template anew for every request), times to first token 10 to 75 % and times per token "
        "10 to 60 % too short"
    ),
    "other-shape": lambda given, model, params: (
        f"{given} has the name of {model} and another shape ({params / 1e9:.2f}B parameters): what is published and "
        "fitted for that model is not used"
    ),
    "part-of-log": "{sessions:,} of the log's {log_sessions:,} sessions are taken, from a place that the seed draws",
    "plan-exhausted": (
        "All {sessions:,} sessions of the plan were released before --duration {duration_s:g} was over; a larger "
        "--num-prompts fills it."
    ),
    "priorities-unverified": (
        "Requests carry priorities; vLLM schedules by them if it was started with --scheduling-policy priority, which "
        "it does not report"
    ),
    "published-lengths": (
        "lengths come from the published statistics of {workload}, not from the data set: {why} (--source profile uses "
        "them without asking the hub)"
    ),
    "roofline": (
        "{model} on {device}: step times come from data-sheet bandwidth and arithmetic rates (roofline); trust them to "
        "a factor, not to a percent"
    ),
    "source-too-short": _source_too_short,
    "tokens-estimated": _tokens_estimated,
    "too-long-dropped": "{dropped} of {requests} requests longer than max_model_len {max_model_len} were dropped",
    "unused-numbers": _unused_numbers,
}
"""What is wrong, by code."""

WAYS_OUT: Texts = {
    SERVER_BUSY: "Add --api-server datacenter, with --api-server-count for several processes.",
    SERVER_LIMITS: _more_processes,
    SERVER_SIMULATED: "More processes: --api-server-count; none: --api-server off.",
    "budget-below-seqs": "Use budget={max_num_seqs} or more, or lower --max-num-seqs to {budget}.",
    "shrunk": "Its rate and seed make the same run again.",
    "few-requests": _use_more_prompts,
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
