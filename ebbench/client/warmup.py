"""Warm-up: requests before the start with the plan's lengths and other content, not recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ebbench.client.bodies import RequestBodies, Turn
from ebbench.client.request_sender import RequestSender
from ebbench.client.response import StreamedResponse
from ebbench.config.server_url import ServerUrl
from ebbench.errors import RunError
from ebbench.network.credentials import redacted
from ebbench.records.plan import Plan
from ebbench.spec.client import ClientOptions, secrets

_AT_ONCE = 64


async def warm_up(url: ServerUrl, model: str, plan: Plan, options: ClientOptions, environ: Mapping[str, str]) -> None:
    """Send ``options.warmup`` requests. Raises RunError if all of them fail: the run would fail too."""
    if not options.warmup:
        return
    bodies = RequestBodies(model, options)
    gate = asyncio.Semaphore(_AT_ONCE)
    async with RequestSender(url, bodies.path, options, environ) as sender:

        async def one(number: int) -> StreamedResponse:
            streamed = StreamedResponse(options.endpoint == "chat", keep_text=False)
            async with gate:
                await sender.send(f"warmup-{number}", bodies.build(_turn(plan, number)), streamed)
            return streamed

        responses = await asyncio.gather(*(one(number) for number in range(options.warmup)))
    failed = [a for a in responses if a.error_class is not None]
    if len(failed) == len(responses):
        body = redacted(failed[0].error_body, secrets(options, environ))[:200]
        raise RunError(f"every warm-up request failed ({failed[0].error_class}: {body})")


def _turn(plan: Plan, number: int) -> Turn:
    """Lengths of the plan's request ``number`` with content of its own, so that no prefix of the run gets cached."""
    row = number % plan.table.num_rows
    lengths = {name: plan.table.column(name)[row].as_py() for name in ("input_tokens", "output_tokens")}
    return Turn(row=row, request_id="", turn=0, content=-1 - number, hash_ids=None, prompt=None, **lengths)
