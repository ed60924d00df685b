"""Writes the report on the policy matrix from its stored outcomes.

python -m tests.benchmarks.policy_report [--results reports/policies.json] [--output reports/policies.md]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.benchmarks.bench_policies import RESULTS
from tests.benchmarks.policy_bounds import BOUNDS
from tests.benchmarks.policy_cells import (
    BUDGETS,
    FOUR_GPU_TARGETS,
    MARGINAL,
    OWN,
    POLICIES,
    POOLS,
    SHORTEST,
    SLO,
    TARGETS,
    TPOT_S,
    TTFT_S,
    four_gpu_settings,
    settings,
)
from tests.benchmarks.policy_plot import draw
from tests.benchmarks.policy_results import Outcomes, Results, best, rivals

NOTHING = 0.01
"""Below this gain over v1 by any policy, the choice does not matter."""
NEAR, POINTS = 0.005, 0.02
"""Asked of marginal: throughput within this share of the best rival; attainment within this of the best rival."""
TRACES = ("AzureLLMInference", "mooncake")
Bounds = Mapping[str, float]


def _rows() -> list[str]:
    return [setting.name for setting in settings(None)] + list(TRACES)


def _label(name: str) -> str:
    """A short name for tables."""
    short = {SLO: "marginal, targets", "cadence:every=32,escape=off": "cadence, no escape"}
    return short.get(name, name.replace("v1:budget=", "budget ").replace(":iters=32,ratio=0.5", "")
                     .replace(":tpot=0.1", "").replace(",order=shortest", " shortest")
                     .replace(":order=shortest", " shortest"))  # fmt: skip


def gain(found: Outcomes, name: str) -> float:
    """Relative gain in throughput over v1."""
    return found[name].tokens_per_s / found["v1"].tokens_per_s - 1.0


def _grid(rows: Sequence[str], columns: Sequence[str], entries: Mapping[tuple[str, str], str]) -> list[str]:
    lines = ["| setting | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for row in rows:
        if any((row, column) in entries for column in columns):
            lines.append(f"| {row} | " + " | ".join(entries.get((row, column), "–") for column in columns) + " |")
    return lines


def _throughput_entry(found: Outcomes, names: Sequence[str]) -> str:
    """The best policy with its gain, and the best of the other side: this project's policies or their rivals."""
    top = best(found, "tokens_per_s", names)
    if gain(found, top) < NOTHING:
        return "nothing matters"
    entry = f"**{_label(top)}** {100 * gain(found, top):+.1f} %"
    others = rivals(found) if top in OWN else [MARGINAL, SHORTEST]
    second = best(found, "tokens_per_s", others)
    return f"{entry}; {_label(second)} {100 * gain(found, second):+.1f} %"


def front(results: Results, prefix: str, columns: Sequence[tuple[str, str]], rows: Sequence[str]) -> list[str]:
    """Which policy is best where, without and with targets."""
    titles = [f"{model}, {device}" for device, model in columns]
    rate: dict[tuple[str, str], str] = {}
    share: dict[tuple[str, str], str] = {}
    cells = dict(results.cells())
    for title, (device, model) in zip(titles, columns, strict=True):
        for row in rows:
            found = cells.get(f"{prefix}{device} {model} {row}")
            if found is None:
                continue
            names = [name for name in found if name not in POOLS]
            rate[row, title] = _throughput_entry(found, names)
            top = best(found, "attained", names)
            if found[top].attained - found["v1"].attained < POINTS:
                share[row, title] = f"nothing matters ({found['v1'].attained:.0%})"
            else:
                share[row, title] = (
                    f"**{_label(top)}** {found[top].attained:.0%}; v1 {found['v1'].attained:.0%}"
                    f"{'' if top == SLO else f', marginal with targets {found[SLO].attained:.0%}'}"
                )
    return [
        "Throughput, gain over v1: the best policy, then the best rival of `marginal` (or `marginal`, where a rival is "
        "best). Where no policy gains 1 %, nothing matters.", "", *_grid(rows, titles, rate), "",
        f"Share of requests within TTFT {TTFT_S:g} s and TPOT {1e3 * TPOT_S:g} ms. Where no policy gains 2 points over "
        "v1, nothing matters.", "", *_grid(rows, titles, share),
    ]  # fmt: skip


