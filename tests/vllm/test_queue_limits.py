"""The simulated queue limits refuse exactly the requests that vLLM's own API server would refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ebbench.spec.server import EngineOptions
from tests.vllm.emulation import DEVICE, Traffic, make_plan, run_sim

pytestmark = pytest.mark.vllm
SEND, OUTPUT = 1, 0  # outputs of a step are processed before their clients send further requests


@pytest.mark.parametrize("rate", [None, 40.0, 400.0])
@pytest.mark.parametrize(("requests", "tokens"), [(9, None), (None, 150), (14, 300)])
@pytest.mark.parametrize("seed", range(4))
def test_refuses_as_vllm_does(rate: float | None, requests: int | None, tokens: int | None, seed: int) -> None:
    options = EngineOptions(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_kv_blocks=60,
        max_num_queued_reqs=requests,
        max_num_queued_tokens=tokens,
    )
    plan = make_plan(Traffic(sessions=80, concurrency=12, rate_per_s=rate, seed=seed))
    made = run_sim(plan, "v1", DEVICE, options).requests
    statuses = made["status"].to_pylist()
    assert statuses == _as_vllm_decides(made, requests, tokens)
    assert "ok" in statuses
    if rate == 400.0:
        assert "failed" in statuses
        assert {code for code in made["http_status"].to_pylist() if code} == {503}


def _as_vllm_decides(made: pa.Table, max_reqs: int | None, max_tokens: int | None) -> list[str]:
    """Replay the times of a run through vLLM's output processor; the status that ``check_admission`` gives each."""
    async_llm = pytest.importorskip("vllm.v1.engine.async_llm")
    from vllm import exceptions
    from vllm.v1.engine.output_processor import OutputProcessor

    if not hasattr(async_llm.AsyncLLM, "check_admission"):
        pytest.skip("this vLLM has no queue limits")
    processor = OutputProcessor(None, log_stats=False)
    config = SimpleNamespace(max_num_queued_reqs=max_reqs, max_num_queued_tokens=max_tokens)
    server: Any = SimpleNamespace(
        scheduler_config=config,
        admission_stats=None,
        output_processor=processor,
        get_num_unfinished_requests=processor.get_num_unfinished_requests,
        get_num_queued_tokens=processor.get_num_queued_tokens,
        _record_admission_rejection=lambda reason: None,
    )
    rows = made.to_pylist()
    events = [(row["sent_ns"], SEND, place) for place, row in enumerate(rows)]
    for place, row in enumerate(rows):
        if row["status"] == "ok":
            events += [(time_ns, OUTPUT, place) for time_ns in {row["first_token_ns"], row["end_ns"]}]
    found = ["ok"] * len(rows)
    for time_ns, kind, place in sorted(events):
        if kind == OUTPUT:
            processor.process_outputs([_output(place, rows[place]["end_ns"] == time_ns)])
            continue
        try:
            async_llm.AsyncLLM.check_admission(server)
        except (exceptions.QueueOverflowError, exceptions.MaxQueuedTokensError):
            found[place] = "failed"
            continue
        processor.add_request(_request(place, rows[place]["input_tokens"]), None)
    return found


def _request(place: int, tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=str(place),
        prompt_token_ids=[1] * tokens,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=100, detokenize=False),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=str(place),
    )


def _output(place: int, last: bool) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    return EngineCoreOutput(
        request_id=str(place), new_token_ids=[1], finish_reason=FinishReason.LENGTH if last else None
    )
