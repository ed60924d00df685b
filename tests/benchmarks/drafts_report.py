"""Writes the report on batching disciplines with speculative decoding.

python -m tests.benchmarks.drafts_report [--output reports/drafts.md] [--prompts 400]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

from ebbench.devices.base import SINGLE, Parallel
from ebbench.devices.loader import load_device
from ebbench.engines.sim import SimEngine
from ebbench.records.plan import Plan
from ebbench.render import figures
from ebbench.render.palette import policy_colours
from ebbench.spec.server import EngineOptions, parse_speculative, published_acceptance
from ebbench.workloads import build_plan
from vllm_eb.policy import parse_policy
from vllm_eb.theory import NO_DRAFTS, Drafts, crossover, optimal_threshold


@dataclass(frozen=True)
class Server:
    """What the cells run on. ``drafters``: names of published acceptance (ebbench/spec/acceptance.toml), and the
    numbers of drafted tokens simulated with it. ``method``: vLLM's name."""

    gpu: str
    model: str
    method: str
    drafters: Mapping[str, tuple[int, ...]] = field(hash=False)
    parallel: Parallel = SINGLE

    @property
    def name(self) -> str:
        """As in the tables."""
        if self.parallel.single:
            return self.gpu
        experts = f" ep={self.parallel.ep}" if self.parallel.ep > 1 else ""
        return f"{Path(self.model).stem} on {self.gpu} tp={self.parallel.tp}{experts}"


DEEPSEEK, QWEN = (str(Path(__file__).with_name(name)) for name in ("deepseek-v3.json", "qwen3.5-397b-a17b.json"))
_HEADS = {"minimax-m3-eagle3": (1, 3, 5), "qwen3-30b-a3b-eagle3": (5,)}
_MTP = {"deepseek-v3-mtp": (1,), "deepseek-v4-pro-mtp": (3,)}
_QWEN_MTP = {"qwen3.5-397b-a17b-mtp": (1, 3, 5)}
SERVERS = (
    *(Server(gpu, "qwen3-8b", "eagle3", _HEADS) for gpu in ("rtx-pro-6000", "l40s", "h200", "b300")),
    Server("h200", DEEPSEEK, "mtp", _MTP, Parallel(tp=8)),
    Server("b200", DEEPSEEK, "mtp", _MTP, Parallel(tp=8, ep=8)),
    Server("h200", QWEN, "mtp", _QWEN_MTP, Parallel(tp=8)),
    Server("b200", QWEN, "mtp", _QWEN_MTP, Parallel(tp=8, ep=8)),
)
"""DeepSeek-V3 with its own MTP layer: one drafted token with its published acceptance, three with that of its
successor, for which alone so many are published. Qwen3.5 with its own: three of four layers keep a recurrent state."""
WORKLOADS = ("balanced", "sharegpt", "prefill-heavy", "decode-heavy")
ADAPTIVE = "marginal:draft=adaptive"
POLICIES = ("v1", "eb", "ebplus", "marginal", ADAPTIVE)
SEQS = 128
WIDTH = 120
MODEL = """Steps with drafts are modelled, not measured: [emulator](../docs/emulator.md#speculative-decoding). In that
model a decode with drafts uses the attention kernel of mixed batches in any step, so mixing prompts in costs no more;
a kernel that verifies at the price of a pure decode would leave exclusive batches more to gain."""
SECOND_HEAD = "qwen3-30b-a3b-eagle3"
"""Left out of the plot, which has one curve per policy."""
ABOUT = """qwen3-8b on four GPUs without drafts, with 1, 3 and 5 drafted tokens and the acceptance published for
MiniMax-M3's EAGLE-3 head (0.78, 0.60, 0.45, 0.28, 0.24), and with 5 and that for Qwen3-30B-A3B's (0.59, 0.30, 0.15,
0.08, 0.04); DeepSeek-V3 in FP8 on eight H200 (tp = 8) and eight B200 (tp = 8, experts over all eight) with its own
MTP layer: 1 drafted token at its published acceptance (0.85), 3 at that of DeepSeek-V4-Pro's (0.79, 0.48, 0.22),
since for V3 only the first is published; Qwen3.5-397B-A17B in FP8 on the same servers with its own MTP layer, with 1,
3 and 5 and its published acceptance (0.93, 0.80, 0.66, 0.58, 0.44); three of four of its layers keep a recurrent
state, and one more per drafted token (sources: ebbench/spec/acceptance.toml). Latent attention, recurrent layers and
the experts of both are priced by the extra ebbench[tables]."""
BY_DRAFTS = f"""Output tokens/s of v1 over those without drafts, then gain over v1 with the same drafts, mean over the
cells and, in brackets, the number of cells in which a policy is more than 1 % ahead of v1. Adaptive: `{ADAPTIVE}`;
eq. 8: cells in which the theory prefers exclusive batches:"""
BY_CELL = """By cell: tokens/s of v1, gains of the others, and the advantage of exclusive batches by equation 8 in us
per computed token (positive: exclusive). *: the number of drafted tokens with which v1 is fastest."""
ABOUT_ADAPTIVE = """`marginal:draft=adaptive` compares steps of decodes alone. Where mixed batches are as fast as
here, drafts beside prompts cost less than that: on the L40S, whose mixed attention is slow, it drafts too little with 1
and 3 tokens. Where a server drafts more than its acceptance pays for, it gains most. For DeepSeek-V3 and Qwen3.5 with
128 sequences on eight GPUs steps load weights, so drafts pay in any batch, and refills on their own cost more than they
save. Without drafts equation 8 prefers exclusive batches in all Qwen3.5 cells, where they lose: it takes decode steps
for a straight line, 23.6 ms with 128 sequences on the H200, but they take 28.2, since more sequences load more
experts."""
NOTHING = 0.01
"""Gains below this share are called equal."""


