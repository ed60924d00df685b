"""The question of a validation (model, policies, loads) and the cells of its runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ebbench.calibration.measure import ProbeGrid, parse_grid
from ebbench.config.declare import DEFAULT_DEVICE
from ebbench.engines.base import check_counts
from ebbench.engines.vllm_command import check_vllm_options, cpu_build, random_weight_options
from ebbench.errors import DataError, RunError, UsageError
from ebbench.records import files
from ebbench.runs.execute import Task, make
from ebbench.simulation.front_end import find_api_server
from ebbench.spec.client import ClientOptions
from ebbench.spec.commands import ValidationCommand, asked_of
from ebbench.spec.run import OF_LABELS, Labels, RunSpec
from ebbench.spec.server import DEFAULT_CLASS, OFF, EngineOptions
from ebbench.workloads.options import PlanOptions
from vllm_eb.policy import parse_policy

WORKLOAD = "balanced"
WARMUP = 32
"""Requests before each run, measured and predicted: adaptive policies have estimated the lengths by then."""
FEWEST_REPEATS = 3
"""Fewest measured steps per point of the grid and round: a stall is told by the two others."""
POLICIES = ("v1", "eb", "ebplus", "marginal")


@dataclass(frozen=True)
class ValidationQuestion:
    """Model, policies and loads. Gains are relative to the first policy. ``loads``: numbers of open requests.

    ``spec``: the run to measure, without its load: under the first policy and with the seed of the first round. Its
    engine is ``vllm``, or ``sim`` and ``emulated`` with a device for a rehearsal; its API server is that of the
    predictions. Without one a client's next request would be in the step after its last token, which a real server has
    begun by the time the client has read that token. ``longest_run_s``: most seconds per run, unless the fewest
    requests that a run needs take longer.
    Raises UsageError for a load or a number of rounds below 1, and for an unknown policy or API server.
    """

    spec: RunSpec
    grid: ProbeGrid
    loads: tuple[int, ...]
    policies: tuple[str, ...] = POLICIES
    rounds: int = 3
    longest_run_s: float = 40.0

    def __post_init__(self) -> None:
        if not self.loads or min(self.loads) < 1:
            raise UsageError("--loads are numbers of open requests, each at least 1, as in --loads 8,32")
        if self.rounds < 1:
            raise UsageError(f"--rounds must be at least 1, not {self.rounds}")
        for name in self.policies:
            parse_policy(name)
        if self.predicted_server:
            find_api_server(self.predicted_server)

    @property
    def real(self) -> bool:
        """Whether a real vLLM is measured."""
        return self.spec.engine == "vllm"

    @property
    def model(self) -> str:
        """The model served."""
        assert self.spec.model is not None  # the command asks for one
        return self.spec.model

    @property
    def predicted_server(self) -> str:
        """Class of the API server in the predictions; empty without."""
        name = self.spec.server.api_server
        return "" if name == OFF else name

    @property
    def stored(self) -> dict[str, Any]:
        """The question as files have it."""
        spec = self.spec
        return {
            "model": spec.model, "grid": asdict(self.grid), "loads": self.loads, "policies": self.policies,
            "rounds": self.rounds, "input_tokens": spec.plan.input_len, "output_tokens": spec.plan.output_len,
            "engine": spec.engine, "device": spec.device, "seed": spec.plan.seed, "longest_run_s": self.longest_run_s,
            "lag_limit_ms": spec.client.lag_limit_ms, "vllm_options": spec.vllm_options,
            "api_server": spec.server.api_server, "labels": asdict(spec.labels),
        }  # fmt: skip

    @property
    def repeats(self) -> int:
        """Measured steps per point of the grid in one round; all rounds together have at least the grid's."""
        return max(FEWEST_REPEATS, -(-self.grid.repeats // self.rounds))


@dataclass(frozen=True)
class StepTimes:
    """Step times measured in one round: files of the device profile and of the policies' costs, and how well the fits
    describe them.

    ``largest_batch_seqs``: decoding sequences of the largest batch that the KV cache held. ``drift``: time of the
    slowest round of probes over that of the fastest. ``grid_s``: times of the steps that are not mixed.
    ``seconds``: wall time of the measurement; ``start_s``: the part of it that vLLM took to start (0 for an engine in
    virtual time).
    """

    profile: Path
    costs: Path
    kv_capacity_tokens: int
    largest_batch_seqs: int
    drift: float
    steps: int
    prefill_r2: float
    decode_r2: float
    mixed_r2: float | None
    request_s: float
    grid_s: tuple[float, ...]
    start_s: float
    seconds: float

    def slowness(self, first: StepTimes) -> float | None:
        """How many times as long these steps take as those of ``first``, in the median; None if other batches fit."""
        if len(self.grid_s) != len(first.grid_s):
            return None
        return median(now / before for now, before in zip(self.grid_s, first.grid_s, strict=True))


class MeasuringSchedule(msgspec.Struct, frozen=True):
    """Size of the measurement: rounds, and per load the requests of a run and its predicted seconds.

    ``asked_rounds``: rounds of the question that it was made for, which may be more than fit the time; 0: the same.
    """

    rounds: int
    requests: tuple[int, ...]
    run_s: tuple[float, ...]
    asked_rounds: int = 0

    def with_rounds(self, asked: int) -> MeasuringSchedule:
        """The schedule with the rounds that ``asked`` adds to those asked for before; unchanged if none."""
        more = asked - (self.asked_rounds or self.rounds)
        return msgspec.structs.replace(self, rounds=self.rounds + more, asked_rounds=asked) if more > 0 else self

    @property
    def server_s(self) -> float:
        """Seconds that the runs on one server take, without its start."""
        return sum(self.run_s)

    def served_before(self, load_index: int) -> int:
        """Requests that a server has served when the run at this load begins, all warm-ups included."""
        return sum(self.requests[:load_index]) + WARMUP * (load_index + 1)


@dataclass(frozen=True)
class PlannedRun:
    """One run: a policy at the load with index ``load_index``, in one round."""

    policy: str
    load_index: int
    round: int


def predicted_cell(
    question: ValidationQuestion, steps: StepTimes, setting: PlannedRun, schedule: MeasuringSchedule
) -> RunSpec:
    """The run in the simulator, on the device that was just measured and behind the question's API server.

    One server of a real vLLM serves the loads one after the other, and adaptive policies keep what they have learned:
    the requests of the smaller loads are warm-up here.
    """
    spec = _run(question, steps, setting, schedule)
    if question.real:
        spec = spec.changed(warmup=schedule.served_before(setting.load_index))
    return replace(spec, engine="sim", device=str(steps.profile), client=ClientOptions(), vllm_options=())


def measured_cell(
    question: ValidationQuestion, steps: StepTimes, setting: PlannedRun, schedule: MeasuringSchedule
) -> RunSpec:
    """The same run on the engine itself; policies compute from the costs that were just measured."""
    spec = _run(question, steps, setting, schedule).changed(api_server=OFF)
    if not question.real:
        return spec
    # Steps of the CPU build are measured without torch.compile; those of a GPU with all that vLLM does by default.
    return spec.changed(enforce_eager=cpu_build(), calibration=str(steps.costs))


def _run(question: ValidationQuestion, steps: StepTimes, setting: PlannedRun, schedule: MeasuringSchedule) -> RunSpec:
    """With 95 % of the measured engine's KV cache: its size differs by a few percent between two starts."""
    spec, tokens = question.spec, int(0.95 * steps.kv_capacity_tokens)
    return spec.changed(
        policy=setting.policy, seed=spec.plan.seed + setting.round, max_concurrency=question.loads[setting.load_index],
        num_prompts=schedule.requests[setting.load_index], max_num_seqs=steps.largest_batch_seqs,
        num_kv_blocks=tokens // spec.server.block_size if tokens else None,
    )  # fmt: skip


# How much a validation measures: rounds, and requests per run, within the time limit.

SCHEDULE = "schedule.json"
SERVING_S = 6.0
"""Seconds that starting a server takes beyond loading the model in one process."""
FEWEST_TURNS = 3
"""Fewest requests of a run, per open request."""
SHORTEST_RUN_S = 8.0
MOST_REQUESTS = 4000


@dataclass
class TimeBudget:
    """Time limit of one call of the command, in seconds."""

    seconds: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.begun)


def server_start_s(question: ValidationQuestion, steps: StepTimes) -> float:
    """Seconds that a server is expected to take to start; 0 for an engine in virtual time."""
    return steps.start_s + SERVING_S if question.real else 0.0


def find_schedule(
    question: ValidationQuestion, steps: StepTimes, folder: Path, budget: TimeBudget
) -> MeasuringSchedule:
    """The schedule of an earlier call, with more rounds if the question has more now; else one that fits the remaining
    time. ``steps``: of the first round."""
    path = folder / SCHEDULE
    if path.exists():
        try:
            schedule = msgspec.convert(files.read_stored_json(path), MeasuringSchedule)
        except msgspec.ValidationError as error:
            raise DataError(f"{path}: damaged ({error}); delete it to begin anew") from None
        schedule = schedule.with_rounds(question.rounds)
    else:
        rates = [_pilot_rate(question, steps, index) for index in range(len(question.loads))]
        real = question.real  # runs in virtual time need no limit
        left_s, steps_s = (budget.left_s, steps.seconds) if real else (math.inf, 0.0)
        schedule = fitted_schedule(question, rates, server_start_s(question, steps), left_s, steps_s)
    files.write_bytes(msgspec.json.format(msgspec.json.encode(schedule), indent=1) + b"\n", path)
    return schedule


def _pilot_rate(question: ValidationQuestion, steps: StepTimes, load_index: int) -> float:
    """Requests/s that the simulator predicts for the first policy at a load."""
    setting = PlannedRun(question.policies[0], load_index, 0)
    shortest = MeasuringSchedule(1, tuple(FEWEST_TURNS * load for load in question.loads), ())
    rate = make(Task(predicted_cell(question, steps, setting, shortest))).figures["request_throughput"]
    if not rate:
        raise RunError("the simulator completed no request on the measured step times")
    return float(rate)


def fitted_schedule(
    question: ValidationQuestion, rates: Sequence[float], start_s: float, left_s: float, steps_s: float
) -> MeasuringSchedule:
    """The longest runs that fit the time; fewer rounds, at least two, if even the shortest runs do not fit.

    ``rates``: requests/s per load. ``start_s``: seconds that a server takes to start. ``steps_s``: seconds of a round's
    step times, of which the first round's are measured already. ``left_s``: time limit.
    """
    rounds = question.rounds
    while True:
        runs_s = left_s - (rounds - 1) * steps_s
        per_server_s = runs_s / (rounds * len(question.policies)) - start_s
        warmups_s = sum(question.spec.server.warmup / rate for rate in rates)
        aim_s = min(max((per_server_s - warmups_s) / len(rates), SHORTEST_RUN_S), question.longest_run_s)
        requests = tuple(
            min(max(round(rate * aim_s), FEWEST_TURNS * load), max(MOST_REQUESTS, FEWEST_TURNS * load))
            for rate, load in zip(rates, question.loads, strict=True)
        )
        run_s = tuple((count + question.spec.server.warmup) / rate for count, rate in zip(requests, rates, strict=True))
        schedule = MeasuringSchedule(rounds, requests, run_s, question.rounds)
        if rounds <= 2 or rounds * len(question.policies) * (start_s + schedule.server_s) <= runs_s:
            return schedule
        rounds -= 1


def validation_question(given: Mapping[str, Any]) -> ValidationQuestion:
    """The question. ``given``: settings of a run and of :class:`ValidationCommand`, by name.

    Raises UsageError for invalid options.
    """
    asked, settings = asked_of(ValidationCommand, given)
    engine, model, device = settings.get("engine", "vllm"), settings["model"], settings.get("device")
    vllm_options, api_server = tuple(settings.get("vllm_options") or ()), settings.get("api_server")
    lengths = {name: settings.get(name) for name in ("input_len", "output_len")}
    if asked.max_time <= 0:
        raise UsageError(f"--max-time must be positive, not {asked.max_time:g}")
    check_counts(**lengths, run_time=asked.run_time)
    check_vllm_options(vllm_options)
    if engine != "vllm" and vllm_options:
        raise UsageError(f"options after -- are for vLLM, which engine {engine} does not start")
    if engine == "vllm" and device is not None:
        raise UsageError("--device is for engines sim and emulated; engine vllm measures this machine")
    if engine != "vllm" and api_server is not None:
        raise UsageError(f"--api-server is for engine vllm; with engine {engine} neither side has one")
    grid, real = parse_grid(engine, asked), engine == "vllm"
    needed = random_weight_options(model, vllm_options) if real else ()
    policies = tuple(settings.get("policy") or POLICIES)
    prompt = lengths["input_len"] or max(grid.tokens[-1] // 4, 4)
    answer = lengths["output_len"] or max(grid.contexts[-1] // 4, 8)
    longest = max(grid.options.max_model_len, 2 * (prompt + answer))  # lengths are drawn around their means
    spec = RunSpec(
        PlanOptions(
            WORKLOAD, source="profile", seed=settings.get("seed", 0), max_model_len=longest, with_text=False,
            input_len=prompt, output_len=answer,
        ),
        policies[0], engine, device if real else device or DEFAULT_DEVICE, model,
        # Within what the step times cover. Steps are measured one at a time on a real vLLM.
        EngineOptions(
            max_num_seqs=grid.seqs[-1], max_num_batched_tokens=max(grid.tokens[-1], grid.seqs[-1]),
            max_model_len=longest, enable_prefix_caching=False, async_scheduling=not real, warmup=WARMUP,
            api_server=(api_server or DEFAULT_CLASS) if real else OFF,
        ),
        client=ClientOptions(lag_limit_ms=settings.get("lag_limit_ms")) if real else ClientOptions(),
        labels=Labels(**{name: settings[name] for name in OF_LABELS if name in settings}),
        vllm_options=(*needed, *vllm_options),
    )  # fmt: skip
    loads = asked.loads or (max(grid.seqs[-1] // 8, 1), max(grid.seqs[-1] // 2, 2))
    return ValidationQuestion(spec, grid, loads, policies, asked.rounds, asked.run_time)
