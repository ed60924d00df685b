"""Makes docs/notebook.ipynb: its cells are here, its outputs are those of a run now. `make notebook` runs this file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

NOTEBOOK = Path(__file__).with_suffix(".ipynb")
TEXT, CODE = "markdown", "code"
CELLS = (
    (TEXT, """# ebbench in a notebook

Every result shows itself as tables and plots, and is an Arrow table or a DataFrame for the rest. Here everything is
simulated: no GPU, no server, some ten seconds. [The page](python.md) lists functions and names."""),
    (CODE, "import ebbench as eb"),
    (TEXT, """## Two policies under one load

Keywords are the settings of a file for `ebbench run`. Both policies get the same requests at the same times."""),
    (CODE, """runs = eb.run(
    "sharegpt", policies=["v1", "ebplus"], device="rtx-pro-6000", source="profile",
    num_prompts=1000, max_concurrency=256,
)
runs"""),
    (TEXT, "One row per run, by the names of `ebbench run --json`:"),
    (CODE, 'runs.to_pandas()[["policy", "output_throughput", "median_ttft_ms", "median_tpot_ms", "mean_e2el_ms"]]'),
    (TEXT, "One row per request, for questions of your own. Which prompts wait longest for their first token?"),
    (CODE, """requests = runs.requests().to_pandas()
requests["prompt"] = requests["input_tokens"].clip(upper=499) // 100 * 100
requests.pivot_table("ttft_ms", index="prompt", columns="policy", aggfunc="median").round(0)"""),
    (TEXT, """## Is the difference real?

Seven plans, each run under both policies, and a paired test:"""),
    (CODE, """repeated = eb.run(
    "sharegpt", policies=["v1", "ebplus"], device="rtx-pro-6000", source="profile",
    num_prompts=1000, max_concurrency=256, repeats=7,
)
eb.compare(repeated)"""),
    (TEXT, """## How much does it carry?

The highest rate at which 95 % of the requests meet both limits, roughly (`precision`, `max_probes`):"""),
    (CODE, """carried = eb.capacity(
    "balanced", goodput="ttft:500 tpot:50", device="rtx-pro-6000", max_num_seqs=64,
    policies=["v1"], num_prompts=300, precision=0.1, max_probes=8,
)
carried"""),
    (CODE, 'carried.to_pandas()[["policy", "capacity_requests_per_s", "low", "high", "limited_by"]]'),
    (TEXT, """## How many GPUs do I need?

The deployments that serve a rate within the limits, cheapest first:"""),
    (CODE, """needed = eb.plan(
    "balanced", request_rate=40, goodput="ttft:500 tpot:50", device=["h200", "rtx-pro-6000"], tp=[1, 2],
    policies=["v1"], workers=1,
)
needed"""),
    (TEXT, """## Errors say what to do

Ctrl-C, or the notebook's stop button, keeps what was measured and says where."""),
    (CODE, """try:
    eb.run("sharegpt", polcies=["v1"])
except eb.UsageError as error:
    print(error)"""),
    (CODE, """try:
    eb.run("sharegpt", engine="http://127.0.0.1:9", ready_timeout_s=0)
except eb.RunError as error:
    print(error)"""),
)  # fmt: skip


def blank() -> Any:
    """The notebook without outputs. Its cells are numbered, so that making it again changes only what changed."""
    make = {TEXT: nbformat.v4.new_markdown_cell, CODE: nbformat.v4.new_code_cell}
    notebook = nbformat.v4.new_notebook(cells=[make[kind](source) for kind, source in CELLS])
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


def execute(notebook: Any) -> Any:
    """Run all cells in an empty directory with this interpreter. Raises nbclient's CellExecutionError."""
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the kernel would print a warning about frozen modules
    with tempfile.TemporaryDirectory() as directory:
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": directory}}
        )
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
    return notebook


if __name__ == "__main__":
    made = execute(blank())
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {NOTEBOOK} ({NOTEBOOK.stat().st_size / 1e3:.0f} kB)", file=sys.stderr)