@dataclass(frozen=True)
class Cell:
    """Output tokens/s by policy of one workload on one server. ``advantage_us``: of exclusive batches by eq. 8."""

    server: Server
    workload: str
    drafter: str
    drafts: int
    tokens_per_s: dict[str, float]
    advantage_us: float

    def gain(self, policy: str) -> float:
        """Relative gain over v1."""
        return self.tokens_per_s.get(policy, self.tokens_per_s["marginal"]) / self.tokens_per_s["v1"] - 1.0


def drafting(server: Server) -> Iterator[tuple[str, int]]:
    """The drafters and numbers of drafted tokens; the cells without drafts come once."""
    yield "", 0
    for drafter, lengths in server.drafters.items():
        yield from ((drafter, tokens) for tokens in lengths)


def cells(prompts: int, servers: Sequence[Server] = SERVERS) -> Iterator[Cell]:
    """All cells, each simulated under every policy on the same plan."""
    for server in servers:
        for workload in WORKLOADS:
            plan = build_plan(workload, num_prompts=prompts, max_concurrency=3 * SEQS // 2, source="profile")
            for drafter, tokens in drafting(server):
                yield _cell(server, workload, plan, drafter, tokens)


def _cell(server: Server, workload: str, plan: Plan, drafter: str, tokens: int) -> Cell:
    rates = ",".join(map(str, published_acceptance()[drafter][:tokens])) if tokens else ""
    text = f"method={server.method},acceptance={rates}" if tokens else None
    speculative = parse_speculative(text) if text else None
    device = load_device(server.gpu, server.model, parallel=server.parallel, speculative=speculative)
    options = EngineOptions(max_num_seqs=SEQS, speculative=text)
    speeds = {}
    for policy in POLICIES if tokens else POLICIES[:-1]:
        requests = SimEngine(figures_only=True).run(plan, parse_policy(policy), device, options).requests
        span_s = float(requests["end_ns"].to_numpy().max()) / 1e9
        speeds[policy] = float(requests["output_tokens"].to_numpy().sum()) / span_s
    drafts = NO_DRAFTS if speculative is None else Drafts(speculative.acceptance)
    mu_l, mu_o = (float(plan.table[f"{side}_tokens"].to_numpy().mean()) for side in ("input", "output"))
    costs = device.calibration
    theta0 = optimal_threshold(min(1.0 / mu_o, 1.0), costs.alpha_p, costs.alpha_d, drafts=drafts).theta0
    sides = crossover(costs, mu_l=mu_l, mu_o=mu_o, n_obs=SEQS, theta0=theta0, drafts=drafts)
    return Cell(server, workload, drafter, tokens, speeds, 1e6 * sides.advantage)


def report(found: list[Cell], prompts: int) -> str:
    """The page."""
    plain = {(cell.server, cell.workload): cell.tokens_per_s["v1"] for cell in found if not cell.drafts}
    lines = [
        "# Batching disciplines with speculative decoding",
        "",
        fill(
            f"{len(found)} cells: {len(WORKLOADS)} workloads, saturated, N = {SEQS}, {prompts} requests. {ABOUT}", WIDTH
        ),
        "",
        "```bash",
        f"python -m tests.benchmarks.drafts_report --prompts {prompts}",
        "```",
        "",
        fill(MODEL, WIDTH),
        "",
        "![Output tokens/s over v1 without drafts, by drafted tokens and policy](drafts.svg)",
        "",
        fill(BY_DRAFTS, WIDTH),
        "",
        "| model | acceptance of | drafted | v1 | eb | ebplus | marginal | adaptive | eq. 8 |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    groups = dict.fromkeys((Path(cell.server.model).stem, cell.drafter, cell.drafts) for cell in found)
    for model, drafter, tokens in groups:
        own = [c for c in found if (Path(c.server.model).stem, c.drafter, c.drafts) == (model, drafter, tokens)]
        speedup = sum(cell.tokens_per_s["v1"] / plain[cell.server, cell.workload] for cell in own) / len(own)
        gains = [f"{100 * _mean(own, p):+.1f} % ({sum(c.gain(p) > NOTHING for c in own)})" for p in POLICIES[1:]]
        exclusive = f"{sum(cell.advantage_us > 0 for cell in own)} of {len(own)}"
        lines.append(f"| {model} | {drafter or '-'} | {tokens} | {speedup:.2f} | {' | '.join(gains)} | {exclusive} |")
    lines += [
        "",
        fill(ABOUT_ADAPTIVE, WIDTH),
        "",
        fill(BY_CELL, WIDTH),
        "",
        "| server | workload | acceptance of | drafted | v1 tok/s | eb | ebplus | marginal | adaptive | eq. 8 |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(_row(cell, found) for cell in found)]) + "\n"


def _row(cell: Cell, found: list[Cell]) -> str:
    group = [other for other in found if (other.server, other.workload) == (cell.server, cell.workload)]
    mark = " *" if cell is max(group, key=lambda other: other.tokens_per_s["v1"]) else ""
    gains = " | ".join(f"{100 * cell.gain(policy):+.1f} %" for policy in POLICIES[1:])
    speed = f"{cell.tokens_per_s['v1']:,.0f}"
    return (
        f"| {cell.server.name} | {cell.workload} | {cell.drafter or '-'} | {cell.drafts}{mark} | {speed} | {gains} | "
        f"{cell.advantage_us:+.2f} |"
    )


def _mean(own: list[Cell], policy: str) -> float:
    return sum(cell.gain(policy) for cell in own) / len(own)


def draw(found: list[Cell], stem: Path) -> None:
    """Output tokens/s over those of v1 without drafts, by drafted tokens, one panel per server and workload."""
    plain = {(cell.server, cell.workload): cell.tokens_per_s["v1"] for cell in found if not cell.drafts}
    points = [
        {
            "server": cell.server.name,
            "workload": cell.workload,
            "drafted": cell.drafts,
            "series": policy,
            "over": speed / plain[cell.server, cell.workload],
        }
        for cell in found
        if cell.drafter != SECOND_HEAD
        for policy, speed in cell.tokens_per_s.items()
    ]
    servers, two_lines = list(dict.fromkeys(cell.server.name for cell in found)), "split(datum.label, ' on ')"
    alt, names = figures.altair(), list(POLICIES)
    chart = (
        alt.Chart(figures.values(points))
        .mark_line(point=True)
        .encode(
            x=alt.X("drafted:O", title="drafted tokens", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("over:Q", title="tokens/s, v1 = 1", scale=alt.Scale(zero=False)),
            color=figures.colour(names, policy_colours(names)),
        )
        .properties(width=150, height=120)
        .facet(
            row=alt.Row("server:N", title=None, sort=servers, header=alt.Header(labelExpr=two_lines)),
            column=alt.Column("workload:N", title=None),
        )
    )
    figures.save(chart, stem, ("svg",))


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
        print(cell.server.name, cell.workload, cell.drafts, f"{cell.tokens_per_s['v1']:.0f} tok/s", gains, flush=True)
    given.output.write_text(report(found, given.prompts), encoding="utf-8")
    draw(found, given.output.with_suffix(""))


if __name__ == "__main__":
    main()
