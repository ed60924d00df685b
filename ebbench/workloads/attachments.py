"""LoRA adapters and images of requests: what a request over HTTP carries besides its text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ebbench.config.setting_strings import named_settings, settings_of
from ebbench.errors import UsageError
from ebbench.traffic.substreams import substream
from ebbench.workloads.requests import ImageSettings, Requests

BASE_MODEL = "base"
"""Stands for the model itself among the names of adapters."""


def parse_images(text: str) -> ImageSettings:
    """Parse ``tokens=256,count=2,side=448``. Raises UsageError."""
    given: dict[str, Any] = named_settings(text, settings_of(ImageSettings), "--images")
    if "tokens" not in given:
        raise UsageError("--images needs tokens, what one image is in your model's prompt, as in tokens=256,count=2")
    return ImageSettings(**given)


def parse_adapters(text: str) -> dict[str, float]:
    """Parse ``NAME,NAME=WEIGHT,...`` to weights by name. Raises UsageError."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition("=")
        try:
            found[name] = float(weight or 1)
        except ValueError:
            found[name] = 0.0
        if not name or not 0 < found[name] < float("inf"):
            raise UsageError(
                f"--lora-assignment {part!r}: write names of adapters as the server serves them, each with a weight "
                f"above 0 if they differ, as in sql=3,chat=1 ({BASE_MODEL}: the model itself)"
            )
    if not found:
        raise UsageError("--lora-assignment names no adapter; write names as the server serves them, such as sql,chat")
    return found


def with_adapters(requests: Requests, adapters: dict[str, float], seed: int) -> Requests:
    """Give each session one of the adapters, drawn by weight; all its requests use it."""
    names, weights = list(adapters), np.array(list(adapters.values()))
    drawn = substream(seed, "attachments/lora").choice(len(names), requests.sessions, p=weights / weights.sum())
    chosen = [None if name == BASE_MODEL else name for name in names]
    lora = [chosen[place] for place in drawn[requests.session].tolist()]
    facts = {**requests.facts, "lora_assignment": {name: adapters[name] for name in names}}
    return replace(requests, lora=lora, facts=facts)


def with_images(requests: Requests, images: ImageSettings) -> Requests:
    """Put the images at the beginning of every prompt; later turns repeat those of their session."""
    if requests.hash_ids is not None:
        raise UsageError(
            "hash ids (of a trace, --prefix-share or --cache-hit-rate) name the beginnings of these prompts, which "
            "images would shift; leave out --images"
        )
    more = images.count * images.tokens
    described = f"{images.count} of {images.tokens} tokens, {images.side} x {images.side} pixels"
    return replace(
        requests,
        input_tokens=(requests.input_tokens + more).astype(np.int32),
        images=images,
        facts={**requests.facts, "images": described},
    )
