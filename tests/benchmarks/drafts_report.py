"""Writes the report on batching disciplines with speculative decoding.

python -m tests.benchmarks.drafts_report [--output reports/drafts.md] [--prompts 400]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.spec.server import EngineOptions, speculative_of
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy
from vllm_eb.theory import NO_DRAFTS, Drafts, crossover, optimal_threshold

GPUS = ("rtx-pro-6000", "l40s", "h200", "b300")
WORKLOADS = ("balanced", "sharegpt", "prefill-heavy", "decode-heavy")
LENGTHS = (0, 1, 3, 5)
POLICIES = ("v1", "eb", "ebplus", "marginal")
RATE = 0.7
"""Each drafted token is accepted so often, given those before it."""
SEQS = 128
WIDTH = 120
MODEL = """Steps with drafts are modelled, not measured: [emulator](../docs/emulator.md#speculative-decoding). In that
model a decode with drafts uses the attention kernel of mixed batches in any step, so mixing prompts in costs no more;
a kernel that verifies at the price of a pure decode would leave exclusive batches more to gain."""
BY_CELL = """By cell: tokens/s of v1, gains of the others, and the advantage of exclusive batches by equation 8 in us
per computed token (positive: exclusive). *: the number of drafted tokens with which v1 is fastest."""
NOTHING = 0.01
"""Gains below this share are called equal."""


@dataclass(frozen=True)
class Cell:
    """Output tokens/s by policy of one workload on one GPU. ``advantage_us``: of exclusive batches by eq. 8."""

    gpu: str
    workload: str
    drafts: int
    tokens_per_s: dict[str, float]
    advantage_us: float

    def gain(self, policy: str) -> float:
        """Relative gain over v1."""
        return self.tokens_per_s[policy] / self.tokens_per_s["v1"] - 1.0


def cells(prompts: int) -> Iterator[Cell]:
    """All cells, each simulated under every policy on the same plan."""
    for gpu in GPUS:
        for workload in WORKLOADS:
            plan = build_plan(workload, num_prompts=prompts, max_concurrency=3 * SEQS // 2, source="profile")
            for tokens in LENGTHS:
                text = f"method=eagle3,tokens={tokens},acceptance={RATE}" if tokens else None
                speculative = speculative_of(text) if text else None
                device = load_device(gpu, "qwen3-8b", speculative=speculative)
                options = EngineOptions(max_num_seqs=SEQS, speculative=text)
                speeds = {}
                for policy in POLICIES:
                    requests = SimEngine(figures_only=True).run(plan, parse_policy(policy), device, options).requests
                    span_s = float(requests["end_ns"].to_numpy().max()) / 1e9
                    speeds[policy] = float(requests["output_tokens"].to_numpy().sum()) / span_s
                drafts = NO_DRAFTS if speculative is None else Drafts(speculative.acceptance)
                mu_l, mu_o = (float(plan.table[f"{side}_tokens"].to_numpy().mean()) for side in ("input", "output"))
                costs = device.calibration
                theta0 = optimal_threshold(min(1.0 / mu_o, 1.0), costs.alpha_p, costs.alpha_d, drafts=drafts).theta0
                sides = crossover(costs, mu_l=mu_l, mu_o=mu_o, n_obs=SEQS, theta0=theta0, drafts=drafts)
                yield Cell(gpu, workload, tokens, speeds, 1e6 * sides.advantage)


def report(found: list[Cell], prompts: int) -> str:
    """The page."""
    alike = {tokens: _mean(found, tokens) for tokens in LENGTHS}
    lines = [
        "# Batching disciplines with speculative decoding",
        "",
        fill(
            f"{len(found)} cells: {len(WORKLOADS)} workloads on {len(GPUS)} GPUs with 0, 1, 3 and 5 drafted tokens "
            f"(EAGLE-3; qwen3-8b; each drafted token accepted with probability {RATE:g} given those before it), "
            f"saturated, N = {SEQS}, {prompts} requests.",
            WIDTH,
        ),
        "",
        "```bash",
        f"python -m tests.benchmarks.drafts_report --prompts {prompts}",
        "```",
        "",
        fill(MODEL, WIDTH),
        "",
        fill(
            "Gain in output tokens/s over v1 with the same drafts, mean over the cells and, in brackets, the number of "
            f"cells in which a policy is more than {NOTHING:.0%} ahead of v1:",
            WIDTH,
        ),
        "",
        "| drafted | tok/s of v1 over that without drafts | eb | ebplus | marginal |",
        "|---:|---:|---:|---:|---:|",
    ]
    plain = {(cell.gpu, cell.workload): cell.tokens_per_s["v1"] for cell in found if not cell.drafts}
    for tokens in LENGTHS:
        own = [cell for cell in found if cell.drafts == tokens]
        speedup = sum(cell.tokens_per_s["v1"] / plain[cell.gpu, cell.workload] for cell in own) / len(own)
        shown = [f"{100 * alike[tokens][p]:+.1f} % ({sum(c.gain(p) > NOTHING for c in own)})" for p in POLICIES[1:]]
        lines.append(f"| {tokens} | {speedup:.2f} | {' | '.join(shown)} |")
    lines += [
        "",
        fill(BY_CELL, WIDTH),
        "",
        "| GPU | workload | drafted | v1 tok/s | eb | ebplus | marginal | eq. 8 |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in found:
        group = [c for c in found if (c.gpu, c.workload) == (cell.gpu, cell.workload)]
        best = max(group, key=lambda c: c.tokens_per_s["v1"])
        gains = " | ".join(f"{100 * cell.gain(policy):+.1f} %" for policy in POLICIES[1:])
        mark = " *" if cell is best else ""
        speed = f"{cell.tokens_per_s['v1']:,.0f}"
        lines.append(
            f"| {cell.gpu} | {cell.workload} | {cell.drafts}{mark} | {speed} | {gains} | {cell.advantage_us:+.2f} |"
        )
    return "\n".join(lines) + "\n"


def _mean(found: list[Cell], tokens: int) -> dict[str, float]:
    own = [cell for cell in found if cell.drafts == tokens]
    return {policy: sum(cell.gain(policy) for cell in own) / len(own) for policy in POLICIES}


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("reports/drafts.md"))
    parser.add_argument("--prompts", type=int, default=400)
    given = parser.parse_args()
    found = []
    for cell in cells(given.prompts):
        found.append(cell)
        gains = ", ".join(f"{policy} {100 * cell.gain(policy):+.1f} %" for policy in POLICIES[1:])
        print(cell.gpu, cell.workload, cell.drafts, f"{cell.tokens_per_s['v1']:.0f} tok/s", gains, flush=True)
    given.output.write_text(report(found, given.prompts), encoding="utf-8")


if __name__ == "__main__":
    main()
