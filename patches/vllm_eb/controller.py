"""The one policy core: from counts, lengths, KV occupancy and a clock to what the next step may contain.

The simulator and the vLLM scheduler both call it once per scheduling step and tell it about admissions and
completions; no scheduling rule is written anywhere else. It never reads a clock or a random number, so a run is a
function of its inputs. What a policy wants comes from its :class:`~vllm_eb.strategy.Strategy`; phases, KV gate
and records are the same for all. A record of every change of phase or mode and of every update, with all intermediate
values, is kept where the caller reads records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_eb.calibration import Calibration
from vllm_eb.decisions import Decision, Record, RecordKind, View
from vllm_eb.lengths import Lengths
from vllm_eb.modes import Mode
from vllm_eb.phases import Phases
from vllm_eb.policy import PolicySpec
from vllm_eb.queueing import Places, PunctualQueue
from vllm_eb.strategy import EngineFacts, Values


def _no_ages() -> Sequence[int]:
    return ()


class Controller:
    """Decides for one engine instance. ``keep_records``: the caller drains them (:meth:`drain_records`)."""

    def __init__(
        self,
        spec: PolicySpec,
        calibration: Calibration,
        *,
        max_num_seqs: int,
        block_size: int,
        num_blocks: int,
        keep_records: bool = False,
    ) -> None:
        engine = EngineFacts(calibration, max_num_seqs, block_size, num_blocks)
        self._num_blocks = num_blocks
        self._lengths = Lengths(spec.completions_per_update)
        self._strategy = spec.strategy(engine, self._lengths)
        self._phases = Phases(engine, self._strategy, self._lengths, self._entered)
        self._running_ages: Callable[[], Sequence[int]] = _no_ages
        self._keep_records = keep_records
        self._records: list[Record] = []

    @property
    def mode(self) -> Mode:
        """Mode in force."""
        return self._phases.mode

    def follow_ages(self, running_ages: Callable[[], Sequence[int]]) -> None:
        """Say how to learn the output tokens so far of every running request (for the censored estimator)."""
        self._running_ages = running_ages

    def keep_records(self) -> None:
        """From now on, keep records for :meth:`drain_records`."""
        self._keep_records = True

    def drain_records(self) -> list[Record]:
        """Records since the last call."""
        records, self._records = self._records, []
        return records

    def on_prompt(self, input_tokens: int, cached_tokens: int = 0) -> None:
        """A request was admitted for the first time: tokens of its prompt, and how many of them need no computing."""
        self._lengths.on_prompt(input_tokens, cached_tokens)
        self._phases.on_admission()
        self._strategy.on_prompt(input_tokens, cached_tokens)

    def on_resume(self) -> None:
        """A preempted request was admitted again."""
        self._phases.on_admission()
        self._strategy.on_resume()

    def on_finish(self, output_tokens: int) -> None:
        """A request left its slot after that many output tokens, one or more, by itself or aborted."""
        self._lengths.on_finish(output_tokens)
        self._strategy.on_finish(output_tokens)

    def decide(self, view: View) -> Decision:
        """What the next step may contain."""
        phases = self._phases
        self._strategy.observe(view)
        if self._lengths.update_due:
            self._update(view)
        if phases.phase == "prefill":
            phases.extend(view)
        choice = self._strategy.choose(view, phases)
        if choice is not None:
            phases.follow(choice, view)
        elif phases.mode == "eb":
            phases.alternate(view)
        return phases.decision(view)

    def prefill_blocked(self, view: View) -> None:
        """The prefill step just decided on could schedule nothing: ask again, for completions free blocks."""
        self._phases.block(view)

    # The order of waiting requests.

    @property
    def orders_queue(self) -> bool:
        """Whether requests that were never started are to be put into the order of :meth:`queue_order`."""
        return self._strategy.queue is not None

    @property
    def queue(self) -> PunctualQueue:
        """When the queue is to be ordered, and how long its oldest punctual request has waited."""
        assert self._strategy.queue is not None
        return self._strategy.queue

    def queue_order(self, now_s: float, seen_s: Sequence[float], prompt_tokens: Sequence[int]) -> Places:
        """The places of never-started requests in their new order; to be called when ``queue`` says it is due.

        ``seen_s``: when each came, in the order of the queue; ``prompt_tokens``: its prompt's length.
        """
        return self._strategy.queue_order(now_s, seen_s, prompt_tokens)

    # Parameters and records.

    def _update(self, view: View) -> None:
        self._lengths.update()
        for change in self._strategy.update(view, self._running_ages):
            if change.mode is not None:
                self._phases.switch(change.mode, view)
            self._record(change.kind, view, change.reason, change.values)

    def _entered(self, view: View, reason: str, values: Values) -> None:
        self._record("phase", view, reason, values)

    def _record(self, kind: RecordKind, view: View, reason: str, values: Values) -> None:
        if not self._keep_records:
            return
        phases, strategy, lengths = self._phases, self._strategy, self._lengths
        facts = strategy.facts
        common: dict[str, float | int | None] = {
            "decoding": view.decoding,
            "prefilling": view.prefilling,
            "waiting": view.waiting,
            "idle": max(phases.idle(view), 0),
            "k": strategy.slots,
            "n_limit": phases.batch_limit(view),
            "theta": strategy.theta,
            "theta0": facts.get("theta0"),
            "mu_l": lengths.mu_l,
            "mu_o": lengths.mu_o,
            "n_obs": facts.get("n_obs"),
            "kv_free_share": view.free_blocks / self._num_blocks,
            "kv_gate": phases.gate(),
        }
        self._records.append(
            Record(view.now_s, view.step_id, kind, reason, phases.mode, phases.phase, common | dict(values))
        )
