"""Data-parallel ranks of vLLM in one process: its own busy loop per rank, in a thread, on the emulated device.

vLLM runs the ranks of a mixture-of-experts model in lockstep: whenever one rank computes a pass, every other rank must
compute one too, a dummy pass if it has nothing to do, because the experts are spread over all of them. Requests come in
waves: when no rank has any left, all stop, and the next request starts all of them again. Here a meeting of the threads
stands in for the collective operations of a pass and of the count of unfinished requests: a rank that makes a pass
while another one counts, or none at all, would leave real ranks waiting for each other for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.core_engine import Engine

PATIENCE_S = 60.0


class LockstepError(AssertionError):
    """One rank made a pass while another one did something else."""


class Meeting:
    """Where all ranks meet for a collective operation.

    ``made`` counts operations by kind; ``after[n]`` is called once n passes are made, before the next operation.
    """

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE_S)
        self._brought: list[tuple[str, bool, bool]] = [("", False, False)] * ranks
        self.made: Counter[str] = Counter()
        self.after: dict[int, Callable[[], None]] = {}

    def meet(self, rank: int, kind: str, unfinished: bool = False, pause: bool = False) -> tuple[bool, bool]:
        """Wait for the others; whether any rank has unfinished requests, and whether all want to pause."""
        self._brought[rank] = (kind, unfinished, pause)
        self._barrier.wait()
        brought = list(self._brought)
        if len({one[0] for one in brought}) > 1:
            raise LockstepError(f"the ranks do {[one[0] for one in brought]} at the same time")
        if rank == 0:
            self.made[kind] += 1
            self.after.pop(self.made["pass"], lambda: None)()
        self._barrier.wait()  # no rank may bring the next operation before all have read this one
        return any(one[1] for one in brought), all(one[2] for one in brought)

    def give_up(self) -> None:
        """End the waiting of all ranks with an error."""
        self._barrier.abort()


@dataclass
class Rank:
    """One engine with vLLM's data-parallel busy loop.

    ``passes``: kinds of its passes in order, real or dummy; ``contents``: prompt tokens and decodes of each.
    """

    number: int
    engine: Engine
    meeting: Meeting
    passes: list[str] = field(default_factory=list)
    contents: list[tuple[int, int]] = field(default_factory=list)
    failed: BaseException | None = None

    def __post_init__(self) -> None:
        from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState

        self.core = core = self.engine.core
        core.__class__ = DPEngineCoreProc  # otherwise created in a process of its own, with sockets and a model
        core.input_queue, core.output_queue, core.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
        core.process_input_queue_block, core.publish_dp_lb_stats, core.has_coordinator = True, False, True
        core.engines_running = core.pending_pause = core.ignore_start_dp_wave = core.enable_fault_tolerance = False
        core.shutdown_state, core.eep_scaling_state = EngineShutdownState.RUNNING, None
        core.step_counter = core.current_wave = 0
        core.prefill_schedule_interval = core.vllm_config.scheduler_config.prefill_schedule_interval
        core.dp_sync_interval = core.vllm_config.parallel_config.dp_sync_interval
        core.dp_rank = core.engine_index = self.number
        core.dp_group = (self.meeting, self.number)
        core._idle_state_callbacks = []
        core._handle_shutdown = core.is_running
        core.execute_dummy_batch = lambda: self._pass("dummy")
        core.model_executor.on_step = lambda step, *_: self._pass(
            "real", sum(tokens for tokens, _ in step.shape.prefill), step.shape.decode_seqs
        )
        self.thread = threading.Thread(target=self._run, name=f"rank {self.number}", daemon=True)

    def _pass(self, kind: str, prompt_tokens: int = 0, decodes: int = 0) -> None:
        self.passes.append(kind)
        self.contents.append((prompt_tokens, decodes))
        self.meeting.meet(self.number, "pass")

    def _run(self) -> None:
        try:
            self.core.run_busy_loop()
        except SystemExit:
            pass
        except BaseException as error:
            self.failed = error
            self.meeting.give_up()

    def send(self, kind: str, *contents: Any) -> None:
        """Put messages into the engine's input queue, all at once."""
        from vllm.v1.engine import EngineCoreRequestType

        received = self.core.input_queue
        with received.mutex:
            received.queue.extend((getattr(EngineCoreRequestType, kind), content) for content in contents)
            received.not_empty.notify()


class Ranks:
    """Data-parallel ranks under a policy, and what the front end and the coordinator do for them."""

    def __init__(self, make: Callable[[], Engine], ranks: int = 2) -> None:
        self.meeting = Meeting(ranks)
        self.ranks = [Rank(number, make(), self.meeting) for number in range(ranks)]
        self.wave = 0
        self.complete: list[int] = []  # numbers of the waves that have ended
        self.tokens: Counter[str] = Counter()
        self.ended: set[str] = set()

    def __enter__(self) -> Ranks:
        for rank in self.ranks:
            rank.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        from vllm.v1.engine.core import EngineShutdownState

        for rank in self.ranks:
            rank.core.shutdown_state = EngineShutdownState.REQUESTED
            rank.send("WAKEUP", None)
        for rank in self.ranks:
            rank.thread.join(PATIENCE_S)
        assert not any(rank.thread.is_alive() for rank in self.ranks)

    def begin(self, requests: Mapping[int, Sequence[Any]]) -> None:
        """Send requests to idle ranks: the front end tells the coordinator, which starts a wave on the other ranks."""
        self.add(requests)
        first = next(number for number, some in requests.items() if some)
        for rank in self.ranks:
            rank.send("START_DP_WAVE", (self.wave, first))

    def add(self, requests: Mapping[int, Sequence[Any]]) -> None:
        """Send requests to ranks, by their numbers."""
        for number, some in requests.items():
            self.ranks[number].send("ADD", *((request, self.wave) for request in some))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Read what the ranks send until the condition holds; raises what one of them raised."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            self._read()
            for rank in self.ranks:
                if rank.failed is not None:
                    raise rank.failed
            assert time.monotonic() < until, f"waves {self.complete} ended, requests {sorted(self.ended)}"
            time.sleep(0.001)

    def wave_ends(self) -> None:
        """Wait until the wave is over on all ranks."""
        self.wait(lambda: self.wave in self.complete)
        self.wait(lambda: not any(rank.core.engines_running for rank in self.ranks))
        self.wave += 1

    def _read(self) -> None:
        for rank in self.ranks:
            while not rank.core.output_queue.empty():
                _, outputs = rank.core.output_queue.get_nowait()
                if outputs.wave_complete is not None:
                    self.complete.append(outputs.wave_complete)
                for output in outputs.outputs:
                    self.tokens[output.request_id] += len(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.ended.add(output.request_id)
