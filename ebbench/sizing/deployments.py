"""The cheapest deployment that serves a request rate within latency limits, by simulation.

A candidate is a device, the GPUs of an instance and how they share the model, a policy and the scheduler's limits. Each
is simulated as one instance:

1. Saturated, without limits: the rate of sessions that one instance completes when it is never idle
   (:mod:`ebbench.sizing.saturation`). No load within limits completes more, so ``rate / saturated`` instances,
   rounded up, is a lower bound on the number needed.
2. At ``rate / replicas``, for increasing numbers of replicas, until the limits are met; never above the saturated rate,
   at which a queue grows too slowly for a short run to show it. Candidates are sized in order of their lower bound on
   cost; a candidate whose bound exceeds the cost of a known deployment cannot be cheaper and is left out. The saturated
   rate is measured with noise, so ``NOISE`` is added to it.
3. The best ones, and those that could be cheaper than the best with fewer replicas, are simulated completely, with all
   replicas behind a dispatcher, at the requested rate, at 120 % of it, and with one replica lost. The number of
   replicas becomes the smallest that meets the limits there.

In step 2 a replica's share of a Poisson stream is Poisson at ``rate / replicas``, as with random dispatch. A dispatcher
that knows the replicas' loads needs fewer of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import pyarrow as pa

from ebbench.analysis.columns import RequestColumns
from ebbench.analysis.explain import kv_pressure
from ebbench.config.declare import DEFAULT_DEVICE
from ebbench.config.topology import PoolSpec, TopologySpec
from ebbench.engines.base import EngineResult, check_options, rank_notes, start_notes
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.records.plan import Plan, with_plan_columns
from ebbench.records.warnings import Fact, RunWarning, fact
from ebbench.runs.conclude import mean_batches, said_of_run, shown_by_servers
from ebbench.runs.execute import run_plan, stoppable
from ebbench.runs.prepare import device_of
from ebbench.sizing.drive import ALONE_SESSIONS
from ebbench.sizing.limits import LatencyLimits
from ebbench.sizing.probe import ProbeReading, ProbeTables, read_measured
from ebbench.sizing.saturation import saturated_rate
from ebbench.spec.run import RunSpec
from ebbench.traffic.arrivals import substream
from ebbench.workloads.planner import make_plan
from vllm_eb.policy import parse_policy

NOISE = 1.05
WITHIN = 1.5
"""Deployments that cost at most this many times the cheapest are sized and shown; others are left out."""
MOST_REPLICAS = 512
TOO_MANY = fact("too_many_replicas", most=MOST_REPLICAS)
_MORE, _MOST_MORE = 0.25, 3
"""How many more replicas than sized are tried behind a dispatcher: this share, but at least so many."""
_LONGEST = 16
"""A run gets at most this many times its first number of sessions."""
USUAL_HEADROOM = 0.2
"""Headroom at which a deployment is shown that was sized without any."""


@dataclass(frozen=True)
class Candidate:
    """One instance of a deployment: ``dp`` units of ``tp`` GPUs of ``device`` under ``policy``.

    ``ep`` is 1 or the number of GPUs that share the experts: all of the instance. The scheduler's limits are per unit.
    """

    device: str
    tp: int
    policy: str
    max_num_batched_tokens: int
    max_num_seqs: int
    dp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the instance."""
        return self.tp * self.dp

    @property
    def shape(self) -> str:
        """How its GPUs share the model, as ``--instance`` takes it: tp=2, dp=8,ep=8 or tp=2,dp=4,ep=8."""
        sizes = {"tp": self.tp, "dp": self.dp, "ep": self.ep}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"


def candidate_of(spec: RunSpec) -> Candidate:
    """The kind of instance that a run has one of."""
    topology, server = spec.cluster.topology, spec.server
    pool = topology.replicas if isinstance(topology, TopologySpec) else None
    tp, dp, ep = (1, 1, 1) if pool is None else (pool.tp, pool.dp, pool.ep)
    most = server.max_num_batched_tokens, server.max_num_seqs
    return Candidate(spec.device or DEFAULT_DEVICE, tp, spec.policy, *most, dp, ep)


