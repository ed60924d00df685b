"""Every numbered table and figure of the three papers, and what they claim in numbers: where it is in ebbench.

What we saw is written by hand, from the committed reports; the tests check that no number is left out and that every
command exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ebbench.analysis.documents import Column, Section, Value, labels
from ebbench.papers.options import PaperOptions
from ebbench.papers.published import DEFERRED_PAPER, EB_PAPER
from ebbench.papers.staggered import STAGGERED_PAPER
from ebbench.papers.table import Content, PaperTable, no_cells
from ebbench.runs.store import RunStore

Paper = Literal["eb", "deferred", "staggered"]
Agreement = Literal["same", "same direction", "in part", "differs", "no numbers in print"]
PAPERS: Mapping[Paper, str] = {"eb": EB_PAPER, "deferred": DEFERRED_PAPER, "staggered": STAGGERED_PAPER}
AGREEMENTS: Mapping[Agreement, str] = {
    "same": "within about 10 %, or equal",
    "same direction": "the same winner or trend, by another amount",
    "in part": "some of its statements hold here, others do not",
    "differs": "another result; why is said",
    "no numbers in print": "a picture, or not legible in our copy: nothing to compare numbers with",
}


@dataclass(frozen=True)
class PaperItem:
    """One table, figure or claim. ``command``: arguments of ``ebbench``, empty if there is none.

    ``checked``: the day (ISO 8601) on which ours was last made or compared.
    """

    paper: Paper
    name: str
    shows: str
    command: str
    agreement: Agreement
    checked: str
    remark: str


_WED, _THU, _FRI = "2026-11-25", "2026-11-26", "2026-11-27"

_Row = tuple[str, str, str, Agreement, str, str]
"""What PaperItem has after the paper."""

_EB: tuple[_Row, ...] = (
    ("table 1", "bandwidth and arithmetic of four GPUs", "tables eb-table1", "in part", _FRI,
     "Bandwidths are equal. Printed TFLOPS are of three kinds: with sparsity (B300, H200), dense (L40S), half "
     "of dense (RTX PRO 6000)."),
    ("table 2", "requests/s on real workloads, two models and GPUs", "tables table2 --run", "same direction", _FRI,
     "EB over v1, mean of four workloads: 23.2 / 3.0 / 0.6 / -5.3 % (print 7.9 / 1.4 / 1.5 / -2.9). v0 is far "
     "faster here: the printed one is an older engine. WildChat is up to 54 % slower: its message lengths were "
     "not published. ShareGPT on H200 is 22 to 47 % faster without vLLM's API server, within 8 % with it (fidelity)."),
    ("table 3", "traffic levels and moving traffic", "tables table3 --run", "same direction", _FRI,
     "EB and EB+ over v1 have the printed sign and about the size; H200's distribution shift is a tie (print "
     "+3.9 % for EB+). Throughput within 8 %, but EB at c = 32 11 % low; TTFT and TPOT miss by up to 58 and 41 "
     "%, EB's TTFT at c = 32 fourfold to twelvefold. In print and here one shuffled mixture: `adaptation` has "
     "shifts inside a run."),
    ("table 4", "WildChat on L40S and B300: the headline of 41.9 %", "tables table4 --run", "differs", _FRI,
     "EB is 4 % behind v1 on L40S and 2 % on B300 (print: 41.9 and 3.7 % ahead): the headline is not reproduced. Mixed "
     "attention on L40S would have to cost more than eight times as much beyond its pure parts as on the RTX 4090. The "
     "printed L40S cells equal figure 4's prefill-heavy bars of the RTX PRO 6000."),
    ("table 5", "R² of linear prefill times, practical budgets", "tables table5", "same", _FRI,
     "Within 0.007 for six models; ranges of the rows assumed. Llama-3.2-1B has no device here."),
    ("table 6", "128K tokens in, 64 out", "tables table6 --run", "in part", _FRI,
     "tokens/s within 10 %; EB is level with v1 (-0.6 to +0.4 %), in print 1.4 to 4.0 % ahead."),
    ("table 7", "R² of linear prefill times, up to 128K", "tables table7", "same", _FRI,
     "Within 0.01 up to 64K tokens; steps of 128K lie beyond our step times."),
    ("table 8", "errors of the fluid approximation", "tables table8", "in part", _FRI,
     "Orders in N as printed; the size of the fluctuation is 12 to 68 % of one phase, not a few percent. It "
     "costs no throughput."),
    ("table 9", "lengths of the workloads, IFR", "tables table9", "same", _FRI,
     "By construction: length profiles were fitted to it, so their IFR tests nothing. WildChat's printed mean "
     "is before its cut. The data sets themselves: --source hub, or file:PATH."),
    ("table 10", "best theta over output length and N", "tables table10 --run", "in part", _FRI,
     "P1 and P3 hold, row means of 0.49 to 0.25 (print 0.46 to 0.23), only with alpha_p = 0.14 s, a hundred times the "
     "printed value on H200; with the device's own costs theta is 0.06."),
    ("table 11", "throughput over k and prompt length", "tables table11 --run", "in part", _FRI,
     "With alpha_p = 0.14 s, fitted on it, within 15 % from k = 24 on, as flat, and best at k = 72 (print 56 to 80); "
     "the device's own costs give up to four times the throughput and k = 8. Prompt lengths are not legible here."),
    ("table 12", "trend tests of the hazard", "tables table12", "no numbers in print", _FRI,
     "p-values are not legible. Both tests find a rising hazard here too, but on samples of gammas whose shape "
     "follows from table 9: that shows nothing of the data sets. --source hub or file:PATH tests those."),
    ("table 13", "sensitivity to theta", "tables table13 --run", "in part", _FRI,
     "The controller is at 97 and 98 % of peak (print 98 and 98), but the best theta is 0.1 (print 0.7 and 0.6); with "
     "alpha_p = 0.14 s it is 0.2 and 0.4, and the controller at 94 and 89 %: the IFR correction goes too far "
     "(correction=renewal: 100 %)."),
    ("table 14", "best B and N, sensitivity, RTX PRO 6000", "tables table14 --run", "in part", _WED,
     "Means of CV over the settings agree: v0 7.2, v1 6.2, EB 6.8 % (print 5.9, 5.8, 6.9, Gemma included), from our "
     "grid of 1,440 runs (reports/sweeps). The best B and N lie on a flat top: B is the printed one in 1 of 24 "
     "settings, N in 9."),
    ("table 15", "best B and N, sensitivity, H200", "tables table15 --run", "in part", _WED,
     "As table 14: v0 8.1, v1 6.5, EB 6.6 % (print 6.5, 6.3, 7.4); B is the printed one in 4 of 24 settings, N in 3."),
    ("table 16", "best B and N of the synthetic workloads", "tables table16 --run", "in part", _WED,
     "As table 14; figure 4 runs at the printed B and N, whose results agree."),
    ("table 17", "Gemma-3-1B-IT", "tables table17 --run", "differs", _FRI,
     "requests/s within 12 % on ShareGPT, 14 to 36 % high on LongBench, a third to a half on NuminaMath, whose "
     "printed rates do not fit answers of 4,000 tokens. vLLM's API server limits all schedulers on these two, so EB's "
     "lead of 3.9 to 10.6 % is missing; on WildChat, RTX PRO 6000, EB leads by 58 % (print 5)."),
    ("table 18", "requests in TTFT and TPOT limits", "tables table18 --run", "same direction", _FRI,
     "EB+ 75.6, EB 61.4, v1 4.9 % (print 80.3, 77.3, 5.8). Most limits are not legible and assumed."),
    ("table 19", "two GPUs against 1P+1D", "tables table19 --run", "in part", _FRI,
     "RTX PRO 6000 within 8.5 % and EB+ 14 % ahead of v1 at c = 2048 (print 23); H200 -23 to +20 %. 1P+1D runs out of "
     "memory at c = 512 on RTX PRO 6000 already, and on H200 not at all."),
    ("table 20", "four GPUs against three splits", "tables table20 --run", "same", _FRI,
     "Throughput within 4 % in the median (17 % at most), every out-of-memory cell as printed; TTFT 30 to 45 % "
     "low."),
    ("figure 1", "marginal cost over the decode share", "figures figure1", "same direction", _FRI,
     "Crossover late on H200, early on RTX PRO 6000 as printed. The 127 published step times name a GPU that "
     "their slope contradicts."),
    ("figure 2", "kernels of a step over the decode share", "figures figure2", "same direction", _FRI,
     "Matrix products level, attention grows with the decode share. Of 30 published attention calls a GPU, "
     "decodes are within 7 %, mixed ones take 0.9 to 1.5 (RTX PRO 6000) and 0.4 to 1.1 times (H200) as long."),
    ("figure 3", "fixed k against the controller, H200", "figures figure3 --run", "same", _FRI,
     "Throughput within 7 % in the median and every direction right; TPOT 43 % off (points read off a chart)."),
    ("figure 4", "synthetic workloads", "figures figure4 --run", "same", _FRI,
     "2.7 % (RTX PRO 6000) and 5.1 % (H200) off in the median; all directions right on RTX PRO 6000."),
    ("figure 5", "TTFT and TPOT on real workloads", "figures figure5 --run", "same direction", _FRI,
     "Medians of the errors 9 to 23 %."),
    ("figure 6", "four more models on WildChat", "figures figure6 --run", "same direction", _FRI,
     "EB 43 to 92 % more requests/s than v1 (print 8 to 17), TPOT 35 to 50 % less (print 17 to 47); v1 is 48 to 60 % "
     "and EB 15 to 47 % below print. WildChat's message lengths were not published, and the authors' client gave "
     "requests up after 120 s."),
    ("figure 7", "prefill time curves and their R²", "figures figure7", "same", _FRI,
     "The numbers are those of tables 5 and 7."),
    ("figure 8", "step time of three more models", "figures figure8", "in part", _FRI,
     "Qwen models as printed; Gemma, without a crossover in print, crosses here at decode shares of 15 and 92 "
     "%."),
    ("figure 9", "kernels of three more models", "figures figure9", "no numbers in print", _FRI,
     "Matrix products do not depend on the composition, as the text says. Gemma's growing 'Other' is host "
     "work, outside our parts."),
    ("figure 10", "kernels by context length, H200", "figures figure10", "same direction", _FRI,
     "Matrix products do not depend on the context, attention carries the growth (two attention times are in "
     "print)."),
    ("figure 11", "output lengths and hazard", "figures figure11", "no numbers in print", _FRI,
     "Means of table 9 by construction. --source hub or file:PATH draws the data sets."),
    ("figure 12", "theta under constant and rising hazard", "figures figure12 --run", "no numbers in print", _FRI,
     "Best thetas are not legible. In print it moves up under a rising hazard; here, with alpha_p = 0.14 s, it is "
     "0.30, 0.33, 0.40 under a falling, constant and rising one, each on a flat top. With the device's own costs it "
     "stays at 0.1."),
    ("claims of 4.2", "the controller over the best fixed k: +8.0, +3.6, +0.6 %", "figures figure3 --run", "differs",
     _FRI,
     "Here -0.2, -0.8, -0.4 %: at the same N its thresholds are among those that were swept. The printed controller's "
     "p99 of TPOT on the decode-heavy mix fits uniform answers, with which ours is 13 % above the printed rate."),
    ("claims of 4.3.3", "EB's TTFT and TPOT against v1's on real workloads", "figures figure5 --run", "same direction",
     _FRI,
     "Qwen3-8B, TPOT on ShareGPT, WildChat, NuminaMath, RTX PRO 6000: -43, -35, -14 % (print -65, -35, -20); H200, "
     "WildChat and NuminaMath: -5, -5 % (print -36, -13). LongBench: lower TTFT and higher TPOT, as printed."),
    ("claims of 4.4", "EB+ within 1 % of the better of v1 and EB in both shifts", "tables table3 --run", "in part",
     _FRI,
     "-3.6, -0.7, 0.0, 0.0 % (print -0.7, -1.0, +2.0, +0.6); over v1 up to +32.7 % (print +36.4). At c = 32 its TTFT "
     "is v1's, as printed."),
    ("claims of F.4", "EB+ best or near-best in 7 of 9 settings, RTX PRO 6000", "tables table20 --run", "in part", _FRI,
     "Within 2 % of the best in 4 of 9 here, and by the printed figures in 4, too (5 within 5 %)."),
    ("kappa (A.3)", "convexity index of mixed batches", "tables kappa", "differs", _FRI,
     "Both values are not legible; both are called negative, the RTX PRO 6000's more so. That holds for our "
     "step times; the published costs of mixed batches that EB+ runs with curve the other way on both GPUs."),
    ("R² of the linear fits", "the authors' calibration files", "tables table5", "same", _FRI,
     "Its second part: within 0.005 for prefills of dense models, up to 0.05 for decodes and the mixture of "
     "experts."),
)  # fmt: skip

_DEFERRED: tuple[_Row, ...] = (
    ("table 1", "best K, throughput, normalised times", "tables deferred-1 --run", "in part", _FRI,
     "Throughput within 7 %, gain 13.5 and 14.4 % (print 13.5, 13.7), numeric K* within one: these determine "
     "the constants. LLaMA3's numeric throughput is 18 % below the printed, which does not fit its own K* and "
     "rates. Best K 26 and 168 (print 32, 75) on a flat top; times per token -12 to +18 %."),
    ("figure 1", "timing diagram", "", "no numbers in print", _FRI,
     "A drawing; its model is the exact chain of `ebbench theory`."),
    ("figure 2", "prefill time over the batch", "tables deferred-figure2", "no numbers in print", _FRI,
     "Affine by construction with the implied costs; our A100's R² is 1.000, at half the time per prompt."),
    ("figure 3", "time between tokens over the batch", "tables deferred-figure3", "no numbers in print", _FRI,
     "Affine by construction; our A100's R² is 0.99, with jumps as the text says. LLaMA3's implied line is "
     "near ours."),
    ("figure 4", "throughput over the batch limit C", "tables deferred-figure4 --run", "same direction", _FRI,
     "Rises with C as the text says; simulation and exact chain within 3 %."),
    ("figure 5", "Granite: throughput and completion time over K", "tables deferred-figure5 --run", "same direction",
     _FRI,
     "The curve rises to a flat top and falls; numbers in print are only those of the claims and table 1."),
    ("figure 6", "LLaMA3: throughput and completion time over K", "tables deferred-figure6 --run", "same direction",
     _FRI,
     "As figure 5, flatter."),
    ("figure 7", "normalised completion time over K", "tables deferred-figure7 --run", "in part", _FRI,
     "p95 over the mean at the published K: 1.2 and 1.3 for ShareGPT's spread, 1.5 and 1.9 for geometric "
     "answers. The text says within 1.5; its own table 1 has 1.6 for LLaMA3."),
    ("claims of throughput", "+13.5 % and +13.7 %", "tables deferred-figure5 --run", "same", _FRI,
     "+13.1 to +13.7 % at the published K, by construction; LLaMA3 with geometric answers +12.7 %."),
    ("claims of completion time", "-14 % and -17 %", "tables deferred-figure5 --run", "same", _FRI,
     "-14.0 and -14.9 % at the published K; Little's law gives -16 and -20 % from the published rates."),
)  # fmt: skip

_STAGGERED: tuple[_Row, ...] = (
    ("table 1", "chunk utilisation and QPS at a fixed TTFT", "tables sbs-table1 --run", "differs", _FRI,
     "To the letter +0.2 and +1.2 % QPS, ours +3.6 and +4.7 (print +22.8 and +12.9): immediate dispatch fills 97 % of "
     "the chunks here, 52 % in print, for which the paper gives no reason."),
    ("figure 1", "granularity of scheduling", "", "no numbers in print", _FRI,
     "A drawing without data."),
    ("figure 2", "dispatch and queueing", "tables sbs-waiting --run", "same", _FRI,
     "Waiting of T/2 against T/(2N), the text's formula, within 1 % for N = 1 to 32."),
    ("figure 3", "bubbles at the barrier", "", "no numbers in print", _FRI,
     "A drawing without data; chunk utilisation is in table 1."),
    ("figure 4", "bin-packing fills the bubbles", "tables sbs-ablation --run", "no numbers in print", _FRI,
     "A drawing; the ablation has the effect of the packing."),
    ("figure 5", "architecture", "", "no numbers in print", _FRI,
     "A drawing without data."),
    ("figure 6", "TTFT over the load", "tables sbs-figure6 --run", "in part", _FRI,
     "To the letter -5 and -7 % at 80 % of peak (print: up to -40 % below 80 %), above immediate dispatch at 20 to "
     "50 % with prompts of 3K-64K; sbs (ours) -38 and -43 %, lower at every load."),
    ("figure 7", "spread of KV over decode units", "tables sbs-figure7 --run", "same direction", _FRI,
     "Algorithm 3 by window: sigma -48 % with geometric lengths, -33 % with heavy tails (print: -40 % in its text, "
     "-56 % by its numbers); the baseline spreads less here. Placed one by one (ours): -50 and -44 %."),
    ("figure 8", "decode throughput", "tables sbs-figure8 --run", "same direction", _FRI,
     "+5.7 and +4.5 % (print +15): with KV of 70 KB a token its balance is 2 of some 40 ms of a pass."),
    ("claim: waiting", "T/2 falls to T/(2N)", "tables sbs-waiting --run", "same", _FRI,
     "Within 1 %."),
)  # fmt: skip

ITEMS: tuple[PaperItem, ...] = (
    *(PaperItem("eb", *item) for item in _EB),
    *(PaperItem("deferred", *item) for item in _DEFERRED),
    *(PaperItem("staggered", *item) for item in _STAGGERED),
)


def _section(paper: Paper) -> Section:
    columns = (*labels("item"), *(Column(name, "label", fold=True) for name in ("shows", "command")),
               *labels("agreement"), Column("what we saw", "label", fold=True), *labels("checked"))  # fmt: skip
    lines: list[tuple[Value, ...]] = [
        (item.name, item.shows, f"ebbench {item.command}" if item.command else "–", item.agreement, item.remark,
         item.checked)
        for item in ITEMS
        if item.paper == paper
    ]  # fmt: skip
    return Section(PAPERS[paper], columns, tuple(lines))


def _document(options: PaperOptions, store: RunStore) -> Content:
    notes = (
        *(f"{word}: {meaning}." for word, meaning in AGREEMENTS.items()),
        "What we saw is written by hand from the committed reports (reports/tables, cluster, figures, fidelity); "
        "nothing is run for this page. Checked: the day on which ours was last made or compared.",
    )
    sections = tuple(_section(paper) for paper in PAPERS)
    return sections, notes


INDEX = PaperTable(
    "papers", "all items of the three papers, and whether ours agree", "Every table and figure of the three papers",
    no_cells, _document, (),
)  # fmt: skip
