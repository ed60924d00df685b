"""LoRA adapters and images over HTTP; what of them is simulated, refused or said."""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

from ebbench.client import drive
from ebbench.client.bodies import RequestBodies, png
from ebbench.client.session_plan import plan_sessions
from ebbench.engines.base import IMAGES_AS_TOKENS
from ebbench.engines.sim import SimEngine
from ebbench.errors import UsageError
from ebbench.fakeserver import FakeConfig, FakeServerProcess
from ebbench.records.plan import Plan
from ebbench.spec.client import ClientOptions
from ebbench.spec.server import EngineOptions
from ebbench.workloads import build_plan
from tests.simulation.worlds import device
from vllm_eb.policy import parse_policy

QUICK = FakeConfig(ttft_ms=2, itl_ms=1, model="base-model", further_models=("sql", "chat"))


def chat(**options: Any) -> Plan:
    return build_plan("wildchat", source="profile", **{"num_prompts": 40, **options})


def bodies_of(plan: Plan, endpoint: str = "chat") -> list[dict[str, Any]]:
    sessions = plan_sessions(plan.table, plan.phases, plan.max_concurrency)
    bodies = RequestBodies("base-model", ClientOptions(endpoint=endpoint))  # type: ignore[arg-type]
    return [json.loads(bodies.build(sessions.turn(row))) for row in range(len(plan))]


def test_a_session_keeps_its_adapter_and_shares_follow_the_weights() -> None:
    plan = chat(lora_assignment="sql=3,chat=1,base", num_prompts=1000)
    by_session: dict[int, set[str | None]] = {}
    for session, name in zip(plan.table["session"].to_pylist(), plan.table["lora"].to_pylist(), strict=True):
        by_session.setdefault(session, set()).add(name)
    assert all(len(names) == 1 for names in by_session.values())
    counts = Counter(names.pop() for names in by_session.values())
    assert {name: round(count / 1000, 1) for name, count in counts.items()} == {"sql": 0.6, "chat": 0.2, None: 0.2}


def test_a_request_names_its_adapter_as_the_model() -> None:
    plan = chat(lora_assignment="sql,base", num_prompts=10)
    names = [body["model"] for body in bodies_of(plan, "completions")]
    assert names == [name or "base-model" for name in plan.table["lora"].to_pylist()]
    assert set(names) == {"sql", "base-model"}


def test_an_adapter_that_is_not_served_is_refused_before_anything_is_sent() -> None:
    options = ClientOptions(model="base-model", workers=0, metrics_interval_s=None)
    with FakeServerProcess(QUICK) as server:
        with pytest.raises(UsageError, match="does not serve the adapter 'sqll'; it serves base-model, chat, sql"):
            drive(server.url, chat(lora_assignment="sqll", num_prompts=2), options, environ={})
        assert server.ledger() == []
        result = drive(server.url, chat(lora_assignment="sql", num_prompts=2), options, environ={})
    assert set(result.requests.column("status").to_pylist()) == {"ok"}


def test_simulated_engines_refuse_unsimulated() -> None:
    with pytest.raises(UsageError, match="engine sim simulates none"):
        SimEngine().run(chat(lora_assignment="sql", num_prompts=2), parse_policy("v1"), device(), EngineOptions())


def test_an_endpoint_without_priorities_is_refused_before_sending() -> None:
    plan = build_plan("chat=wildchat:1 rag=longbench:1", source="profile", num_prompts=4, priorities="rag=3")
    with FakeServerProcess(QUICK) as server:
        options = ClientOptions(model="base-model", workers=0, metrics_interval_s=None, endpoint="messages")
        with pytest.raises(UsageError, match=r"--endpoint messages have no priority.*completions, chat"):
            drive(server.url, plan, options, environ={})
        assert server.ledger() == []


def test_images_are_tokens_of_the_plan_and_pictures_of_the_request() -> None:
    plain, plan = chat(num_prompts=3), chat(num_prompts=3, images="tokens=256,count=2,side=56")
    grown = np.asarray(plan.table["input_tokens"]) - np.asarray(plain.table["input_tokens"])
    assert (grown == 512).all()
    first_urls = set()
    for body, before in zip(bodies_of(plan), bodies_of(plain), strict=True):
        *images, text = body["messages"][-1]["content"]
        assert [part["type"] for part in images] == ["image_url"] * 2
        assert text == {"type": "text", "text": before["messages"][-1]["content"]}
        first_urls.add(images[0]["image_url"]["url"])
    assert len(first_urls) == 3  # one per session: its turns repeat it


@pytest.mark.parametrize("side", [8, 448])
def test_an_image_is_a_png_of_its_size_unlike_all_others(side: int) -> None:
    data = png(7, 0, side)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (side, side)
    at, parts = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        parts[kind], at = body, at + 12 + length
    assert len(zlib.decompress(parts[b"IDAT"])) == side * (1 + 3 * side)
    assert png(7, 0, side) == data
    assert len({png(content, number, side) for content in (-1, 7, 8) for number in (0, 1)}) == 6
    assert len(data) < 8000


def test_images_are_sent_on_the_chat_endpoint_only() -> None:
    plan = chat(num_prompts=2, images="tokens=64,side=28")
    with FakeServerProcess(QUICK) as server:
        common: dict[str, Any] = {"model": "base-model", "workers": 0, "metrics_interval_s": None}
        with pytest.raises(UsageError, match="give --endpoint chat"):
            drive(server.url, plan, ClientOptions(**common), environ={})
        result = drive(server.url, plan, ClientOptions(**common, endpoint="chat"), environ={})
        counted = [entry.prompt_tokens for entry in server.ledger()]
    assert set(result.requests.column("status").to_pylist()) == {"ok"}
    assert max(counted) < max(plan.table["input_tokens"].to_pylist())  # the fake server counts words, not images


def test_the_simulator_says_what_of_images_it_leaves_out() -> None:
    plan = build_plan("balanced", num_prompts=3, input_len=50, output_len=5, images="tokens=64")
    result = SimEngine().run(plan, parse_policy("v1"), device(), EngineOptions())
    assert IMAGES_AS_TOKENS in result.warnings
    assert (
        IMAGES_AS_TOKENS
        not in SimEngine()
        .run(
            build_plan("balanced", num_prompts=3, input_len=50, output_len=5),
            parse_policy("v1"),
            device(),
            EngineOptions(),
        )
        .warnings
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"lora_assignment": ""}, "names no adapter"),
        ({"lora_assignment": "sql=0"}, "weight"),
        ({"lora_assignment": "=2"}, "write names"),
        ({"images": "count=2"}, "tokens"),
        ({"images": "tokens=2,side=4"}, "side"),
    ],
)
def test_wrong_attachment_options_are_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        chat(**options)
