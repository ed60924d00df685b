"""Single steps of vLLM servers, as their engines reported them (``reports/reference/steps``), against ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ebbench.devices.base import Device, Parallel, StepShape
from ebbench.devices.loader import load_device
from ebbench.installation import bundled_dir
from ebbench.papers.fidelity.scores import PublishedFigure
from ebbench.papers.published import rows
from ebbench.runs.conclude import of_layers

SOURCE = "steps of engines"
STEPS = "steps/b300"
DEVICE, VLLM, KV_DTYPES = "b300", "0.20.1", {"deepseek-v4-flash": "fp8"}
MODELS = tuple(bundled_dir("reference") / folder / "models" for folder in ("steps", "kv_cache"))


def step_cells() -> list[PublishedFigure]:
    """One figure per kind of step: a batch of decodes of nearly the same context, or one prompt."""
    return [_cell(row) for row in rows(STEPS)]


def _cell(row: Mapping[str, str]) -> PublishedFigure:
    seqs, prompt_tokens = int(row["decode_seqs"]), int(row["prompt_tokens"])
    chunks = ((prompt_tokens, 0),) if prompt_tokens else ()
    shape = StepShape(chunks, seqs, seqs * int(row["context_tokens"]), seqs + len(chunks))
    case = f"prompt of {prompt_tokens} tokens" if prompt_tokens else f"decode of {seqs}"
    gpus = f"{row['model']}, tp={row['tp']}" + (f", ep={row['ep']}" if row["ep"] != "1" else "")
    device = _device(row["model"], int(row["tp"]), int(row["ep"]))
    caveats = tuple(said.code for said in of_layers(device))
    ours_ms = device.cost.step_s(shape) * 1e3
    return PublishedFigure(SOURCE, DEVICE, gpus, case, "", "step_ms", float(row["step_ms"]), ours_ms, caveats=caveats)


@cache
def _device(model: str, tp: int, ep: int) -> Device:
    stored = next((str(folder / model) for folder in MODELS if (folder / model).is_dir()), model)
    parallel = Parallel(tp=tp, ep=ep)
    kv_dtype = KV_DTYPES.get(model, "auto")
    return load_device(DEVICE, stored, parallel=parallel, kv_cache_dtype=kv_dtype, vllm_version=VLLM)
