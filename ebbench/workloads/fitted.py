"""A workload learned from a log: distributions of arrivals, joint lengths, turns and shared prefixes, no record of it.

Every number in the file is a mean over at least :data:`ebbench.workloads.fitted.GROUP` requests, or a count or rate
over more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ebbench.traffic.arrivals import even_shares, order_with, relative_roots, substream, values_at
from ebbench.traffic.lengths import LONGEST
from ebbench.workloads.overlap import MAIN, Overlap, draw_order, draw_session, pauses_before
from ebbench.workloads.requests import Floats, Int32s, Int64s, Requests, single_turn
from ebbench.workloads.shared_prefix import shared_prefixes

if TYPE_CHECKING:
    from ebbench.traffic.spec import ScenarioSpec


# How the requests of a log become longer and shorter in its course.
#
# Requests drawn one by one have the log's lengths, but not its stretches of longer or shorter prompts. In the Azure
# code trace the prompts of successive requests are nearly uncorrelated, and yet the means of 128 successive prompts
# vary 1.8 times as much as in random order; a burst of long prompts is a queue. So the mean of each stretch is
# learned, and drawn requests are put into an order that has it (`ebbench.traffic.arrivals`). The lengths stay as
# drawn. Of outputs, whose largest often makes the mean of a stretch, the mean square root is learned, too.

_SESSIONS_PER_LEVEL, _MOST_LEVELS = 8, 1200
"""Fewest sessions behind a level, and most levels."""


class Drift(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mean lengths of each ``sessions_per_level`` successive sessions, in the mean of all; they repeat after the last.

    ``prompts``: prompt tokens; of a session those of all turns. Not learned of logs whose prompts repeat earlier ones.
    ``outputs``: output tokens; empty if the log has sessions of several turns. ``output_roots``: mean
    square roots of the outputs in the mean of all; empty in files of earlier versions.
    """

    sessions_per_level: float
    prompts: tuple[float, ...]
    outputs: tuple[float, ...] = ()
    output_roots: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.sessions_per_level <= 0 or not self.prompts or min(self.prompts + self.outputs) < 0:
            raise ValueError("a drift needs sessions_per_level above 0 and at least one level, none below 0")
        if {len(levels) for levels in (self.outputs, self.output_roots)} - {0, len(self.prompts)}:
            raise ValueError("a drift needs as many levels of outputs and of output_roots as of prompts")
        if self.output_roots and not self.outputs:
            raise ValueError("output_roots need outputs")

    def level_of(self, sessions: int, rate_scale: float) -> Int64s:
        """Index of the level of each session. At twice the rate twice as many sessions have a level."""
        place = np.arange(sessions) / (self.sessions_per_level * rate_scale)
        level: Int64s = place.astype(np.int64) % len(self.prompts)
        return level


