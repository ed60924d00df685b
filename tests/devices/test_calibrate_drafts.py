"""Step times of an engine that drafts tokens: measured with and without drafts, written, and priced in simulations."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbench.calibration.command import SteppedRuns, check_plan, lines, write_profile
from ebbench.calibration.measure import MeasuredCosts, ProbeGrid, cost_grid, fit
from ebbench.calibration.rounds import SteppedVllm, measure_steps
from ebbench.devices.base import StepShape
from ebbench.devices.loader import load_device
from ebbench.engines.costs import serving_costs
from ebbench.engines.setup import unknown_device
from ebbench.errors import UsageError
from ebbench.spec.server import parse_speculative
from vllm_eb.calibration import CalibrationError, calibration_from_json, calibration_to_json
from vllm_eb.policy import parse_policy

DRAFTS = 3
GRID = ProbeGrid((32, 128, 512), (1, 8, 32), (32, 256), repeats=3, drafts=DRAFTS)
STEP_S, PROMPT_S, DECODE_S, DRAFT_S, DRAFTER_S = 2e-3, 5e-5, 1e-4, 4e-5, 7e-4
BY_BATCH = {"num_speculative_tokens_per_batch_size": [[1, 1, DRAFTS]]}
SERVED = {"method": "ngram", "num_speculative_tokens": DRAFTS}
ADAPTIVE = parse_policy("marginal:draft=adaptive")


@dataclass
class Request:
    request_id: str
    left: int
    outputs: int
    num_output_tokens: int = 0
    finished: bool = False
    spec_token_ids: list[int] = field(default_factory=list)


class Drafting:
    """Steps that verify as many drafts as each sequence has; the drafter takes DRAFTER_S per step in which it runs."""

    def __init__(self, *, switches: bool) -> None:
        self.now_s = 0.0
        self.drafted: set[int] = set()
        self.scheduler = SimpleNamespace(running=[], dynamic_sd_lookup=[DRAFTS] * 40 if switches else None)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))

    def add_request(self, name: str, prompt: dict[str, list[int]], outputs: int) -> None:
        self.scheduler.running.append(Request(name, len(prompt["prompt_token_ids"]), outputs))

    def abort_request(self, names: list[str]) -> None:
        self.scheduler.running = [r for r in self.scheduler.running if r.request_id not in names]

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.running)

    def step(self) -> list[Request]:
        running: list[Request] = self.scheduler.running
        if not running:
            return []
        budget, tokens, decodes, drafts = GRID.budget_tokens, 0, 0, 0
        for request in running:
            if request.left:
                chunk = min(request.left, budget - tokens - decodes - drafts)
                request.left -= chunk
                tokens += chunk
                made = not request.left
            else:
                decodes, drafts, made = decodes + 1, drafts + len(request.spec_token_ids), True
                self.drafted.add(len(request.spec_token_ids))
            request.num_output_tokens += made
            request.outputs -= made
            request.spec_token_ids = [9] * 2 if made else []  # what its own drafter proposes
            request.finished = not request.outputs
        lookup = self.scheduler.dynamic_sd_lookup
        drafter_s = DRAFTER_S if lookup is None or lookup[0] else 0.0
        self.now_s += STEP_S + PROMPT_S * tokens + DECODE_S * decodes + DRAFT_S * drafts + drafter_s
        ended = [r for r in running if r.finished]
        self.scheduler.running = [r for r in running if not r.finished]
        return ended


def stepped(*, switches: bool = True) -> SteppedVllm:
    engine = Drafting(switches=switches)
    return SteppedVllm(engine, lambda max_tokens, **_: max_tokens, 100_000, clock=lambda: engine.now_s)


def expected_s(x: int, n: int, drafts: int) -> float:
    return STEP_S + PROMPT_S * x + DECODE_S * n + DRAFT_S * n * drafts + (DRAFTER_S if drafts else 0.0)


def measured_on(vllm: SteppedVllm) -> MeasuredCosts:
    probed = measure_steps(vllm, GRID)
    undrafted = None if probed.undrafted is None else cost_grid(GRID, probed.undrafted)
    return fit(cost_grid(GRID, probed.seconds), "made up", GRID.points, drafts=DRAFTS, undrafted=undrafted)


def profile_of(measured: MeasuredCosts, folder: Path) -> str:
    return str(write_profile(measured, unknown_device("made-up", "qwen3-8b"), "qwen3-8b", folder))


def test_steps_with_and_without_drafts_are_measured_apart() -> None:
    vllm = stepped()
    probed = measure_steps(vllm, GRID)
    assert vllm.engine.drafted <= {0, 2, DRAFTS}
    assert probed.undrafted is not None
    for drafts, seconds in ((DRAFTS, probed.seconds), (0, probed.undrafted)):
        assert len(seconds) == 3 + 6 * 4
        for (x, n, c), found in seconds.items():
            assert found == pytest.approx(expected_s(x, n, drafts)), (x, n, c, drafts)


def test_a_drafter_that_cannot_be_switched_off_has_one_grid() -> None:
    probed = measure_steps(stepped(switches=False), GRID)
    assert probed.undrafted is None
    assert probed.seconds[0, 8, 32] == pytest.approx(expected_s(0, 8, DRAFTS))


def test_costs_of_decodes_are_per_computed_token() -> None:
    calibration = measured_on(stepped()).calibration
    assert calibration.alpha_d == pytest.approx(STEP_S + DRAFTER_S, rel=1e-3)
    assert calibration.beta_d * (1 + DRAFTS) == pytest.approx(DECODE_S + DRAFTS * DRAFT_S, rel=1e-3)
    assert calibration_from_json(calibration_to_json(calibration)) == calibration


def test_a_profile_prices_steps_by_their_drafts(tmp_path: Path) -> None:
    profile = profile_of(measured_on(stepped()), tmp_path / "made")
    for tokens in (1, 2, DRAFTS, 4):
        speculative = parse_speculative(f"method=ngram,tokens={tokens},acceptance=0.5")
        device = load_device(profile, "qwen3-8b", speculative=speculative)
        shape = StepShape((), 8, 8 * 200, 8, 8 * tokens)
        between = DECODE_S * 8 + STEP_S + (DRAFT_S * 8 * DRAFTS + DRAFTER_S) * tokens / DRAFTS
        assert device.cost.step_s(shape) == pytest.approx(between)
        assert device.calibration.drafts == tokens
        assert device.calibration.undrafted is not None
        assert not any("modelled" in str(warning) for warning in device.warnings)
    plain = load_device(profile, "qwen3-8b")
    assert plain.calibration.drafts == 0
    assert plain.calibration.undrafted is None
    assert plain.cost.step_s(StepShape((), 8, 8 * 200, 8)) == pytest.approx(expected_s(0, 8, 0))
    assert plain.calibration.costs.decode_s(8, 200) == pytest.approx(expected_s(0, 8, 0))


def test_steps_that_were_not_measured_are_refused(tmp_path: Path) -> None:
    profile = profile_of(measured_on(stepped(switches=False)), tmp_path / "made")
    with pytest.raises(UsageError, match="only steps with 3 drafted tokens were measured"):
        load_device(profile, "qwen3-8b")
    assert load_device(profile, "qwen3-8b", speculative=parse_speculative("method=ngram,tokens=3,acceptance=0.5"))


def test_the_check_runs_with_drafts_and_is_predicted_with_them() -> None:
    vllm = stepped()
    runs = SteppedRuns(vllm, check_plan(GRID, 24), every=GRID.probes)
    probed = measure_steps(vllm, GRID, runs.pause)
    measured = fit(cost_grid(GRID, probed.seconds), "made up", GRID.points, drafts=DRAFTS)
    check = runs.check(unknown_device("made-up", "qwen3-8b"), measured, GRID)
    assert abs(check.error) < 0.01


def test_the_printed_costs_name_the_drafts() -> None:
    for switches in (True, False):
        done = SimpleNamespace(measured=measured_on(stepped(switches=switches)), check=None)
        said = "\n".join(lines(done, Path("calibration/profile.toml")))  # type: ignore[arg-type]
        assert "per computed token, 3 drafted per sequence" in said
        assert ("steps without drafts were not measured" in said) is not switches


def words(**config: Any) -> tuple[str, ...]:
    return ("--speculative-config", json.dumps(config))


def test_a_server_takes_costs_that_were_measured_as_it_drafts(tmp_path: Path) -> None:
    paths = {}
    for switches in (True, False):
        paths[switches] = tmp_path / f"{switches}.json"
        paths[switches].write_text(calibration_to_json(measured_on(stepped(switches=switches)).calibration))

    def costs(switches: bool, policy: str, *options: str) -> Any:
        return serving_costs(
            [parse_policy(policy)], calibration=paths[switches], device=None, model="qwen3-8b", vllm_options=options
        )

    served = words(**SERVED, **BY_BATCH)
    assert costs(True, "marginal:draft=adaptive", *served).undrafted is not None
    assert costs(False, "eb", *served).drafts == DRAFTS
    for switches, policy, options, said in (
        (False, "marginal:draft=adaptive", served, "step times with drafts and without them"),
        (True, "eb", (), "measured with 3 drafted tokens, and this server drafts 0"),
        (
            True,
            "marginal:draft=adaptive",
            words(**SERVED),
            "in any batch; end the command with: -- --speculative-config",
        ),
        (True, "marginal:draft=adaptive", (), "the server drafts no tokens"),
    ):
        with pytest.raises(UsageError, match=said):
            costs(switches, policy, *options)


@pytest.mark.parametrize("model", ["qwen3-8b", "gemma-3-1b-it"])
def test_a_profile_prices_the_drafts_of_a_server(model: str) -> None:
    """Of a model whose layers keep a window no drafts are priced, so only a policy that must know them is refused."""

    def costs(policy: str, *options: str) -> Any:
        return serving_costs([parse_policy(policy)], calibration=None, device="h200", model=model, vllm_options=options)

    plain, served = costs("eb"), words(**SERVED, **BY_BATCH)
    assert costs("eb", *words(method="medusa", num_speculative_tokens=3)) == plain
    if model == "gemma-3-1b-it":
        assert costs("eb", *served) == plain
        with pytest.raises(UsageError, match="not in the profile; measure it with `ebbench calibrate"):
            costs(ADAPTIVE.name, *served)
        return
    drafting = costs(ADAPTIVE.name, *served)
    assert drafting.undrafted == plain.grid
    assert drafting.grid.decode_s(128, 512) > plain.grid.decode_s(128, 512)


def test_a_number_of_drafts_is_a_number() -> None:
    calibration = measured_on(stepped()).calibration
    for odd in (-1, 1.5, True):
        with pytest.raises(CalibrationError, match="drafts must be a whole number"):
            replace(calibration, drafts=odd)  # type: ignore[arg-type]
