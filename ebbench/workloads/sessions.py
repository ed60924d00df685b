"""Sessions as agents and people run them: think time, tool calls, sub-agents, and clients that hang up.

Added to requests of any source, from the ``[sessions]`` table of a workload file or from options. Each kind of draw has
its own random substream, so that adding one changes no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.config.declare import named_settings, setting, settings_of
from ebbench.errors import UsageError
from ebbench.foreign.documents import not_positive
from ebbench.records import CHUNK_TOKENS
from ebbench.traffic.arrivals import substream
from ebbench.traffic.lengths import LengthSpec, draw_family, length_spec
from ebbench.workloads.requests import Floats, Requests, ints

if TYPE_CHECKING:
    from ebbench.workloads.options import PlanOptions

# Distributions of times in seconds: think time, tool calls, the patience of clients.
#
# Written `20` (always 20 s) or `FAMILY:mean=20,std=40,max=300`; in TOML as a table with the same keys.

Family = Literal["fixed", "exponential", "gamma", "lognormal", "uniform"]
FAMILIES: tuple[Family, ...] = ("fixed", "exponential", "gamma", "lognormal", "uniform")
_WITH_STD = ("gamma", "lognormal")


class DurationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Times with mean ``mean`` (s); ``std`` (s) for gamma and lognormal; uniform is from 0 to twice the mean.

    Times above ``max`` (s) become ``max``, so the mean then lies below ``mean``.
    """

    family: Family = "fixed"
    mean: float
    std: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std", "max"):
            if problem := not_positive(name, getattr(self, name)):
                raise ValueError(problem)
        if (self.std is not None) != (self.family in _WITH_STD):
            needs = "needs std" if self.family in _WITH_STD else "takes no std"
            raise ValueError(f"a {self.family} time {needs}")

    def draw(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
        """Draw ``n`` times in seconds; shape (n,)."""
        times = self._raw(rng, n)
        return times if self.max is None else np.minimum(times, self.max)

    def _raw(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
        if self.family == "exponential":
            return rng.exponential(self.mean, n)
        if self.family == "uniform":
            return rng.uniform(0.0, 2 * self.mean, n)
        if self.family == "fixed":
            return np.full(n, self.mean)
        assert self.std is not None  # checked in __post_init__
        return draw_family(self.family, self.mean, self.std, rng, n)

    @property
    def text(self) -> str:
        """A short description for the manifest."""
        more = [f"{key} {value:g} s" for key in ("std", "max") if (value := getattr(self, key)) is not None]
        return f"{self.family}({', '.join([f'mean {self.mean:g} s', *more])})"


@dataclass(frozen=True)
class _Settings:
    """The keys of a duration in an option."""

    mean: float = setting(help="mean time", unit="s", above=0, example=20)
    std: float | None = setting(None, "standard deviation, for gamma and lognormal", unit="s", above=0, example=40)
    max: float | None = setting(None, "longest time", unit="s", above=0, example=300)


def parse_duration(text: str, option: str) -> DurationSpec:
    """Parse the value of ``option``. Raises UsageError that says what it takes."""
    family, colon, rest = text.partition(":")
    try:
        if not colon:
            return DurationSpec(mean=float(text))
        if family not in FAMILIES:
            raise ValueError
        given: dict[str, Any] = named_settings(rest, settings_of(_Settings), f"{option} {family}")
        return DurationSpec(family=family, **given)
    except UsageError:
        raise
    except (ValueError, TypeError) as error:
        why = f": {error}" if str(error) and colon and family in FAMILIES else ""
        raise UsageError(
            f"{option} {text!r} is no time{why}; write seconds (20), or one of {', '.join(FAMILIES)} with its mean, as "
            "in exponential:mean=20 or lognormal:mean=20,std=40,max=300"
        ) from None


FIRST_AGENT = 1 << 31
"""Content of the first sub-agent, above those of sessions: sub-agents share no prefix with each other."""


class AgentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sub-agents. After a share ``share`` of the turns that another turn follows, ``count`` of them start at once; the
    next turn waits for all of them and has their last answers in its prompt.

    Each sends ``turns`` requests, one after the other, with a history of its own. ``input``: new tokens of each of its
    requests; ``output``: tokens of its answers.
    """

    count: int = 3
    share: float = 1.0
    turns: int = 1
    input: LengthSpec = msgspec.field(default_factory=lambda: LengthSpec(family="fixed", mean=1000))
    output: LengthSpec = msgspec.field(default_factory=lambda: LengthSpec(family="fixed", mean=200))

    def __post_init__(self) -> None:
        if self.count < 1 or self.turns < 1 or not 0 < self.share <= 1:
            raise ValueError("sub-agents need count >= 1, turns >= 1 and share in (0, 1]")


class SessionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What happens between and during the turns of a session; times in seconds.

    ``think``: from the end of an answer to the user's next turn. ``tool``: the same where the client runs a tool;
    ``tool_share`` of the turns after the first follow a tool call (all of them if ``think`` is not given), the others
    follow ``think``. ``abandon``: time after which a client hangs up on an incomplete answer. ``thinking``:
    tokens that each output begins with, before its answer; they stay in the history of later turns.
    """

    think: DurationSpec | None = None
    tool: DurationSpec | None = None
    tool_share: float | None = None
    agents: AgentSpec | None = None
    abandon: DurationSpec | None = None
    thinking: LengthSpec | None = None

    def __post_init__(self) -> None:
        if self.tool_share is not None and (self.tool is None or self.think is None):
            raise ValueError("tool_share needs both think and tool, between which it chooses")
        if self.tool_share is None and self.tool is not None and self.think is not None:
            raise ValueError("think and tool together need tool_share, the share of the turns that follow a tool call")
        if self.tool_share is not None and not 0 <= self.tool_share <= 1:
            raise ValueError(f"tool_share must lie in [0, 1], not {self.tool_share:g}")


@dataclass(frozen=True)
class _AgentSettings:
    """The keys of ``--sub-agents``."""

    count: int = setting(3, "sub-agents that start at once", at_least=1, example=3)
    share: float = setting(1.0, "share of the turns after which they start", unit="share", above=0, at_most=1)
    turns: int = setting(1, "requests of each, one after the other", unit="requests", at_least=1)
    input: int = setting(1000, "new prompt tokens of each request", unit="tokens", at_least=1)
    output: int = setting(200, "output tokens of each request", unit="tokens", at_least=1)


def session_spec(base: SessionSpec | None, options: PlanOptions) -> SessionSpec | None:
    """The workload's sessions with what the options set; None if neither says anything. Raises UsageError."""
    given: dict[str, Any] = {}
    for key, option, text in (
        ("think", "--think-time", options.think_time),
        ("tool", "--tool-time", options.tool_time),
        ("abandon", "--abandon-after", options.abandon_after),
    ):
        if text is not None:
            given[key] = parse_duration(text, option)
    if options.tool_share is not None:
        given["tool_share"] = options.tool_share
    if options.thinking_len is not None:
        given["thinking"] = length_spec(options.thinking_len, options.length_distribution)
    if options.sub_agents is not None:
        given["agents"] = _parse_agents(options.sub_agents)
    if not given:
        return base
    known = {name: getattr(base, name) for name in SessionSpec.__struct_fields__} if base is not None else {}
    try:
        return SessionSpec(**(known | given))
    except ValueError as error:
        text = str(error).replace("tool_share", "--tool-share").replace("think", "--think-time")
        raise UsageError(text.replace("and tool", "and --tool-time")) from None


def _parse_agents(text: str) -> AgentSpec:
    given: dict[str, Any] = named_settings(
        text if "=" in text else f"count={text}", settings_of(_AgentSettings), "--sub-agents"
    )
    for name in ("input", "output"):
        if name in given:
            given[name] = LengthSpec(family="fixed", mean=given[name])
    return AgentSpec(**given)


def with_sessions(requests: Requests, spec: SessionSpec, seed: int) -> Requests:
    """The requests with pauses, sub-agents and hang-ups. Raises UsageError where the sessions have no later turn."""
    later = requests.turn > 0
    if not later.any() and (spec.think or spec.tool or spec.agents):
        raise UsageError(
            "think time, tool calls and sub-agents come between the turns of a session, and every session of this "
            "plan is a single request; choose a workload with turns (wildchat, or [profile.turns] in a file of yours)"
        )
    if (spec.think or spec.tool) and requests.pause_s is not None:
        raise UsageError("the requests bring their own pauses; leave out --think-time and --tool-time")
    if spec.thinking is not None:
        requests = _with_thinking(requests, spec.thinking, seed)
    if spec.think or spec.tool:
        pause_s, tool_share = _pauses(spec, later, seed)
        requests = replace(requests, pause_s=pause_s, tool_share=tool_share)
    if spec.agents is not None:
        if requests.after is not None:
            raise UsageError("the requests bring their own sub-agents; leave out --sub-agents")
        requests = _with_agents(requests, spec.agents, spec, seed)
    if spec.abandon is not None:
        patience_s = spec.abandon.draw(substream(seed, "sessions/abandon"), len(requests))
        requests = replace(requests, hang_up_s=patience_s)
    return replace(requests, facts={**requests.facts, "session_shape": _described(spec)})


def _with_thinking(requests: Requests, thinking: LengthSpec, seed: int) -> Requests:
    """The requests with outputs that begin with thinking, which lengthens the prompts of later turns."""
    if requests.thinking_tokens is not None or requests.hash_ids is not None or requests.arrival_s is not None:
        raise UsageError("recorded outputs contain their thinking; leave out --thinking-len")
    tokens = thinking.draw(substream(seed, "sessions/thinking"), len(requests))
    total = np.cumsum(tokens, dtype=np.int64)
    before_session = (total - tokens)[np.searchsorted(requests.session, requests.session)]
    earlier = total - tokens - before_session
    return replace(
        requests,
        thinking_tokens=tokens,
        output_tokens=(requests.output_tokens + tokens).astype(np.int32),
        input_tokens=(requests.input_tokens + earlier).astype(np.int32),
    )


def _described(spec: SessionSpec) -> dict[str, Any]:
    described: dict[str, Any] = {
        name: getattr(spec, name).text
        for name in ("think", "tool", "abandon", "thinking")
        if getattr(spec, name) is not None
    }
    if spec.tool_share is not None:
        described["tool_share"] = spec.tool_share
    if spec.agents is not None:
        described["agents"] = f"{spec.agents.count} after {spec.agents.share:.0%} of the turns"
    return described


def _pauses(spec: SessionSpec, later: np.ndarray, seed: int) -> tuple[Floats, Floats]:
    """The pause before each request (s), 0 before the first of a session; and the share of it that tools take."""
    n = len(later)
    chosen = spec.think or spec.tool
    assert chosen is not None  # the caller checked it
    pauses = chosen.draw(substream(seed, "sessions/think"), n)
    calls = np.full(n, spec.think is None)
    if spec.tool is not None and spec.tool_share is not None:
        calls = substream(seed, "sessions/tool-share").random(n) < spec.tool_share
        pauses = np.where(calls, spec.tool.draw(substream(seed, "sessions/tool"), n), pauses)
    return np.where(later, pauses, 0.0), calls.astype(np.float64)


def _with_agents(requests: Requests, agents: AgentSpec, spec: SessionSpec, seed: int) -> Requests:
    """The requests with sub-agents after some turns, in sessions whose turns are numbered anew."""
    joins = (requests.turn > 0) & (substream(seed, "sessions/agents").random(len(requests)) < agents.share)
    per_join = agents.count * agents.turns
    added = int(joins.sum()) * per_join
    fresh = agents.input.draw(substream(seed, "sessions/agent-input"), added)
    answers = agents.output.draw(substream(seed, "sessions/agent-output"), added)
    tool = spec.tool
    tools_s = np.zeros(added) if tool is None else tool.draw(substream(seed, "sessions/agent-tool"), added)
    rows = _Rows(requests)
    used = 0
    for row in range(len(requests)):
        if requests.turn[row] == 0:
            rows.begin_session()
        if joins[row]:
            chosen = slice(used, used + per_join)
            used += per_join
            rows.add_agents(agents, fresh[chosen].tolist(), answers[chosen].tolist(), tools_s[chosen].tolist())
        rows.add_turn(row)
    return rows.requests()


# Sessions that are in the middle of their course when a run begins, as those of a server that has run for a while.
#
# As AIPerf's replay of agents: each session that is open at the start has reached a moment drawn uniformly from a range
# of its course. Requests before that moment are not sent; what their prompts and outputs would have left in the prefix
# cache is put there before the run. The next request follows after the rest of its pause. Sessions released later begin
# at their first turn. Recorded sessions have a course in time, others one in turns.


def parse_start(text: str) -> tuple[float, float]:
    """``0.25-0.75``, or a single share, as a range of the course of a session. Raises UsageError."""
    low, dash, high = text.partition("-")
    try:
        limits = float(low), float(high if dash else low)
    except ValueError:
        limits = -1.0, -1.0
    if not 0.0 <= limits[0] <= limits[1] <= 1.0:
        raise UsageError(f"--session-start {text!r}: write a share of a session's course, as 0.5, or a range, as 0-1")
    return limits


def with_longest_pause(requests: Requests, most_s: float) -> Requests:
    """The requests with pauses of at most ``most_s`` seconds. Raises UsageError if there are no pauses."""
    if requests.pause_s is None:
        raise UsageError("--max-pause cuts pauses between turns, and these requests have none; leave it out")
    cut = int((requests.pause_s > most_s).sum())
    facts = {**requests.facts, "max_pause_s": most_s, "cut_pauses": cut}
    return replace(requests, pause_s=np.minimum(requests.pause_s, most_s), facts=facts)


def begun_before(requests: Requests, within: tuple[float, float], concurrency: Sequence[int], seed: int) -> Requests:
    """The requests without those that the first open sessions had sent when the run begins.

    ``within``: the range of their course that they have reached; ``concurrency``: open sessions per phase of a closed
    loop, empty for an open loop. Raises UsageError where no session can begin in its middle.
    """
    sizes = np.bincount(requests.session, minlength=requests.sessions)
    chosen = np.flatnonzero(sizes[: concurrency[0] if concurrency else 0] > 1)
    if not len(chosen):
        why = "the sessions open at the start are single requests" if concurrency else "an open loop begins with none"
        raise UsageError(f"--session-start is for sessions of several turns in a closed loop (-c); {why}")
    if requests.prompt is not None:
        raise UsageError(
            "--session-start: earlier answers of these texts are not known; send synthetic prompts of their lengths "
            "(--source profile, or a log without --keep-text)"
        )
    reached = substream(seed, "sessions/start").uniform(*within, len(chosen))
    starts = np.cumsum(sizes) - sizes
    kept = np.ones(len(requests), np.bool_)
    pause_s = np.zeros(len(requests)) if requests.pause_s is None else requests.pause_s.copy()
    primed = np.zeros(len(requests), np.int32)
    for session, share in zip(chosen.tolist(), reached.tolist(), strict=True):
        rows = slice(int(starts[session]), int(starts[session] + sizes[session]))
        first, rest_s = _reached(requests, rows, pause_s, share)
        kept[rows.start : first] = False
        pause_s[first] = rest_s
        for row, tokens in _held_prefixes(requests, rows, first):
            primed[row] = tokens
    facts = {"session_start": f"{within[0]:g}-{within[1]:g}", "begun_before": len(chosen)}
    primed_facts = {"primed_requests": int((primed > 0).sum()), "primed_tokens": int(primed.sum())}
    changed = replace(
        requests, pause_s=pause_s, primed_tokens=primed, facts={**requests.facts, **facts, **primed_facts}
    )
    return changed.keep(kept)


def _reached(requests: Requests, rows: slice, pause_s: Floats, share: float) -> tuple[int, float]:
    """The first request that a session sends when it has reached ``share`` of its course, and after which time (s).

    There is always one, and one before it.
    """
    last = rows.stop - rows.start - 1
    pauses = np.nan_to_num(pause_s[rows])
    offsets = None if requests.offset_s is None else requests.offset_s[rows]
    if offsets is not None and np.isfinite(offsets).all() and offsets[-1] > 0:
        at_s = share * float(offsets[-1])
        first = min(max(int(np.searchsorted(offsets, at_s, "right")), 1), last)
        return rows.start + first, min(max(float(offsets[first]) - at_s, 0.0), float(pauses[first]))
    place = share * last
    first = min(int(place) + 1, last)
    return rows.start + first, float(pauses[first]) * (first - place)


def _held_prefixes(requests: Requests, rows: slice, first: int) -> list[tuple[int, int]]:
    """The first request of each content from ``first`` on, with the tokens that earlier ones had computed of it."""
    content = np.zeros(len(requests), np.int64) if requests.content is None else requests.content
    before = {int(content[row]): row for row in range(rows.start, first)}
    later = {int(content[row]): row for row in range(rows.stop - 1, first - 1, -1)}
    prefixes = []
    for stream, row in later.items():
        if (last := before.get(stream)) is not None:
            history = int(requests.input_tokens[last]) + int(requests.output_tokens[last])
            prefixes.append((row, _shared(requests, last, row, min(history, int(requests.input_tokens[row])))))
    return prefixes


def _shared(requests: Requests, last: int, row: int, tokens: int) -> int:
    """How many of ``tokens`` two prompts have in common by their hash ids; all of them without hash ids."""
    if requests.hash_ids is None or (ids := requests.hash_ids[row].as_py()) is None:
        return tokens
    earlier = requests.hash_ids[last].as_py() or []
    same = next((at for at, (ours, theirs) in enumerate(zip(ids, earlier, strict=False)) if ours != theirs), None)
    blocks = min(len(ids), len(earlier)) if same is None else same
    return min(tokens, blocks * (requests.block_tokens or CHUNK_TOKENS))


class _Rows:
    """The rows of requests with sub-agents while they are written, session by session."""

    def __init__(self, requests: Requests) -> None:
        self._old = requests
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("session", "turn", "input", "output", "after", "content", "pause", "tool", "source")
        }
        self._session, self._turn, self._agents, self._source = -1, 0, 0, 0
        self._waits_for: list[int] = []
        self._grown = 0  # tokens that the answers of sub-agents have added to the session's history

    def begin_session(self) -> None:
        self._session += 1
        self._turn, self._grown, self._waits_for = 0, 0, []

    def add_turn(self, row: int) -> None:
        """A turn of the session itself; after sub-agents it follows them at once."""
        old, self._source = self._old, row
        joins = len(self._waits_for) > 0 and self._waits_for != [self._turn - 1]
        pause = 0.0 if joins or old.pause_s is None else float(old.pause_s[row])
        length = int(old.input_tokens[row]) + self._grown
        tool = 1.0 if old.tool_share is None else float(old.tool_share[row])
        self._put(length, int(old.output_tokens[row]), list(self._waits_for), self._session, pause, tool)
        self._waits_for = [self._turn - 1]

    def add_agents(self, agents: AgentSpec, fresh: list[int], answers: list[int], tools_s: list[float]) -> None:
        """Chains of requests that all start after the turn written last; the next turn waits for their ends."""
        parent, ends = self._turn - 1, []
        for agent in range(agents.count):
            history, before = 0, parent
            content = FIRST_AGENT + self._agents
            self._agents += 1
            for turn in range(agents.turns):
                place = agent * agents.turns + turn
                length = history + fresh[place]
                self._put(length, answers[place], [before], content, tools_s[place] if turn else 0.0, 1.0)
                history, before = length + answers[place], self._turn - 1
            ends.append(before)
            self._grown += answers[agent * agents.turns + agents.turns - 1]
        self._waits_for = ends

    def _put(self, length: int, output: int, after: list[int], content: int, pause: float, tool: float) -> None:
        values = (self._session, self._turn, length, output, after, content, pause, tool, self._source)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        self._turn += 1

    def requests(self) -> Requests:
        """The requests written; sub-agents have what that turn has after which they start, and do not think."""
        columns, old = self._columns, self._old
        rows, content = np.array(columns["source"], np.int64), np.array(columns["content"], np.int64)
        agents = content >= FIRST_AGENT
        own = ints(rows, pa.int64(), valid=~agents)
        pauses, thinking = np.array(columns["pause"]), old.thinking_tokens
        return old.taken(
            rows,
            np.array(columns["session"], np.int64),
            turn=np.array(columns["turn"], np.int32),
            input_tokens=np.array(columns["input"], np.int32),
            output_tokens=np.array(columns["output"], np.int32),
            prompt=None if old.prompt is None else old.prompt.take(own),
            hash_ids=None if old.hash_ids is None else old.hash_ids.take(own),
            pause_s=pauses if pauses.any() else None,
            tool_share=np.array(columns["tool"]) if pauses.any() else None,
            thinking_tokens=None if thinking is None else np.where(agents, 0, thinking[rows]),
            after=columns["after"],
            content=content,
        )
