"""Faults put into the plugin on purpose: the fuzzer has to notice each within a few dozen scenes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.drawn_policies import draw_policy
from tests.vllm.scenes import DRAWN, Scene, ours
from vllm_eb.controller import Controller
from vllm_eb.policy import parse_policy
from vllm_eb.settings import settings_of
from vllm_eb.strategy import Decision

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCENES = 60
Patch = pytest.MonkeyPatch


def plugin() -> Any:
    """The module of the scheduler: faults are put into what is private to it. It imports vLLM, so no test but these may
    wait for it."""
    return importlib.import_module("vllm_eb.scheduler")


def forgets_those_set_aside(patch: Patch) -> None:
    patch.setattr(plugin(), "_merged", lambda before, after, shown: after)


def forgets_one_that_was_preempted(patch: Patch) -> None:
    patch.setattr(plugin(), "_merged", lambda before, after, shown: before + after[shown:])


def forgets_one_that_is_admitted(patch: Patch) -> None:
    patch.setattr(plugin(), "_merged", lambda before, after, shown: before)


def after_schedule(patch: Patch, change: Callable[[Any, Any], None]) -> None:
    """Let ``change(scheduler, output)`` happen after each schedule() of vLLM that the plugin asks for."""
    under = plugin()._PhasedScheduler._schedule_as_decided

    def changed(self: Any, *args: Any) -> Any:
        output = under(self, *args)
        change(self, output)
        return output

    patch.setattr(plugin()._PhasedScheduler, "_schedule_as_decided", changed)


def drops_ids_of_requests_that_ended(patch: Patch) -> None:
    after_schedule(patch, lambda scheduler, output: setattr(output, "finished_req_ids", set()))


def drops_images_that_were_freed(patch: Patch) -> None:
    after_schedule(patch, lambda scheduler, output: setattr(output, "free_encoder_mm_hashes", []))


def announces_an_end_twice(patch: Patch) -> None:
    after_schedule(
        patch, lambda scheduler, output: setattr(scheduler, "finished_req_ids", set(output.finished_req_ids))
    )


def loses_kv_blocks(patch: Patch) -> None:
    def take(scheduler: Any, output: Any) -> None:
        if output.preempted_req_ids:
            scheduler.kv_cache_manager.block_pool.get_new_blocks(1)

    after_schedule(patch, take)


def exceeds_the_budget(patch: Patch) -> None:
    partial = plugin()._PhasedScheduler._partial_step

    def more(self: Any, *args: Any) -> Any:
        usual = self.scheduler_config.max_num_batched_tokens
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens = usual + 8
        try:
            return partial(self, *args)
        finally:
            self.scheduler_config.max_num_batched_tokens = usual

    patch.setattr(plugin()._PhasedScheduler, "_partial_step", more)


def decided(patch: Patch, change: Callable[[Any, Decision], Decision]) -> None:
    """Replace each decision by ``change(view, decision)``."""
    decide = Controller.decide
    patch.setattr(Controller, "decide", lambda self, view: change(view, decide(self, view)))


def never_serves_the_last_in_the_queue(patch: Patch) -> None:
    def without_the_last(view: Any, decision: Decision) -> Decision:
        return decision._replace(phase="decode") if view.waiting == 1 else decision

    decided(patch, without_the_last)


def forgets_those_set_aside_in_the_limit(patch: Patch) -> None:
    decided(patch, lambda view, decision: decision._replace(running_limit=decision.running_limit + view.decoding))


def mixes(patch: Patch) -> None:
    decided(patch, lambda view, decision: decision._replace(phase="mixed"))


def ignores_adapters_set_aside(patch: Patch) -> None:
    patch.setattr(
        plugin()._PhasedScheduler, "_handle_blocked_waiting_request", plugin().Scheduler._handle_blocked_waiting_request
    )


def drafts_beyond_what_is_scheduled(patch: Patch) -> None:
    """As if a sequence that was set aside kept drafts of the step before it."""

    def keep(scheduler: Any, output: Any) -> None:
        drafts = output.scheduled_spec_decode_tokens
        drafts |= {name: [0] * tokens for name, tokens in output.num_scheduled_tokens.items() if name in drafts}

    after_schedule(patch, keep)


def carries_drafts_into_a_refill(patch: Patch) -> None:
    def carry(scheduler: Any, output: Any) -> None:
        if scheduler.num_spec_tokens:
            prompts = [new.req_id for new in output.scheduled_new_reqs if output.num_scheduled_tokens[new.req_id] > 1]
            output.scheduled_spec_decode_tokens |= {name: [0] for name in prompts}

    after_schedule(patch, carry)


FAULTS = [
    (drafts_beyond_what_is_scheduled, "drafts without the token"),
    (carries_drafts_into_a_refill, "drafts beside tokens"),
    (forgets_those_set_aside, "in no queue"),
    (forgets_one_that_was_preempted, "two places|in no queue"),
    (forgets_one_that_is_admitted, "in no queue"),
    (drops_ids_of_requests_that_ended, "never announced|miscounted"),
    (drops_images_that_were_freed, "overfull"),
    (announces_an_end_twice, "announced twice|miscounted"),
    (loses_kv_blocks, "KV blocks|KV cache"),
    (exceeds_the_budget, "budget exceeded"),
    (never_serves_the_last_in_the_queue, "stuck"),
    (forgets_those_set_aside_in_the_limit, "max_num_seqs"),
    (mixes, "prompts beside decodes"),
    (ignores_adapters_set_aside, "adapters|Assertion"),
]


@pytest.mark.parametrize(("plant", "notice"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_is_noticed(plant: Callable[[Patch], None], notice: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    found = next((wrong for seed in range(SCENES) if (wrong := ours("v0", seed))), "")
    assert found, f"{SCENES} scenes noticed nothing"
    with pytest.raises(AssertionError, match=notice):
        raise AssertionError(found)


@pytest.mark.parametrize("policy", DRAWN)
def test_a_planted_fault_is_noticed_under_every_policy(policy: str, monkeypatch: Patch) -> None:
    never_serves_the_last_in_the_queue(monkeypatch)
    found = next((wrong for seed in range(SCENES) if (wrong := ours(policy, seed))), "")
    assert "stuck" in found


@pytest.mark.parametrize("policy", DRAWN)
def test_settings_are_drawn_of_every_kind(policy: str) -> None:
    kind = policy.removesuffix(":?")
    drawn = [parse_policy(draw_policy(kind, seed, 12, 200)) for seed in range(200)]
    missing = {name for name in settings_of(type(drawn[0])) if all(name not in one.given() for one in drawn)}
    # The devices of scenes have no step times with drafts, which draft=adaptive needs.
    assert missing == {"draft"} & settings_of(type(drawn[0])).keys()


def test_scenes_hold_what_they_are_about() -> None:
    """Images, preemptions, adapters, sessions and drafts do occur; without them the scenes would not test them."""
    seen = dict.fromkeys(("images", "preemptions", "adapters", "sessions", "cache", "drafts"), 0)
    for seed in range(25):
        scene = Scene("v0", seed)
        watch = scene.engine.watch

        def watched(decoding: set[str], output: Any, watch: Any = watch) -> None:
            seen["images"] += len(output.scheduled_encoder_inputs)
            seen["cache"] += len(output.free_encoder_mm_hashes)
            seen["preemptions"] += len(output.preempted_req_ids or ())
            seen["drafts"] += len(output.scheduled_spec_decode_tokens)
            watch(decoding, output)

        scene.engine.watch = watched
        scene.play()
        seen["adapters"] += scene.adapters
        seen["sessions"] += len(scene.sessions)
    assert min(seen.values()) > 5, seen
