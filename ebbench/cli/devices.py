"""``ebbench devices list|show``: devices, models and step times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.config.declare import DEFAULT_MODEL
from ebbench.config.options import completing
from ebbench.process.command_line import Command, Group
from ebbench.spec.commands import Tp, setting

if TYPE_CHECKING:
    from ebbench.devices.describe import DeviceFacts

app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, help="Devices: GPUs, models and step times.")

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.command("list", cls=Command)
def list_command(as_json: JsonFlag = False) -> None:
    """List the bundled devices and models."""
    from ebbench.devices.describe import device_rows, model_rows

    devices, models = device_rows(), model_rows()
    if as_json:
        typer.echo(json.dumps({"devices": devices, "models": models}))
        return
    from ebbench.render.devices import listing
    from ebbench.render.documents import Console

    console = Console(highlight=False)
    for table in listing(devices, models):
        console.print(table)
    console.print(
        "Any Hugging Face config.json of a dense or mixture-of-experts decoder works as --model, and any profile "
        "in TOML as a device; `ebbench devices show NAME --model MODEL` explains one.",
        markup=False,
    )


@app.command("show", cls=Command)
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A device: rtx-pro-6000, h200, ..., or a profile in TOML.", autocompletion=completing("devices")
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model name or a config.json.", autocompletion=completing("models"))
    ] = DEFAULT_MODEL,
    assume_decoder: Annotated[bool, setting("assume_decoder")] = False,
    assume_kernels: Annotated[bool, setting("assume_kernels")] = False,
    cost: Annotated[str, typer.Option(help="Cost model: auto, table, linear or roofline.")] = "auto",
    context: Annotated[int, typer.Option(help="KV tokens per decode.")] = 512,
    max_num_seqs: Annotated[int | None, typer.Option(help="Affects the KV cache size.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Affects the KV cache size.")] = None,
    async_scheduling: Annotated[bool, typer.Option(help="Whether host work overlaps with the GPU's.")] = True,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Do not use CUDA graphs.")] = False,
    tp: Tp = 1,
    link: Annotated[str | None, setting("link")] = None,
    quantization: Annotated[str | None, setting("quantization")] = None,
    kv_cache_dtype: Annotated[str, setting("kv_cache_dtype")] = "auto",
    moe_backend: Annotated[str, setting("moe_backend")] = "auto",
    gpu_memory_utilization: Annotated[float | None, setting("gpu_memory_utilization")] = None,
    vllm_version: Annotated[str | None, setting("vllm_version")] = None,
    speculative: Annotated[str | None, setting("speculative")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curves: .svg, .png or .html.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show step times, crossover, KV capacity and the sources of the numbers."""
    from ebbench.devices.base import Parallel
    from ebbench.devices.describe import describe
    from ebbench.devices.loader import load_device
    from ebbench.devices.profiles import as_decoder
    from ebbench.engines.base import check_counts, check_tp
    from ebbench.spec.server import parse_speculative

    check_tp(tp, link)
    check_counts(context=context, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    device = load_device(
        name,
        as_decoder(model) if assume_decoder else model,
        cost=cost,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=async_scheduling,
        eager=enforce_eager,
        parallel=Parallel(tp=tp, link=link or ""),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        moe_backend=moe_backend,
        gpu_memory_utilization=gpu_memory_utilization,
        vllm_version=vllm_version,
        assume_kernels=assume_kernels,
        speculative=None if speculative is None else parse_speculative(speculative),
    )
    _print(describe(device, context), plot, as_json=as_json)


def _print(facts: DeviceFacts, plot: Path | None, *, as_json: bool) -> None:
    from ebbench.render.devices import draw, page
    from ebbench.render.documents import Console

    if as_json:
        typer.echo(json.dumps(facts.to_dict()))
    else:
        console = Console(highlight=False)
        for part in page(facts):
            console.print(part)
    if plot is not None:
        draw(facts, plot)
        typer.echo(f"wrote {plot}", err=True)