def scores(cells: Sequence[tuple[str, Outcomes]]) -> list[str]:
    """One row per policy over all cells."""
    lines = [
        "| policy | mean gain over v1 | worst cell | within 0.5 % of the best policy | mean attainment "
        "| within 2 points of the best | simulated requests per CPU s, median |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    top = [max(found[name].tokens_per_s for name in found if name not in POOLS) for _, found in cells]
    kept = [max(found[name].attained for name in found if name not in POOLS) for _, found in cells]
    for name in POLICIES:
        gains = np.array([gain(found, name) for _, found in cells])
        near = np.mean(
            [found[name].tokens_per_s >= (1 - NEAR) * most for (_, found), most in zip(cells, top, strict=True)]
        )
        shares = np.array([found[name].attained for _, found in cells])
        close = np.mean(shares >= np.array(kept) - POINTS)
        speed = np.median([found[name].simulated_per_s for _, found in cells])
        worst = int(gains.argmin())
        lines.append(
            f"| `{name}` | {gains.mean():+.1%} | {gains[worst]:+.1%} ({cells[worst][0]}) | {near:.0%} "
            f"| {shares.mean():.0%} | {close:.0%} | {speed:,.0f} |"
        )
    return lines


def tuned(cells: Sequence[tuple[str, Outcomes]]) -> str:
    """How much of the best policy's gain a tuned token budget alone gives."""
    matters = [found for _, found in cells if max(gain(found, name) for name in POLICIES) >= NOTHING]
    shares = [
        max(gain(found, name) for name in ("v1", *BUDGETS)) / max(gain(found, name) for name in POLICIES)
        for found in matters
    ]
    most = sum(share >= 0.5 for share in shares)
    return (
        f"In {len(matters)} of {len(cells)} cells some policy gains 1 % or more over v1. The best of the three token "
        f"budgets alone gives at least half of that gain in {most} of them, {np.mean(shares):.0%} of it on average."
    )


def against_rivals(results: Results, cells: Sequence[tuple[str, Outcomes]]) -> list[str]:
    """Cells in which marginal misses what is asked of it."""
    slower: list[str] = []
    later: list[str] = []
    fcfs = 0
    for cell, found in cells:
        others = rivals(found)
        rival = best(found, "tokens_per_s", others)
        own = best(found, "tokens_per_s", [MARGINAL, SHORTEST])
        lead, spread, count = results.lead(cell, own, rival)
        if lead < -NEAR:
            seeds = f"{count} seeds, ± {spread:.1%}" if count > 1 else "one seed"
            slower.append(f"| {cell} | {_label(rival)} | {lead:+.1%} ({seeds}) | {_label(own)} |")
        in_order = [name for name in others if "order=" not in name]
        fcfs += found[MARGINAL].tokens_per_s >= (1 - NEAR) * max(found[name].tokens_per_s for name in in_order)
        rival = best(found, "attained", others)
        if found[SLO].attained < found[rival].attained - POINTS:
            later.append(f"| {cell} | {_label(rival)} {found[rival].attained:.0%} | {found[SLO].attained:.0%} |")
    return [
        f"Throughput: `marginal`, with the order it does best with, is within 0.5 % of the best rival in "
        f"{len(cells) - len(slower)} of {len(cells)} cells; in order of arrival, against rivals in order of arrival, "
        f"in {fcfs}. The others:", "",
        "| cell | best rival | marginal against it | its order |", "|---|---|---:|---|", *slower, "",
        f"With targets: `{SLO}` is the best or within 2 points in {len(cells) - len(later)} of {len(cells)} cells."
        + (" The others:" if later else ""), "",
        *(["| cell | best rival | marginal with targets |", "|---|---:|---:|", *later] if later else []),
    ]  # fmt: skip


def gaps(cells: Sequence[tuple[str, Outcomes]], bounds: Mapping[str, Mapping[str, object]]) -> list[str]:
    """How far the best policy is from the bound, per cell."""
    entries: dict[tuple[str, str], str] = {}
    found_gaps = []
    for cell, found in cells:
        if cell not in bounds:
            continue
        limit, reason = float(str(bounds[cell]["tokens_per_s"])), str(bounds[cell]["reason"])
        rate = max(found[name].tokens_per_s for name in found)
        found_gaps.append(1 - rate / limit)
        device, model, row = cell.removeprefix("4 x ").split(" ", 2)
        prefix = "4 x " if cell.startswith("4 x ") else ""
        entries[prefix + row, f"{model}, {device}"] = f"{1 - rate / limit:.1%} ({reason})"
    rows = _rows() + [f"4 x {setting.name}" for setting in four_gpu_settings()]
    columns = [f"{model}, {device}" for device, model in TARGETS]
    if not found_gaps:
        return ["Not computed."]
    return [
        f"The best policy is {np.median(found_gaps):.0%} below the bound in the median cell, {np.max(found_gaps):.0%} "
        "at most.", "", *_grid(rows, columns, entries),
    ]  # fmt: skip


def table(cells: Sequence[tuple[str, Outcomes]], names: Sequence[str]) -> list[str]:
    """Throughput of v1, then each policy's difference to it; in brackets the attainment."""
    lines = [
        "| setting | v1 tokens/s | " + " | ".join(_label(name) for name in names) + " |",
        "|---|---:|" + "---:|" * len(names),
    ]
    for cell, found in cells:
        base = found["v1"]
        row = [f"{base.tokens_per_s:,.0f} ({base.attained:.0%})"]
        row += [f"{gain(found, name):+.1%} ({found[name].attained:.0%})" if name in found else "–" for name in names]
        lines.append(f"| {cell} | " + " | ".join(row) + " |")
    return lines


def report(results: Results, bounds: Mapping[str, Mapping[str, object]], plot: str) -> str:
    """The whole report, in Markdown."""
    order = [f"{d} {m} {row}" for d, m in TARGETS for row in _rows()]
    order += [f"4 x {d} {m} {setting.name}" for d, m in FOUR_GPU_TARGETS for setting in four_gpu_settings()]
    cells = sorted(results.cells(), key=lambda cell: order.index(cell[0]))
    single = [cell for cell in cells if not cell[0].startswith("4 x ")]
    lines = [
        "# Policies over the matrix",
        "",
        "Simulated, on models of devices. `python -m tests.benchmarks.bench_policies --traces FOLDER`, then "
        "`python -m tests.benchmarks.policy_bounds --traces FOLDER` and `python -m tests.benchmarks.policy_report` "
        "make this file, and keep what is stored (`--results` and `--output` name new files). "
        "Tokens/s count input and output over the whole run. Every policy of a cell got the same plan "
        "(seed 0; two more seeds for the contenders where the lead is under 1 %). What the policies do: "
        "docs/rivals.md; what was tried and what falls short: policies-findings.md; how far to trust the devices: "
        "reports/fidelity.",
        "",
        "## Which policy is best where",
        "",
        *front(results, "", TARGETS, _rows()),
        "",
        f"![Gain over v1 by setting, one panel per device and model]({plot})",
        "",
        "## Four GPUs (settings of the EB paper's table 20)",
        "",
        *front(results, "4 x ", FOUR_GPU_TARGETS, [setting.name for setting in four_gpu_settings()]),
        "",
        "## Every policy over all cells",
        "",
        *scores(cells),
        "",
        tuned(cells),
        "",
        "## Marginal against the best rival",
        "",
        *against_rivals(results, cells),
        "",
        "## Distance to a bound that no scheduler passes",
        "",
        *gaps(cells, bounds),
    ]
    names = POLICIES[1:]
    for device, model in TARGETS:
        rows = [(c.removeprefix(f"{device} {model} "), f) for c, f in single if c.startswith(f"{device} {model} ")]
        lines += ["", f"## {model} on {device}", "", *table(rows, names)]
    for device, model in FOUR_GPU_TARGETS:
        start = f"4 x {device} {model} "
        rows = [(c.removeprefix(start), f) for c, f in cells if c.startswith(start)]
        lines += ["", f"## {model} on four {device}", "", *table(rows, [*names, *POOLS])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the report and its plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--bounds", type=Path, default=BOUNDS)
    parser.add_argument("--output", type=Path, default=Path("reports/policies.md"))
    arguments = parser.parse_args()
    results = Results(arguments.results)
    bounds = json.loads(arguments.bounds.read_text()) if arguments.bounds.is_file() else {}
    stem = arguments.output.parent / "figures" / "policies"
    draw(dict(results.cells()), TARGETS, _rows(), stem)
    arguments.output.write_text(report(results, bounds, "figures/policies.svg"))


if __name__ == "__main__":
    main()
