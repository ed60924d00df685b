"""Arrow schemas of all stored tables. Times are int64 ns from the start of the run.

Notebooks, DuckDB and other tools rely on these names: add columns, never rename them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ebbench.process.interpreter import skip_pandas

skip_pandas()
EARLIER_TURN_FAILED = "earlier_turn_failed"
"""``error_class`` of a turn that was not sent because an earlier turn of its session failed."""
ABANDONED = "abandoned"
"""``status`` of a request whose client hung up before the answer was complete."""
EARLIER_TURN_ABANDONED = "earlier_turn_abandoned"
"""``error_class`` of a turn that was not sent because the client hung up during an earlier turn of its session."""

PLAN = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        # Requests of a session run one after the other: turn t+1 is sent when turn t has ended.
        pa.field("session", pa.int64(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        # Open loop: intended start of the session's first turn. Null in closed loop and for turn > 0.
        pa.field("arrival_ns", pa.int64()),
        pa.field("input_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        # Content identity: token p of the prompt is token p of stream `content`, and the output continues that stream.
        # Turns of a session have the same `content`, so that they share their history as a prefix.
        pa.field("content", pa.int64(), nullable=False),
        # Prefix identity: hash_ids[j] identifies tokens [b j, b (j+1)) and all tokens before. The column's metadata
        # `block_tokens` is b; 512, as in Mooncake's traces, without it.
        pa.field("hash_ids", pa.list_(pa.int64())),
        # Real text if the source has it; null for synthetic lengths.
        pa.field("prompt", pa.string()),
    ]
)

# Columns that a plan has only if a request uses them; a plan without them has the bytes and the hash it always had.
PLAN_EXTRAS = pa.schema(
    [
        # Pause (ns) between the end of the requests that this one waits for and its own intended start: the user's
        # think time, or the time of a tool call. Null: none.
        pa.field("pause_ns", pa.int64()),
        # How much of the pause tools take; the rest is the user's. Null: no pause, or not known of it.
        pa.field("tool_ns", pa.int64()),
        # Turns of the same session, all of them lower, whose ends this request waits for. Null: the turn before. Empty:
        # it starts with the session. Two requests that wait for the same turn run at the same time (sub-agents); one
        # that waits for both of them joins them.
        pa.field("after", pa.list_(pa.int32())),
        # The client hangs up so long (ns) after it sent the request, unless the answer is complete. Null: never.
        pa.field("hang_up_ns", pa.int64()),
        # How many of the output tokens, from the first one on, are thinking; the others are the answer. Null: none.
        pa.field("thinking_tokens", pa.int32()),
        # LoRA adapter as the server names it; null: the model itself.
        pa.field("lora", pa.string()),
        # Images at the beginning of the prompt: their prompt tokens, which `input_tokens` includes, and the height and
        # width of each in pixels.
        pa.field("image_tokens", pa.list_(pa.int32())),
        pa.field("image_side", pa.int32()),
        # Class of the request, such as chat or batch; null: none. Results are given for each class.
        pa.field("class", pa.string()),
        # As vLLM's `priority`: of two waiting requests the one with the lower value is scheduled first. Null: 0.
        pa.field("priority", pa.int32()),
        # How many tokens of the prompt, from the first one on, the server holds when the run begins: a request of these
        # and one output token is sent before it and not recorded. Null: none.
        pa.field("primed_tokens", pa.int32()),
    ]
)

REQUESTS = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("session", pa.int64()),
        pa.field("turn", pa.int32()),
        pa.field("phase", pa.string()),
        pa.field("input_tokens", pa.int32()),
        pa.field("output_tokens_planned", pa.int32()),
        pa.field("output_tokens", pa.int32()),
        pa.field("cached_tokens", pa.int32()),
        # ok | failed | timed_out | cancelled | abandoned | never_sent
        pa.field("status", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("intended_ns", pa.int64()),
        pa.field("sent_ns", pa.int64()),
        pa.field("scheduled_ns", pa.int64()),  # first time the engine scheduled tokens of it; simulated engines only
        pa.field("first_byte_ns", pa.int64()),
        pa.field("first_token_ns", pa.int64()),
        pa.field("last_token_ns", pa.int64()),
        pa.field("end_ns", pa.int64()),
        pa.field("itl_ns", pa.list_(pa.int64())),
        # Not every output token has a time of its own: several came in one message or one read, or thinking was counted
        # and not sent. Tokens that came together have gaps of (nearly) zero in itl_ns; unsent ones have no gap.
        pa.field("bundled_tokens", pa.bool_()),
        pa.field("preemptions", pa.int32()),
        pa.field("error_class", pa.string()),
        pa.field("error_body", pa.string()),
        pa.field("http_status", pa.int32()),
        pa.field("worker", pa.int32()),
    ]
)

DRAFT_COLUMNS = (
    pa.field("draft_steps", pa.int32()),
    pa.field("drafted_tokens", pa.int32()),
    pa.field("accepted_tokens", pa.int32()),
    pa.field("acceptance_histogram", pa.list_(pa.int32())),
)

# Columns that a requests table has only where they apply. The first two: where the plan has them. The next two: where
# answers may have a thinking part, so in simulated runs whose plan says so, and in runs against the chat endpoint.
REQUESTS_EXTRAS = pa.schema(
    [
        pa.field("class", pa.string()),
        # As in the plan, but 0 without a pause.
        pa.field("tool_ns", pa.int64()),
        # Thinking tokens of the output; null where the server marked none. The server's `usage` decides, else messages.
        pa.field("thinking_tokens", pa.int32()),
        # First token of the answer after the thinking. Null without thinking, and where the output ended in it.
        pa.field("first_answer_ns", pa.int64()),
        # When a prefill instance had computed the prompt; in simulated runs with separate prefill and decode pools
        # where clients may hang up.
        pa.field("prefilled_ns", pa.int64()),
        # Whether output_tokens was counted by the client with a tokenizer; in runs over HTTP with --tokenizer.
        pa.field("estimated_tokens", pa.bool_()),
        # Speculative decoding, in runs over HTTP whose server says it per answer; null where it does not: steps that
        # verified drafts, tokens drafted and accepted in them, and how many steps accepted 0, 1, ... tokens.
        *DRAFT_COLUMNS,
    ]
)

# Latencies of each request by the definitions of docs/metrics.md, null where undefined. Added to REQUESTS when a run is
# concluded; runs stored before 27 November 2026 lack them.
REQUEST_LATENCIES = pa.schema(
    [
        pa.field("ttft_ms", pa.float64()),
        pa.field("tpot_ms", pa.float64()),
        pa.field("e2el_ms", pa.float64()),
        # Whether it completed within every limit of the run (`slo` in the manifest); null in a run without limits.
        pa.field("in_limits", pa.bool_()),
    ]
)

STEPS = pa.schema(
    [
        pa.field("step_id", pa.int64(), nullable=False),
        pa.field("instance", pa.int32(), nullable=False),
        pa.field("scheduled_ns", pa.int64(), nullable=False),
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("end_ns", pa.int64(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),  # prefill | decode | mixed
        pa.field("mode", pa.string(), nullable=False),  # eb | mb
        pa.field("prefill_tokens", pa.int32(), nullable=False),
        pa.field("decode_seqs", pa.int32(), nullable=False),
        pa.field("request_ids", pa.list_(pa.string()), nullable=False),  # in the order they were scheduled
        pa.field("request_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("kv_blocks_used", pa.int32(), nullable=False),
        pa.field("kv_blocks_total", pa.int32(), nullable=False),
        pa.field("waiting", pa.int32(), nullable=False),
        pa.field("running", pa.int32(), nullable=False),
        pa.field("preemptions", pa.int32(), nullable=False),  # in this step
        pa.field("preempted_ids", pa.list_(pa.string()), nullable=False),  # in plan order
        pa.field("k", pa.int32()),  # idle slots required for a refill, as if N sequences were active
        pa.field("n_limit", pa.int32()),  # memory-safe batch size in force
    ]
)

# One row per phase switch, mode evaluation and parameter update, with every intermediate value.
DECISIONS = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("step_id", pa.int64(), nullable=False),
        pa.field("instance", pa.int32(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # phase | update | mode
        pa.field("reason", pa.string(), nullable=False),  # a code; a sentence in runs of schema version 1
        pa.field("mode", pa.string(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
    ]
    + [pa.field(name, pa.int32()) for name in ("decoding", "prefilling", "waiting", "idle", "k", "n_limit")]
    + [
        pa.field(name, pa.float64())
        for name in (
            "theta", "theta0", "delta_theta", "zeta", "p0", "eta", "mu_l", "mu_o", "n_obs", "r",
            "beta_mb", "beta_eb", "lhs", "rhs", "margin", "kv_free_share", "kv_gate", "samples",
            "overhead_exclusive_s", "overhead_mixed_s",
        )
    ]
)  # fmt: skip

# Columns that a decisions table has only where they apply: every how many passes ranks in lockstep refill.
DECISIONS_EXTRAS = pa.schema([pa.field("period_passes", pa.int32())])


def with_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """The table with these values, arrays or lists, in some of its columns."""
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        field = table.schema.field(index)
        known = isinstance(values, pa.Array | pa.ChunkedArray)
        table = table.set_column(index, field, values if known else pa.array(values, field.type))
    return table


def decisions_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """DECISIONS, one row per mapping, with those of DECISIONS_EXTRAS that a row has."""
    extras = [column for column in DECISIONS_EXTRAS if any(column.name in row for row in rows)]
    return pa.Table.from_pylist(rows, schema=pa.schema([*DECISIONS, *extras]))


# Samples of a server's metrics page, one row per change; only if a server was read.
SERVER_METRICS = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("labels", pa.string(), nullable=False),  # a JSON object with sorted keys
        pa.field("value", pa.float64(), nullable=False),
    ]
)


# Which output tokens have a time of their own.
#
# A message of a stream may carry several tokens, a proxy may deliver several messages at once, and a server may count
# thinking that it does not send. The tokens that come at the time of the first one tell nothing of the speed of
# generation: the time per output token is that of the tokens after them.

SAME_TIME_NS = 200_000
"""Tokens that follow each other faster were delivered together: no server decodes 5,000 tokens/s for one user."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def tokens_after_first(output_tokens: Ints, bundled: Bools, gap_counts: Ints, gaps_ns: Ints) -> Ints:
    """Per request the output tokens that came later than the first one; 0 where all came at one time.

    ``bundled``: requests in which not every token has a time of its own. ``gaps_ns`` concatenates the gaps between the
    tokens of all requests (ns), ``gap_counts`` of each.
    """
    after = output_tokens - 1
    if bundled.any():
        stops = np.cumsum(gap_counts)
        starts = (stops - gap_counts)[bundled]
        apart = np.append(np.flatnonzero(gaps_ns >= SAME_TIME_NS), len(gaps_ns))
        first_apart = apart[np.searchsorted(apart, starts)]
        after[bundled] = stops[bundled] - np.minimum(first_apart, stops[bundled])
    return np.maximum(after, 0)


def tokens_after_first_of(requests: pa.Table) -> Ints:
    """:func:`tokens_after_first` of a table in the REQUESTS schema."""
    gaps = requests.column("itl_ns").combine_chunks()
    return tokens_after_first(
        np.array(requests.column("output_tokens").fill_null(0).to_numpy(), np.int64),
        np.array(requests.column("bundled_tokens").fill_null(False).to_numpy(), np.bool_),
        np.array(gaps.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64),
        gaps.flatten().to_numpy(zero_copy_only=False),
    )