def run_of(candidate: Candidate, spec: RunSpec) -> RunSpec:
    """The run with one instance of another kind."""
    pool = PoolSpec(tp=candidate.tp, dp=candidate.dp, ep=candidate.ep)
    return spec.changed(
        device=candidate.device, policy=candidate.policy, max_num_seqs=candidate.max_num_seqs,
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        topology=TopologySpec(replicas=pool) if candidate.gpus > 1 else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """The load to carry: ``rate`` in sessions/s. ``sessions``: fewest per simulated run.

    ``headroom``: share of the rate that must be carried on top of it. ``spare``: replicas without which the rate must
    be carried.
    """

    limits: LatencyLimits
    rate: float
    sessions: int
    headroom: float = 0.0
    spare: int = 0

    @property
    def most_rate(self) -> float:
        """The rate with its headroom."""
        return self.rate * (1 + self.headroom)

    def replicas_for(self, per_replica: float) -> int:
        """Fewest replicas with at most ``per_replica`` sessions/s each, with and without the spare ones."""
        return max(1, math.ceil(self.most_rate / per_replica), self.spare + max(1, math.ceil(self.rate / per_replica)))

    def share_of(self, replicas: int) -> float:
        """Highest session rate (1/s) of a replica if ``replicas`` share the load."""
        return max(self.most_rate / replicas, self.rate / (replicas - self.spare))


@dataclass(frozen=True)
class Bound:
    """``saturated_per_s``: sessions/s of one instance that is never idle; infinite where the workload has too few
    sessions to fill a batch. ``refused``: why it cannot run."""

    candidate: Candidate
    saturated_per_s: float = 0.0
    refused: Fact | None = None

    def fewest(self, demand: Demand) -> int:
        """A lower bound on the number of replicas, with a margin for noise."""
        return demand.replicas_for(NOISE * self.saturated_per_s)

    def first(self, demand: Demand) -> int:
        """The first number of replicas to try, at which no replica exceeds its saturated rate."""
        return demand.replicas_for(self.saturated_per_s)


@dataclass(frozen=True)
class Deployment:
    """``replicas`` instances that meet the limits; ``reading``: one instance at its share of the rate.

    ``replicas`` 0: no number of replicas meets them, or none below the cost of a cheaper deployment; see ``refused``.
    ``fewest``: replicas that cannot be undercut, since each would have to exceed its saturated rate.
    """

    candidate: Candidate
    replicas: int
    reading: ProbeReading | None = None
    refused: Fact | None = None
    fewest: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.candidate.gpus


@dataclass(frozen=True)
class Level:
    """The whole deployment at one load.

    ``attainment``: share of the requests sent in the steady window that kept the limits. ``overloaded``: the queue grew
    during all arrivals, so that share is not meaningful: it falls with the length of the run. ``met``: the limits were
    kept, in a run that was long enough to tell.
    """

    attainment: float
    overloaded: bool
    met: bool = True


@dataclass(frozen=True)
class Stress:
    """The whole deployment at the rate, with headroom, and at the rate with replicas lost.

    ``lost``: one replica fewer, or all that are spare; None where none would be left. ``ttft_ms``, ``tpot_ms``: medians
    at the rate; ``caveats``: what is estimated, and what a full KV cache cost, at the rate.
    """

    at_rate: Level
    with_headroom: Level
    lost: Level | None
    ttft_ms: float | None
    tpot_ms: float | None
    caveats: tuple[RunWarning, ...] = ()


def bound(spec: RunSpec) -> Bound:
    """Saturated rate of one instance, or why it cannot run (the model does not fit, an invalid setting)."""
    candidate = candidate_of(spec)
    try:
        check_options(spec.server, [parse_policy(spec.policy)])
        seqs = candidate.dp * candidate.max_num_seqs
        saturated = saturated_rate(spec, lambda plan: _simulated(spec, plan).requests, seqs)
        return Bound(candidate, saturated.per_s or math.inf)
    except UsageError as error:
        return Bound(candidate, refused=fact("cannot_run", error=str(error)))


def size(demand: Demand, spec: RunSpec, fewest: int, most: int) -> Deployment:
    """The smallest number of replicas, from ``fewest`` to ``most``, whose instances meet the limits."""
    candidate = candidate_of(spec)
    if refusal := _missed_alone(demand, spec):
        return Deployment(candidate, 0, refused=refusal)
    failed, passed, smallest = fewest - 1, 0, None
    replicas = fewest
    while replicas <= min(most, MOST_REPLICAS):
        reading = _share(demand, spec, replicas)
        if _met_limits(reading):
            passed, smallest = replicas, reading
            break
        failed, replicas = replicas, max(replicas + 1, math.ceil(1.25 * replicas))
    if not passed:
        too_dear = fact("too_dear", times=WITHIN)
        return Deployment(candidate, 0, refused=too_dear if most < MOST_REPLICAS else TOO_MANY)
    while passed - failed > 1:
        middle = (passed + failed) // 2
        reading = _share(demand, spec, middle)
        if _met_limits(reading):
            passed, smallest = middle, reading
        else:
            failed = middle
    return Deployment(candidate, passed, smallest, fewest=fewest)


def stress(demand: Demand, spec: RunSpec, replicas: int, fewest: int = 1) -> tuple[int, Stress]:
    """Simulate the whole deployment behind a least-outstanding dispatcher.

    Returns the smallest number of replicas that meets the limits where they must be met, from ``fewest`` to a quarter
    more than ``replicas``, and the results; those of the last number tried if none does.
    """
    whole = lru_cache(None)(lambda count, factor: _simulate_whole(demand, spec, count, factor))

    def carries(count: int) -> bool:
        return _met_limits(whole(count, 1 + demand.headroom)) and (
            not demand.spare or _met_limits(whole(count - demand.spare, 1.0))
        )

    most = replicas + max(_MOST_MORE, math.ceil(_MORE * replicas))
    while replicas < most and not carries(replicas):
        replicas += 1
    while replicas > fewest and carries(replicas) and carries(replicas - 1):
        replicas -= 1
    at_rate, left = whole(replicas, 1.0), replicas - max(1, demand.spare)
    return replicas, Stress(
        at_rate=_level(at_rate),
        with_headroom=_level(whole(replicas, 1 + (demand.headroom or USUAL_HEADROOM))),
        lost=_level(whole(left, 1.0)) if left else None,
        ttft_ms=at_rate.ttft_ms,
        tpot_ms=at_rate.tpot_ms,
        caveats=at_rate.caveats,
    )


def must_hold(demand: Demand, simulated: Stress) -> list[Level | None]:
    """The levels at which a deployment must keep the limits."""
    return [
        simulated.at_rate,
        *([simulated.with_headroom] if demand.headroom else []),
        *([simulated.lost] if demand.spare else []),
    ]


def _met_limits(reading: ProbeReading) -> bool:
    """Whether the limits were kept in a run that was long enough to tell."""
    return reading.met and not reading.short


def _level(reading: ProbeReading) -> Level:
    return Level(reading.attainment, reading.probe.runaway, _met_limits(reading))


def _missed_alone(demand: Demand, spec: RunSpec) -> Fact | None:
    """What requests miss, and get, one at a time; None if they meet the limits."""
    reading = _run(demand, spec, _plan(spec, "saturated", ALONE_SESSIONS, max_concurrency=1), 1.0)
    requirements = zip(demand.limits.requirements(), reading.probe.counts, strict=True)
    met = {requirement.name: count.share for requirement, count in requirements if count.share < requirement.share}
    least_ms = {"ttft": reading.ttft_high_ms, "tpot": reading.tpot_high_ms}
    return fact("missed_alone", met=met, attainment=demand.limits.attainment, least_ms=least_ms) if met else None


def plan_notes(demand: Demand, spec: RunSpec, replicas: int = 1) -> tuple[RunWarning, ...]:
    """Notes about the requests of that many replicas: rows of a log that are left out, a log that is read again.

    Raises UsageError for a workload or scenario that no plan can be built from.
    """
    return _plan(spec, None, demand.sessions * replicas, request_rate=demand.rate).warnings


def _share(demand: Demand, spec: RunSpec, replicas: int) -> ProbeReading:
    """Simulate one instance at its share of the rate."""
    rate = demand.share_of(replicas)

    def run(sessions: int) -> ProbeReading:
        if spec.plan.scenario in (None, "poisson") or replicas == 1:
            return _run(demand, spec, _plan(spec, None, sessions, request_rate=rate), rate)
        plan = _plan(spec, None, sessions * replicas, request_rate=rate * replicas)
        return _run(demand, spec, _random_share(plan, 1 / replicas, spec.plan.seed), rate)

    return _long_enough(run, demand.sessions)


def _random_share(plan: Plan, share: float, seed: int) -> Plan:
    """The sessions of an open loop that random dispatch sends to one of several replicas."""
    session = plan.table["session"].to_numpy()
    chosen = substream(seed, "plan/share").random(int(session.max()) + 1) < share
    return replace(plan, table=plan.table.filter(pa.array(chosen[session])))


def _simulate_whole(demand: Demand, spec: RunSpec, replicas: int, factor: float) -> ProbeReading:
    rate = factor * demand.rate

    def run(sessions: int) -> ProbeReading:
        return _run(demand, spec, _plan(spec, None, sessions, request_rate=rate), rate, replicas)

    return _long_enough(run, demand.sessions * replicas)


def _long_enough(run: Callable[[int], ProbeReading], sessions: int) -> ProbeReading:
    """Repeat a run with more sessions until they suffice for the number of open ones, and for the queue to settle."""
    most = _LONGEST * sessions
    while True:
        reading = run(sessions)
        settled = not reading.short and (not reading.correlated or reading.clearly_over)
        if settled or sessions >= most:
            return reading
        sessions *= 2


def _plan(spec: RunSpec, scenario: str | None, sessions: int, **load: float) -> Plan:
    """A plan of the run's workload; ``scenario`` None: its own arrivals, by default a Poisson stream."""
    arrivals = scenario or spec.plan.scenario or "poisson"
    return make_plan(spec.changed(scenario=arrivals, num_prompts=sessions, **load).plan)


def _run(demand: Demand, spec: RunSpec, plan: Plan, load: float, replicas: int = 1) -> ProbeReading:
    """Simulate; the reading's caveats are those that matter to this run, and what a full KV cache cost in it."""
    result = _simulated(spec, plan, replicas)
    result = replace(result, requests=with_plan_columns(result.requests, plan.table))
    tables = ProbeTables(result.requests, result.steps, plan.phases, spec.plan.seed)
    device, batches = (
        result.device or device_of(spec),
        mean_batches(result.steps, RequestColumns.of(result.requests)),
    )
    kv = kv_pressure(result.steps, result.requests, asdict(spec.server))
    caveats_of_run = said_of_run(device, batches, dict.fromkeys((*device.warnings, *result.warnings)))
    caveats_of_run += shown_by_servers(device, batches)
    return replace(
        read_measured(tables, load, demand.limits),
        caveats=(*caveats_of_run, *(kv.warnings if kv is not None else ())),
    )


def _simulated(spec: RunSpec, plan: Plan, replicas: int = 1) -> EngineResult:
    candidate = candidate_of(spec)
    topology = None
    if candidate.gpus > 1 or replicas > 1:
        pool = PoolSpec(instances=replicas, tp=candidate.tp, dp=candidate.dp, ep=candidate.ep)
        topology = TopologySpec(replicas=pool)
    engine = SimEngine(topology, figures_only=True)
    policy, device = parse_policy(spec.policy), device_of(spec)
    return run_plan(engine, plan, policy, device, spec.server, stoppable(None))[1].uninterrupted()


def caveats(spec: RunSpec, deployment: Deployment, whole: Stress | None) -> tuple[RunWarning, ...]:
    """What is estimated on the run's device rather than measured as far as it matters to the deployment, what a full KV
    cache costs it, and what a real server needs to start. ``whole``: its complete simulation, if there is one.
    """
    reading = whole or deployment.reading
    ranks = rank_notes(parse_policy(spec.policy), deployment.candidate.dp)
    return (*(reading.caveats if reading else ()), *start_notes(device_of(spec), spec.server), *ranks)
