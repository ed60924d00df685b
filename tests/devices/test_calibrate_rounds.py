"""Probes of an engine that is stepped directly, on a synthetic engine of known step times and its own clock."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from ebbench.calibration.command import SteppedRuns, check_plan, write_profile
from ebbench.calibration.measure import ProbeGrid, cost_grid, fit
from ebbench.calibration.rounds import SteppedVllm, measure_steps, summarise, without_stalls
from ebbench.devices.base import StepShape
from ebbench.devices.gridcost import GridCost
from ebbench.devices.loader import load_device
from ebbench.engines.setup import unknown_device

GRID = ProbeGrid((32, 128, 512), (1, 8, 32), (32, 256), repeats=4)
ADD_S, FORGET_S = 4e-4, 3e-4  # what the made-up engine takes for a request beside its steps


@dataclass
class Request:
    request_id: str
    left: int
    outputs: int
    finished: bool = False


@dataclass
class MadeUpEngine:
    """Steps of 2 ms, 50 us per prompt token, 0.1 ms per decode; times ``speed``. Budget as the grid asks."""

    now_s: float = 0.0
    speed: float = 1.0
    requests: list[Request] = field(default_factory=list)
    forgotten: int = 0  # ended since the last step
    shapes: set[tuple[int, int]] = field(default_factory=set)

    def add_request(self, name: str, prompt: dict[str, list[int]], outputs: int) -> None:
        self.now_s += ADD_S * self.speed
        self.requests.append(Request(name, len(prompt["prompt_token_ids"]), outputs))

    def abort_request(self, names: list[str]) -> None:
        self.forgotten += len(self.requests)
        self.requests = [r for r in self.requests if r.request_id not in names]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Request]:
        budget, tokens, decodes = GRID.budget_tokens, 0, 0
        for request in self.requests:
            if request.left:
                chunk = min(request.left, budget - tokens - decodes)
                request.left -= chunk
                tokens += chunk
                request.outputs -= not request.left
            else:
                decodes += 1
                request.outputs -= 1
            request.finished = not request.outputs
        work_s = 2e-3 + 5e-5 * tokens + 1e-4 * decodes if self.requests else 0.0
        self.now_s += (work_s + FORGET_S * self.forgotten) * self.speed
        self.shapes.add((tokens, decodes))
        ended = [r for r in self.requests if r.finished]
        self.requests = [r for r in self.requests if not r.finished]
        self.forgotten = len(ended)
        return ended


def stepped() -> tuple[SteppedVllm, MadeUpEngine]:
    engine = MadeUpEngine()
    return SteppedVllm(engine, lambda max_tokens, **_: max_tokens, 100_000, clock=lambda: engine.now_s), engine


def test_every_point_and_what_a_request_costs_come_back() -> None:
    vllm, engine = stepped()
    probed = measure_steps(vllm, GRID)
    assert probed.request_s == pytest.approx(ADD_S + FORGET_S)
    assert probed.drift == pytest.approx(1.0)
    for x, n, _ in [*((x, 0, 0) for x in GRID.tokens), *probed.seconds]:
        assert (x, n) in engine.shapes
    for (x, n, c), seconds in probed.seconds.items():
        assert seconds == pytest.approx(2e-3 + 5e-5 * x + 1e-4 * n), (x, n, c)
    assert len(probed.seconds) == 3 + 6 * 4


def test_rounds_that_do_not_fit_into_the_time_are_not_begun() -> None:
    vllm, engine = stepped()
    whole = measure_steps(vllm, GRID)
    begun_s = engine.now_s
    cut = measure_steps(vllm, GRID, most_s=begun_s * 0.6)
    assert (whole.rounds, cut.rounds) == (4, 2)
    assert engine.now_s < 1.6 * begun_s
    assert cut.seconds.keys() == whole.seconds.keys()
    assert measure_steps(vllm, GRID, most_s=0.0).rounds == 1


def test_a_slow_machine_slows_all_points_alike_and_is_said() -> None:
    """Half of the rounds at half the speed: measured point after point, speeds would look like effects of shapes."""
    vllm, engine = stepped()
    calls = []

    def pause() -> None:
        calls.append(1)
        engine.speed = 2.0 if len(calls) >= GRID.probes * GRID.repeats // 2 else 1.0

    probed = measure_steps(vllm, GRID, pause)
    assert len(calls) == GRID.probes * GRID.repeats
    for (x, n, _), seconds in probed.seconds.items():
        assert seconds == pytest.approx(1.5 * (2e-3 + 5e-5 * x + 1e-4 * n))
    assert probed.drift == pytest.approx(2.0)


def test_a_calibrated_profile_predicts_runs_between_its_measured_points(tmp_path: Path) -> None:
    vllm, _ = stepped()
    runs = SteppedRuns(vllm, check_plan(GRID, 24), every=GRID.probes)
    probed = measure_steps(vllm, GRID, runs.pause)
    assert len(runs.seconds) == GRID.repeats
    measured = replace(fit(cost_grid(GRID, probed.seconds), "made up", GRID.points), request_s=probed.request_s)
    device = unknown_device("made-up", "qwen3-8b")
    check = runs.check(device, measured, GRID)
    assert abs(check.error) < 0.01
    assert check.measured_range == pytest.approx((check.measured_tokens_per_s,) * 2)
    blind = runs.check(device, replace(measured, request_s=0.0), GRID)
    assert blind.error > check.error + 0.01  # requests cost something here: without it every prediction is too fast
    profile = write_profile(measured, device, "qwen3-8b", tmp_path / "made")
    cost = load_device(str(profile), "qwen3-8b").cost
    assert isinstance(cost, GridCost)
    assert cost.request_s == pytest.approx(probed.request_s, rel=1e-3)


def test_a_written_profile_has_the_kv_cache_that_was_there(tmp_path: Path) -> None:
    probed = measure_steps(stepped()[0], GRID)
    measured = fit(cost_grid(GRID, probed.seconds), "made up", GRID.points)
    for tokens in (1600, 448_000):
        device = replace(unknown_device("made-up", "qwen3-8b"), kv_capacity_tokens=tokens)
        profile = write_profile(measured, device, "qwen3-8b", tmp_path / str(tokens))
        assert load_device(str(profile), "qwen3-8b").kv_capacity_tokens == tokens


def test_a_stall_is_left_out_and_a_slow_step_counts() -> None:
    assert without_stalls([1.0, 1.0, 1.0, 1.9, 50.0]) == pytest.approx(4.9 / 4)
    probed = summarise([((1, 0, 0), 0, 2.0), ((1, 0, 0), 1, 3.0)], [0.0, 0.1, 0.1, 9.0])
    assert astuple(probed) == ({(1, 0, 0): 2.5}, pytest.approx(0.1), pytest.approx(1.5), 2, None)


def test_requests_are_charged_once_each_when_their_prompt_is_complete() -> None:
    grid = cost_grid(GRID, dict.fromkeys(_keys(), 1.0))
    plain, charged = GridCost.measured(grid), GridCost.measured(grid, 0.25)
    for shape, completed in (
        (StepShape((), 8, 800, 8), 0),
        (StepShape(((64, 0), (64, 0)), 0, 0, 2), 2),
        (StepShape(((64, 0), (64, 0)), 8, 800, 9), 1),  # the second prompt goes on in the next step
    ):
        assert charged.step_s(shape) == pytest.approx(plain.step_s(shape) + 0.25 * completed)


def test_the_quadratic_term_is_per_prompt_and_includes_its_context() -> None:
    """Measured with one prompt a step: a + b x + q x^2. Several prompts have several small squares, not a large one."""
    a, b, q = 2e-3, 4e-5, 1e-8
    grid = cost_grid(GRID, {(x, n, c): a + b * x + q * x * x + 1e-4 * n for x, n, c in _keys()})
    cost = GridCost.measured(grid)
    assert cost.square_s == pytest.approx(q)
    lone, several = StepShape(((400, 0),), 8, 800, 9), StepShape(((100, 0),) * 4, 8, 800, 12)
    assert cost.step_s(lone) == pytest.approx(a + b * 400 + q * 400**2 + 8e-4)
    assert cost.step_s(several) == pytest.approx(a + b * 400 + 4 * q * 100**2 + 8e-4)
    halves = cost.step_s(StepShape(((200, 0),), 0, 0, 0)) + cost.step_s(StepShape(((200, 200),), 0, 0, 1))
    assert halves == pytest.approx(2 * a + b * 400 + q * 400**2)


def test_a_concave_grid_has_no_quadratic_term() -> None:
    grid = cost_grid(GRID, {(x, n, c): 1e-3 * (1 + x + n) ** 0.5 for x, n, c in _keys()})
    assert GridCost.measured(grid) == GridCost(grid)


def test_decreasing_neighbours_of_a_grid_become_their_mean() -> None:
    """Two adjacent values in decreasing order become their mean; increasing values are unchanged."""
    times = {k: 1.0 + k[0] / 100 + k[1] / 10 for k in _keys()}
    times |= {(0, 8, 32): 3.0, (0, 8, 256): 2.0}
    decode = np.array(cost_grid(GRID, times).decode)
    assert decode[1].tolist() == [2.5, 2.5]
    assert decode[0].tolist() == [1.1, 1.1]
    assert (np.diff(decode, axis=0) >= 0).all()


def _keys() -> list[tuple[int, int, int]]:
    batches = [(n, c) for n in GRID.seqs for c in GRID.contexts]
    return [*((x, 0, 0) for x in GRID.tokens), *((x, n, c) for x in (0, *GRID.tokens) for n, c in batches)]


@pytest.mark.parametrize("given", ["relative config", "relative folder", "absolute config", "absolute folder"])
def test_a_profile_knows_its_model_by_any_path(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a profile stored under a relative path was not found by the absolute one, and a roofline was used."""
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    paths = {"relative": Path("models/small"), "absolute": folder}
    kind, _, what = given.partition(" ")
    probed = measure_steps(stepped()[0], GRID)
    measured = fit(cost_grid(GRID, probed.seconds), "made up", GRID.points)
    profile = write_profile(measured, unknown_device("here", "small"), "models/small/config.json", tmp_path / "made")
    model = paths[kind] / "config.json" if what == "config" else paths[kind]
    assert isinstance(load_device(str(profile), str(model)).cost, GridCost)
