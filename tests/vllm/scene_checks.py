"""What must hold after every step of a scene (scenes.py), whatever the policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.core_engine import Engine

EXCLUSIVE = ("v0", "deferred", "eb")
"""Kinds of policies under which no step holds both prompts and decodes."""


class BrokenError(AssertionError):
    """Something that must always hold does not."""


LOST_BY_VLLM = "vLLM itself loses a session whose turn ends after it was preempted"
"""vLLM 0.32 puts such a session into its queue, then removes from it all preempted requests that stopped in the step.

Stock vLLM does so in two or three of 1,000 scenes, a policy in others: it preempts at other moments.
"""


def hold(condition: bool, message: str) -> None:
    """Raise BrokenError unless the condition holds."""
    if not condition:
        raise BrokenError(message)


def _is_preempted_session(request: Any) -> bool:
    """Whether it is a streaming session that was preempted once and now waits for its next turn."""
    return request.status.name == "WAITING_FOR_STREAMING_REQ" and request.num_preemptions > 0


@dataclass
class Device:
    """What the worker learns from the outputs alone: requests that ended, and images in its encoder cache."""

    announced: Counter[str] = field(default_factory=Counter)
    encoded: dict[str, int] = field(default_factory=dict)  # embeddings by image

    def take(self, output: Any, features: dict[str, Any]) -> None:
        """Follow one output; ``features``: images by request."""
        self.announced.update(output.finished_req_ids)
        for image in output.free_encoder_mm_hashes:
            hold(image in self.encoded, "an image was freed that is not in the encoder cache")
            del self.encoded[image]
        for name, places in output.scheduled_encoder_inputs.items():
            for place in places:
                image = features[name][place]
                self.encoded[image.identifier] = image.mm_position.length
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, tokens in output.num_scheduled_tokens.items():
            for image in features.get(name) or ():
                first, length = image.mm_position.offset, image.mm_position.length
                if first < computed[name] + tokens and computed[name] < first + length:
                    hold(image.identifier in self.encoded, "an image is to be read that is not in the encoder cache")


@dataclass
class Checks:
    """Looks at one engine; ``slots``: adapters that a step may hold, 0: no adapters are used."""

    engine: Engine
    slots: int = 0
    device: Device = field(default_factory=Device)
    features: dict[str, Any] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)  # ids that were in the engine between two steps, or in a step

    def __post_init__(self) -> None:
        self.engine.watch = self._output

    def state(self) -> None:
        """The queues and the KV cache between two steps."""
        scheduler = self.engine.scheduler
        running = [request.request_id for request in scheduler.running]
        queues = [scheduler.waiting, getattr(scheduler, "kv_holding_waiting", ())]
        waiting = [request.request_id for queue in queues for request in queue]
        places = Counter(running + waiting)
        lost = [request for name, request in scheduler.requests.items() if name not in places]
        hold(not lost or not all(map(_is_preempted_session, lost)), LOST_BY_VLLM)
        hold(set(places) == set(scheduler.requests), "a request is in no queue, or in one after its end")
        hold(all(count == 1 for count in places.values()), "a request is in two places")
        hold(len(running) <= self.engine.seqs, "more run than max_num_seqs")
        pool = scheduler.kv_cache_manager.block_pool
        held = sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks)
        hold(held + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "KV blocks were lost or counted twice")
        encoder = scheduler.encoder_cache_manager
        hold(0 <= encoder.num_free_slots <= encoder.num_freeable_slots <= encoder.cache_size, "encoder cache overdrawn")
        self._work()

    def _work(self) -> None:
        """Whether there is work, as the engine asks: data-parallel ranks begin and end their waves by the answers."""
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self.engine.scheduler
        held = len(getattr(scheduler, "kv_holding_waiting", ()))
        unfinished = {
            PauseState.UNPAUSED: len(scheduler.requests),
            PauseState.PAUSED_NEW: len(scheduler.running) + held,
            PauseState.PAUSED_ALL: 0,
        }[scheduler.pause_state]
        if scheduler.pause_state != PauseState.PAUSED_ALL:  # streaming sessions between two turns have no work
            unfinished -= scheduler.num_waiting_for_streaming_input
        hold(scheduler.get_num_unfinished_requests() == unfinished, "the number of unfinished requests is wrong")
        hold(scheduler.has_unfinished_requests() == (unfinished > 0), "a wave would end too early or too late")
        self.seen |= scheduler.requests.keys()
        unannounced = self.seen - scheduler.requests.keys() - self.device.announced.keys()
        hold(scheduler.has_finished_requests() == bool(unannounced), "ends still to be announced are miscounted")
        hold(scheduler.has_requests() == bool(unfinished or unannounced), "the engine would sleep, or never sleep")

    def _output(self, decoding: set[str], output: Any) -> None:
        """One output, as it leaves the scheduler. ``decoding``: ids that were decoding before."""
        tokens = output.num_scheduled_tokens
        self.seen |= tokens.keys()
        hold(sum(tokens.values()) == output.total_num_scheduled_tokens <= self.engine.budget, "budget exceeded")
        scheduler, drafts = self.engine.scheduler, output.scheduled_spec_decode_tokens
        for name, drafted in drafts.items():
            hold(0 < len(drafted) < tokens.get(name, 0), "drafts without the token that they follow")
            # vLLM lets a prompt of which all but one token is cached be as long as a decode, by placeholders.
            hold(name in decoding or tokens[name] == 1 + len(drafted), "drafts beside tokens of a prompt")
        if self.slots:
            requests = scheduler.requests
            used = {r.lora_request.lora_int_id for name in tokens if (r := requests.get(name)) and r.lora_request}
            hold(len(used) <= self.slots, "more adapters than slots")
        if self.engine.policy.partition(":")[0] in EXCLUSIVE:
            hold(not tokens.keys() & decoding or tokens.keys() <= decoding, "prompts beside decodes")
        images = [
            self.features[name][place] for name, places in output.scheduled_encoder_inputs.items() for place in places
        ]
        embeddings = sum(image.mm_position.length for image in images)
        hold(embeddings <= scheduler.max_num_encoder_input_tokens, "encoder budget exceeded")
        self.device.take(output, self.features)
        hold(sum(self.device.encoded.values()) <= scheduler.encoder_cache_manager.cache_size, "encoder cache overfull")

    def end(self, made: set[str], wanted: dict[str, int], whole: set[str]) -> None:
        """After the last step. ``made``: all requests; ``wanted``: tokens of those that were not aborted.

        ``whole``: requests whose answer is one piece of their stream.
        """
        engine, scheduler = self.engine, self.engine.scheduler
        hold(not scheduler.requests, f"stuck: {sorted(scheduler.requests)}")
        for name, output in wanted.items():
            hold(engine.tokens[name] == output, f"{name} has {engine.tokens[name]} of {output} tokens")
        for name in whole:
            answer, stream = engine.answers[name], engine.streams[name]
            first = len(stream) - wanted[name]
            hold(answer == stream[first : first + len(answer)], f"the tokens of {name} are out of order")
        announced = self.device.announced
        hold(all(count == 1 for count in announced.values()), "the end of a request was announced twice")
        hold(announced.keys() | scheduler.finished_req_ids == made, "the end of a request was never announced")
        pool = scheduler.kv_cache_manager.block_pool
        hold(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "KV blocks are held after the end")
        encoder = scheduler.encoder_cache_manager
        hold(encoder.num_freeable_slots == encoder.cache_size, "images are held in the encoder cache after the end")
