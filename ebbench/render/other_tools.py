"""A run under the definitions of other tools, side by side, with where they differ and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ebbench.analysis.documents import Column, Document, Section
from ebbench.analysis.other_tools import LATENCIES, STATISTICS, TOOLS, RunAs

_RATES = {
    "output_throughput": "output tokens/s", "request_throughput": "requests/s",
    "request_goodput": "goodput, requests/s", "duration_s": "duration, s",
}  # fmt: skip
_UNLIKE = 0.005
"""Share by which a figure must differ before the reason is told."""

_SEND = "counts from the actual send, not from the intended start"
_TO_LAST = "ends with the last token; counts from the actual send"
_TO_END = "ends with the response, after the usage message; counts from the actual send"
_MESSAGES = "one gap per message, however many tokens it carries"
_BUT_ONE = "divides by all tokens but one, also where several came with the first"
_FROM_START = "the clock runs from the start of the run to the end of the last response"
_SENDS = "the clock runs from the first send to the end of the last response"
_REASONS: Mapping[str, Mapping[str, str]] = {
    "ttft": dict.fromkeys(("vllm", "sglang", "guidellm", "aiperf", "inference-perf"), _SEND),
    "tpot": {
        "vllm": _BUT_ONE,
        "sglang": f"{_BUT_ONE}; the time ends with the response",
        "guidellm": "includes the first token: from send to last token over all tokens, answers weighted by tokens",
        "inference-perf": _BUT_ONE,
    },
    "itl": {
        "vllm": _MESSAGES,
        "sglang": _MESSAGES,
        "guidellm": "the mean gap of each answer, weighted by its tokens but one",
        "aiperf": "the mean gap of each answer (others: TPOT); gaps between messages are its inter-chunk latency",
        "inference-perf": "one gap per token, also of answers whose tokens all came at once",
    },
    "e2el": {"vllm": _TO_LAST, "sglang": _TO_END, "guidellm": _TO_END, "aiperf": _TO_LAST, "inference-perf": _TO_END},
    "duration_s": {
        "vllm": _FROM_START, "sglang": _FROM_START, "guidellm": _SENDS,
        "aiperf": "the clock runs from the first send to the last token", "inference-perf": _SENDS,
    },
    "request_goodput": {
        "vllm": "limits are compared with its own latencies; one token meets any TPOT",
        "sglang": "limits are compared with its own latencies; one token meets any TPOT",
        "guidellm": "tpot is compared with its ITL; answers of one token are left out",
        "aiperf": "tpot is compared with its ITL; an answer of one token is not good",
        "inference-perf": "limits are compared with its own latencies; an answer of one token is not good",
    },
}  # fmt: skip
_OWN = {
    "ttft": "from the intended start", "tpot": "tokens that came with the first are not divided by",
    "itl": "one gap per token, 0 within a message", "e2el": "from the intended start to the last token",
    "duration_s": "from the first intended start to the last token", "request_goodput": "by the figures above",
}  # fmt: skip


def document(runs: Sequence[RunAs]) -> Document:
    """One section per run: ebbench's own figures and those of each tool."""
    sections = tuple(_section(run) for run in runs)
    tools = runs[0].tools
    versions = ", ".join(f"{tool.tool} {tool.version}" for tool in tools)
    notes = [
        f"By the definitions of {versions}; –: no such figure; p99 as the tools print it, however few the answers."
    ]
    if any(TOOLS[tool.tool].steps for tool in tools):
        notes.append("Medians and p99 of guidellm are values that occurred, not interpolated ones.")
    for figure, reasons in _REASONS.items():
        unlike = [tool.tool for tool in tools if any(_differs(figure, run, tool.tool) for run in runs)]
        notes += _difference_line(figure, unlike, reasons, len(tools))
    return Document("as", "The same run by the definitions of other tools", sections, tuple(notes))


def _section(run: RunAs) -> Section:
    own, tools = run.own, run.tools
    others = (Column(tool.tool.replace("-", "-\n"), key=tool.tool) for tool in tools)
    columns = (Column("", "label", key="figure"), Column("ebbench", ours=True), *others)
    named = {
        **{f"{s}_{name}_ms": f"{text} {s}, ms" for name, text in LATENCIES.items() for s in STATISTICS}, **_RATES
    }  # fmt: skip
    rows = tuple(
        (text, own.get(key), *(tool.figures.get(key) for tool in tools))
        for key, text in named.items()
        if key != "request_goodput" or own.get(key) is not None
    )
    return Section(f"{run.policy}, seed {run.seed}: {run.run_dir}", columns, rows)


def _differs(figure: str, run: RunAs, tool: str) -> bool:
    own, theirs = run.own, next(reading for reading in run.tools if reading.tool == tool).figures
    keys = [figure] if figure in own else [f"{statistic}_{figure}_ms" for statistic in STATISTICS]
    pairs = [(own.get(key), theirs.get(key)) for key in keys]
    return any(a is not None and b is not None and abs(a - b) > _UNLIKE * max(abs(a), abs(b)) for a, b in pairs)


def _difference_line(figure: str, tools: Sequence[str], reasons: Mapping[str, str], shown: int) -> list[str]:
    """One line: each reason with the tools that have it, of so many ``shown``."""
    by_reason: dict[str, list[str]] = {}
    for tool in tools:
        if tool in reasons:
            by_reason.setdefault(reasons[tool], []).append(tool)
    if not by_reason:
        return []
    name = LATENCIES.get(figure) or _RATES[figure].partition(",")[0]
    explained = "; ".join(
        f"{'all others' if len(names) == shown > 1 else ', '.join(names)}: {reason}"
        for reason, names in by_reason.items()
    )
    return [f"{name} (ebbench: {_OWN[figure]}). {explained}."]