def fit_drift(prompts: Any, outputs: Any | None = None) -> Drift | None:
    """The drift of sessions with these tokens, in the order of their starts; None of too few sessions."""
    count = min(_MOST_LEVELS, len(prompts) // _SESSIONS_PER_LEVEL)
    if count < 2:
        return None
    drift = Drift(sessions_per_level=round(len(prompts) / count, 6), prompts=(1.0,) * count)
    level = drift.level_of(len(prompts), 1.0)
    levels = {"prompts": _levels(level, count, prompts)}
    if outputs is not None:
        levels |= {
            "outputs": _levels(level, count, outputs),
            "output_roots": _means(level, count, relative_roots(outputs)),
        }
    return msgspec.structs.replace(drift, **levels)


def _levels(level: Int64s, count: int, tokens: Any) -> tuple[float, ...]:
    return _means(level, count, tokens / max(float(np.mean(tokens)), 1e-9))


def _means(level: Int64s, count: int, values: Any) -> tuple[float, ...]:
    means = np.bincount(level, values, count) / np.maximum(np.bincount(level, minlength=count), 1)
    return tuple(round(float(mean), 4) for mean in means)


# Distributions by means of equally many sorted values, so that none of the values stands in a file.

GROUP = 8
"""Fewest requests behind a number of a fitted file."""


def draw_values(means: Sequence[float], rng: np.random.Generator, n: int) -> Floats:
    """``n`` values of a distribution in random order, by :func:`ebbench.traffic.arrivals.values_at`."""
    return values_at(means, even_shares(rng, n))


def tailed_at(means: Sequence[float], shares: Floats) -> Floats:
    """As ``values_at``, with an exponential tail: the values of the highest group are above those of the next by
    exponential numbers, and have its mean. Without one none would be above that mean."""
    values = values_at(means, shares)
    count = len(means)
    if count > 1:
        below, mean = sum(means[-2:]) / 2, means[-1]
        highest = shares > 1 - 1 / count
        above = np.minimum(shares[highest] * count - (count - 1), 1 - 1e-9)
        values[highest] = below - (mean - below) * np.log1p(-above)
    return values


def fit_points(values: Any, digits: int = 2, most: int = 48, tailed: bool = False) -> tuple[float, ...]:
    """Means of groups of sorted values for :func:`draw_values`, moved so that draws have the values' mean."""
    ordered = np.sort(np.asarray(values, np.float64))
    count = max(1, min(most, len(ordered) // GROUP))
    means = np.array([group.mean() for group in np.array_split(ordered, count)])
    drawn = float(means.mean())
    if tailed and count > 1:
        drawn += (means[-1] - means[-2]) / 8 / count  # tailed_at has the mean of the highest group, at less
    if drawn > 0 and (ordered >= 0).all():
        means = means * (ordered.mean() / drawn)
    return tuple(round(float(mean), digits) for mean in means)


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Lengths of the requests with prompts of one range, ``share`` of all: prompt, output, and repeated part of it.

    ``repeated``: share of the prompt that repeats the beginning of an earlier one.
    """

    share: float
    input: tuple[float, ...]
    output: tuple[float, ...]
    repeated: tuple[float, ...] = ()


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sessions per second; ``levels``: relative rates of equal parts of ``period_s``; ``burstiness``: gamma shape.

    ``gaps``: their distribution in the mean gap, which takes the gamma's place. ``tick_s``: times are multiples of it,
    as in logs with coarse clocks. ``steps_s``: of bursty traffic, in place of levels: how long each step of equally
    many sessions lasts; ``step_roots`` and ``step_centres``: the mean square root of its gaps in the mean gap, and
    where in it they lie. ``bursts``: what files of earlier versions have; refused.
    """

    rate: float
    period_s: float
    burstiness: float = 1.0
    gaps: tuple[float, ...] = ()
    levels: tuple[float, ...] = ()
    tick_s: float | None = None
    steps_s: tuple[float, ...] = ()
    step_roots: tuple[float, ...] = ()
    step_centres: tuple[float, ...] = ()
    bursts: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.bursts or (self.steps_s and not self.step_centres):
            raise ValueError("bursts are of an earlier version; fit the workload to the log again")
        if {len(self.step_roots), len(self.step_centres)} != {len(self.steps_s)} or (self.steps_s and not self.gaps):
            raise ValueError("steps_s need as many step_roots and step_centres, and gaps")


class Sessions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Turns per session; of later turns the new tokens of the prompt and the pause before them (s).

    ``tools``: share of the pauses that tools take, the others being the user's; None where the log does not tell.
    ``tool_pause_s``: how long these take; empty: as long as the others. ``fresh``: share of later turns whose prompt
    does not hold the session so far, as those of sub-agents, and ``fresh_input`` their prompts' tokens; ``resumes``:
    share of the turns after these that go on where the session was before them, not after the fresh prompt.
    ``overlap``: of logs in which requests of a session overlap; it takes the place of ``fresh`` and ``resumes``, and
    the other fields are then those of requests that run alone.
    """

    turns: tuple[float, ...]
    added: tuple[float, ...]
    pause_s: tuple[float, ...] = ()
    tools: float | None = None
    tool_pause_s: tuple[float, ...] = ()
    fresh: float = 0.0
    fresh_input: tuple[float, ...] = ()
    resumes: float = 0.0
    overlap: Overlap | None = None


class Repeated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prompts that repeat at most ``blocks`` blocks of an earlier one.

    ``lag``: requests since the last use of these blocks; ``depth``: the share of the earlier prompt that they are.
    """

    blocks: float
    lag: tuple[float, ...]
    depth: tuple[float, ...]


class Prefixes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How prompts repeat earlier ones, in blocks of ``block_tokens``: ranges by the number of blocks, rising."""

    block_tokens: int
    ranges: tuple[Repeated, ...]


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``[fitted]`` table of a workload file.

    ``outputs``: of all requests; outputs drawn from the ranges then only give the order in which these come. Empty if
    the log has sessions of several turns or prompts that repeat earlier ones, and in files of earlier versions.
    ``acceptance``: of drafted tokens, by position; empty if the log does not tell. It holds for simulated servers that
    draft and are given none.
    """

    lengths: tuple[Lengths, ...]
    outputs: tuple[float, ...] = ()
    arrivals: Arrivals | None = None
    sessions: Sessions | None = None
    prefixes: Prefixes | None = None
    drift: Drift | None = None
    acceptance: tuple[float, ...] = ()

    def scenario(self) -> ScenarioSpec | None:
        """The arrivals as an open loop; None if the log had no times."""
        from ebbench.traffic.spec import CurveSpec, Phase, ScenarioSpec

        arrivals = self.arrivals
        if arrivals is None:
            return None
        levels = tuple(1.0 / width for width in arrivals.steps_s) or arrivals.levels
        curve = None
        if len(levels) > 1:
            curve = CurveSpec(levels=levels, period_s=arrivals.period_s, widths=arrivals.steps_s)
        phase = Phase(
            name="fitted",
            process="gamma",
            rate=arrivals.rate,
            burstiness=arrivals.burstiness,
            gaps=arrivals.gaps,
            curve=curve,
            tick_s=arrivals.tick_s,
            even=True,
            roots=arrivals.step_roots,
            centres=arrivals.step_centres,
        )
        return ScenarioSpec(name="fitted", description="arrivals fitted to a log", loop="open", phases=(phase,))


def draw_fitted(fitted: Fitted, sessions: int, seed: int, rate_scale: float = 1.0) -> Requests:
    """Draw ``sessions`` sessions with their lengths, turns, pauses and shared prefixes, in an order with the drift.

    ``rate_scale``: factor of the arrival rate; the drift belongs to times, as the rate curve does.
    """
    rng = substream(seed, "content/drift")
    if fitted.sessions is not None:
        drawn = _draw_sessions(fitted, fitted.sessions, sessions, seed)
        if fitted.drift is None:
            return drawn
        sizes, level = np.bincount(drawn.session, drawn.input_tokens), fitted.drift.level_of(sessions, rate_scale)
        return _in_order(drawn, order_with(level, sizes, rng, means=fitted.drift.prompts))
    inputs, outputs, repeated = _draw_lengths(fitted.lengths, sessions, seed, fitted.outputs)
    if fitted.drift is not None:
        drift, level = fitted.drift, fitted.drift.level_of(sessions, rate_scale)
        if drift.outputs:
            order = order_with(level, outputs, rng, means=drift.outputs, roots=drift.output_roots)
            inputs, outputs, repeated = inputs[order], outputs[order], repeated[order]
        # Prompts then only change places among requests of about one output: the two go on depending on each other.
        alike = _ranges(outputs, len(fitted.lengths), rng)
        order = order_with(level, inputs, rng, means=drift.prompts, group=alike)
        inputs, repeated = inputs[order], repeated[order]
    if fitted.prefixes is None:
        return single_turn(inputs, outputs)
    size = fitted.prefixes.block_tokens
    blocks = np.rint(repeated * inputs / size).astype(np.int64)
    lags, depths = _draw_repeats(fitted.prefixes.ranges, blocks, substream(seed, "content/prefixes"))
    hash_ids = shared_prefixes(inputs, blocks, lags, depths, size)
    return single_turn(inputs, outputs, hash_ids=hash_ids, block_tokens=size)


def _draw_repeats(ranges: tuple[Repeated, ...], blocks: Int64s, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Lag and depth for each number of repeated blocks."""
    which = np.minimum(np.searchsorted([repeated.blocks for repeated in ranges], blocks), len(ranges) - 1)
    lags, depths = np.ones(len(blocks)), np.ones(len(blocks))
    for place, repeated in enumerate(ranges):
        rows = np.flatnonzero(which == place)
        lags[rows] = draw_values(repeated.lag, rng, len(rows))
        depths[rows] = draw_values(repeated.depth, rng, len(rows))
    return lags, depths


def _draw_lengths(
    bins: tuple[Lengths, ...], n: int, seed: int, all_outputs: tuple[float, ...] = ()
) -> tuple[Int32s, Int32s, Floats]:
    """Prompt tokens, output tokens and repeated share of the prompt of each request.

    ``all_outputs``: the outputs have this distribution, in the order of those of their ranges.
    """
    rng = substream(seed, "content/fitted")
    shares = np.array([lengths.share for lengths in bins])
    which = np.searchsorted(np.cumsum(shares / shares.sum())[:-1], even_shares(rng, n), side="right")
    inputs, outputs, repeated = np.ones(n), np.ones(n), np.zeros(n)
    for place, lengths in enumerate(bins):
        rows = np.flatnonzero(which == place)
        inputs[rows] = draw_values(lengths.input, rng, len(rows))
        outputs[rows] = draw_values(lengths.output, rng, len(rows))
        if lengths.repeated:
            repeated[rows] = draw_values(lengths.repeated, rng, len(rows))
    if all_outputs:
        shares = np.sort(even_shares(rng, n))
        drawn = tailed_at(all_outputs, shares)
        outputs[np.lexsort((rng.random(n), outputs))] = np.floor(drawn + rng.random(n))  # their mean stays
    return _tokens(inputs), _tokens(outputs), repeated


def _ranges(tokens: Int32s, count: int, rng: np.random.Generator) -> Int64s:
    """Index of a range of lengths for each request: ``count`` ranges with equal sums of their shares of
    requests and tokens, so that the few longest requests have ranges of their own."""
    rising = np.lexsort((rng.random(len(tokens)), tokens))
    share = np.arange(len(tokens)) / max(len(tokens), 1) + np.cumsum(tokens[rising]) / max(int(tokens.sum()), 1)
    ranges = np.empty(len(tokens), np.int64)
    ranges[rising] = np.minimum(share / 2 * count, count - 1)
    return ranges


def _tokens(values: Floats) -> Int32s:
    return np.clip(np.rint(values), 1, LONGEST).astype(np.int32)


def _draw_sessions(fitted: Fitted, fitted_sessions: Sessions, sessions: int, seed: int) -> Requests:
    rng = substream(seed, "content/turns")
    turns = np.maximum(1, np.rint(draw_values(fitted_sessions.turns, rng, sessions))).astype(np.int64)
    n = int(turns.sum())
    inputs, outputs, _ = _draw_lengths(fitted.lengths, n, seed)
    session = np.repeat(np.arange(sessions), turns)
    turn = (np.arange(n) - np.repeat(np.cumsum(turns) - turns, turns)).astype(np.int32)
    added = draw_values(fitted_sessions.added, rng, n)
    if fitted_sessions.overlap is not None:
        return _draw_overlapping(
            fitted_sessions, fitted_sessions.overlap, (session, turn, inputs, outputs, added), seed
        )
    fresh = rng.random(n) < fitted_sessions.fresh
    aside = substream(seed, "content/fresh")
    if fitted_sessions.fresh_input:
        rows = np.flatnonzero(fresh & (turn > 0))
        inputs[rows] = _tokens(draw_values(fitted_sessions.fresh_input, aside, len(rows)))
    prompts, content = _growing(turn, inputs, outputs, added, fresh, aside.random(n) < fitted_sessions.resumes)
    pause: Any = None
    tool_share: Any = None
    if fitted_sessions.pause_s:
        pause = draw_values(fitted_sessions.pause_s, rng, n)
        if fitted_sessions.tools is not None:
            by_tools = _tool_pauses(fitted_sessions, pause, seed) < fitted_sessions.tools
            tool_share = np.where(turn > 0, by_tools, np.nan)
        pause[turn == 0] = np.nan
    return Requests(session, turn, prompts, outputs, content=content, pause_s=pause, tool_share=tool_share)


def _tool_pauses(fitted_sessions: Sessions, pause_s: Floats, seed: int) -> Floats:
    """A number in [0, 1) per row, below ``tools`` where tools take the pause; ``pause_s`` then gets one of theirs."""
    rng = substream(seed, "content/tools")
    draws = even_shares(rng, len(pause_s))
    rows = np.flatnonzero(draws < (fitted_sessions.tools or 0.0))
    if fitted_sessions.tool_pause_s:
        pause_s[rows] = draw_values(fitted_sessions.tool_pause_s, rng, len(rows))
    return draws


def _draw_overlapping(
    fitted_sessions: Sessions, overlap: Overlap, drawn: tuple[Int64s, Int32s, Int32s, Int32s, Floats], seed: int
) -> Requests:
    """Sessions whose requests overlap. ``drawn``: session, turn, first prompt, output and added tokens of each row."""
    session, turn, inputs, outputs, added = drawn
    n, rng = len(turn), substream(seed, "content/overlap")

    def of(means: tuple[float, ...], otherwise: tuple[float, ...] = (0.0,)) -> Floats:
        return draw_values(means or otherwise, rng, n)

    alone, *beside = (of(seconds) for seconds in (fitted_sessions.pause_s, overlap.fork_pause_s, overlap.side_pause_s))
    by_tools = _tool_pauses(fitted_sessions, alone, seed)
    tool_share = None if fitted_sessions.tools is None else np.full(n, np.nan)
    tools = np.array([fitted_sessions.tools or 0.0, overlap.fork_tools, overlap.side_tools])
    pauses = [seconds.tolist() for seconds in (alone, *beside)]
    staggers, fresh = of(overlap.stagger_s).tolist(), _tokens(of(fitted_sessions.fresh_input))
    side_added, side = of(overlap.side_added, fitted_sessions.added), _tokens(of(overlap.side_output, (1.0,)))
    after: list[list[int] | None] = []
    content, pause, streams = np.zeros(n, np.int64), np.full(n, np.nan), 0
    starts = np.flatnonzero(turn == 0)
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), n], strict=True):
        drawn_session = draw_session(overlap, last - first, rng)
        if overlap.side_output:
            outputs[first:last] = np.where(drawn_session.overlaps, side[first:last], outputs[first:last])
        own_pauses = pauses_before(drawn_session, [seconds[first:last] for seconds in pauses], staggers[first:last])
        lasts_s = (outputs[first:last] * overlap.s_per_output_token).tolist()
        order = draw_order(overlap, drawn_session, lasts_s, own_pauses, rng)
        pause[first + 1 : last] = own_pauses[1:]
        if tool_share is not None:
            tool_share[first + 1 : last] = (by_tools[first:last] < tools[drawn_session.overlaps])[1:]
        after += [None if waits == [at - 1] or not at else waits for at, waits in enumerate(order.after)]
        for row, (kind, grew) in enumerate(zip(order.kind, order.grew_from, strict=True), start=first):
            if grew >= 0:
                content[row] = content[first + grew]
                more = added[row] if kind == MAIN else side_added[row]
                history = int(inputs[first + grew]) + int(outputs[first + grew])
                inputs[row] = min(LONGEST // 2, history + max(1, round(more)))
            else:
                content[row], streams = streams, streams + 1
                inputs[row] = fresh[row] if row > first and fitted_sessions.fresh_input else inputs[row]
    return Requests(session, turn, inputs, outputs, content=content, pause_s=pause, tool_share=tool_share, after=after)


def _in_order(requests: Requests, order: Int64s) -> Requests:
    """The same sessions, the ``order[k]``-th as the ``k``-th."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    rows = np.argsort(place[requests.session], kind="stable")
    content = requests.streams
    return requests.taken(rows, place[requests.session][rows], content=content[rows])


def _growing(
    turn: Int32s,
    inputs: Int32s,
    outputs: Int32s,
    added: Floats,
    fresh: npt.NDArray[np.bool_],
    back: npt.NDArray[np.bool_],
) -> tuple[Int32s, Int64s]:
    """Prompt lengths and contents: first and fresh prompts as drawn, others with what they continue and added tokens.

    They continue the turn before, or, where ``back``, the last turn that was not after a fresh prompt.
    """
    prompts, made, more = inputs.tolist(), outputs.tolist(), added.tolist()
    content = np.zeros(len(prompts), np.int64)
    streams = main = last = total = main_total = 0
    for row, place in enumerate(turn.tolist()):
        if place and not fresh[row]:
            if back[row]:
                last, total = main, main_total
            prompts[row] = min(LONGEST // 2, total + max(1, round(more[row])))
        else:
            last, streams = streams, streams + 1
            main = last if not place else main
        total = prompts[row] + made[row]
        if last == main:
            main_total = total
        content[row] = last
    return np.asarray(prompts, np.int32), content
