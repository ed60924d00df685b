"""Caveats of a measurement as data, and the only place that puts them in words.

A warning is stored as a code and the values it rests on, so that runs can be grouped by it; ``str`` of it gives
the sentence that is shown. Runs stored by earlier versions have the sentence itself, which is shown as it is.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ebbench.foreign.documents import load_toml

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

Texts = Mapping[str, str | Callable[..., str]]
"""Sentences by code: a format string (:class:`_Format`), or a function, of the values."""


class _Format(string.Formatter):
    """Python's format strings, with values in other units, and numbers of things: ``{x!%:.0f} %``, ``{n:# run}``."""

    conversions: Mapping[str, Callable[[Any], Any]] = {
        "%": lambda share: 100 * share, "m": lambda value: value * 1e3, "u": lambda value: value * 1e6,
        "G": lambda value: value / 1e9, "l": ", ".join,
    }  # fmt: skip

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        """The value in per cent, thousandths, millionths or thousand millions; a list in words; or as Python does."""
        own = self.conversions.get(conversion or "")
        return super().convert_field(value, conversion) if own is None else own(value)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """The number with its noun, or as Python does."""
        noun = format_spec.removeprefix("# ")
        return super().format_field(value, format_spec) if noun == format_spec else counted(value, noun)


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
            return _Format().format(text, **self.values) if isinstance(text, str) else text(**self.values)
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
        return self.message or self.worded(_texts()[0])

    @property
    def way_out(self) -> str:
        """What to do about it; empty if nothing is known."""
        ways_out = _texts()[1]
        return self.remedy or (self.worded(ways_out) if self.code in ways_out and not self.message else "")

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


def _stated_limits(given: Mapping[str, int]) -> str:
    options = " and ".join(f"--{name.replace('_', '-')} {value:,}" for name, value in given.items())
    return f"{options} changed nothing: the server runs already, with limits of its own that it does not report."


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
    if field == "total_tokens":
        hidden = "it may hold thinking that is missing here"
        return f"{where} of {counted} is not the sum of prompt and output ({before}{first}): {hidden}"
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


def _columns_added(column: str, added: Sequence[str], role: str = "input") -> str:
    whose, api = ("prompts", "Anthropic's (and Bedrock's)") if role == "input" else ("answers", "Gemini's")
    parts = " + ".join((column, *added))
    return f"{whose} have {parts} tokens, as {api} API counts them; --columns {role}={column} takes that one alone"


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


_WORDED: Texts = {
    "many-failed": _many_failed,
    "few-requests": _few_requests,
    "k-always-met": lambda open_requests, max_num_seqs, k: (
        f"At most {open_requests:,} requests are open, so {max_num_seqs - open_requests:,} of {max_num_seqs:,} slots "
        f"are always idle and k={k} never delays a refill: the policy behaves like v0."
    ),
    KV_CACHE: _kv_cache,
    "not-ready": _not_ready,
    "odd-usage": _odd_usage,
    OTHER_MODEL: _other_model,
    "policy-is-a-label": _label,
    "rebuilt": _rebuilt,
    "shared-times": _shared_times,
    "stated-limits": _stated_limits,
    WARM_CACHE: _warm_cache,
    "columns-added": _columns_added,
    "hits-not-replayed": _hits_not_replayed,
    "rows-left-out": _rows_left_out,
    "turns-by-delay": _turns_by_delay,
    "drafts-modelled": _drafts_modelled,
    "fewer-gpus-faster": lambda device, gpus, fewer, times: (
        f"some steps take longer on {gpus} {device} than on {fewer}, since their collectives cost more than they save: "
        f"{_slower(times)}; {fewer} hold the model, too, and as many GPUs in replicas can carry more"
    ),
    "fp8-slower": _fp8_slower,
    HOST_UNFITTED: _host_unfitted,
    MIXING_UNMEASURED: _mixing_unmeasured,
    "source-too-short": _source_too_short,
    "tokens-estimated": _tokens_estimated,
    "unused-numbers": _unused_numbers,
}
_WORDED_WAYS_OUT: Texts = {
    SERVER_LIMITS: lambda busy, processes: (
        f"vLLM starts more processes with --api-server-count {processes + 1}, which is simulated with the same option."
    ),
    "few-requests": _use_more_prompts,
    "no-steady-window": _longer,
    "policy-is-a-label": lambda stated: "" if stated else "Give the policy it was started with as --policy.",
    "short-steady-window": _longer,
}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    sentences: dict[str, str]
    ways_out: dict[str, str]
    seen: dict[str, dict[str, tuple[float, float]]]


@cache
def _file() -> _File:
    return load_toml(Path(__file__).with_name("warnings.toml"), _File)


@cache
def _texts() -> tuple[Texts, Texts]:
    """What is wrong, and what to do about it, by code."""
    sentences, ways_out = (
        {code: " ".join(text.split()) for code, text in texts.items()}
        for texts in (_file().sentences, _file().ways_out)
    )
    return {**sentences, **_WORDED}, {**ways_out, **_WORDED_WAYS_OUT}


def seen_errors() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """How far off figures were against measured servers, by code of the caveat that says so, and by figure."""
    return _file().seen
