"""Protocols of the published runs, used by ``ebbench tables`` and ``ebbench fidelity``.

Facts (the authors' published scripts, code and reports, weifang231/eb-vllm):

- 4,000 prompts, lengths uniform within 50 % of the mean, EOS ignored, gpu_memory_utilization 0.9, each scheduler at
  its own best (B, N) in table 2. Their vLLM is older than 0.14: no asynchronous scheduling.
- 100 (synthetic) or 20 (real) warm-up requests come first and are in no figure: ``vllm bench serve --num-warmups``
  in addition to ``--num-prompts 4000``. Both shifts have ``--num-warmups 0``. vLLM repeats its first prompt; our
  warm-up has the plan's lengths, so that an online policy learns the workload and not one length. Appendix E.2
  includes the warm-up in its 4,000 requests (tables 10 and 11: 3,900 count).
- The memory-safe batch N* is computed in table 3's runs only; the scripts of table 2 and figure 3 leave it off.
- EB+ computes the crossover with the threshold in use, not with theta0 (scheduler.py, and the two switches that their
  comparison of 2026-05-16 prints). Its margin is 1e-5 s/token on H200 (the same). None is published for RTX PRO 6000:
  5e-5 is inferred from tables 3, 19 and 20, in which EB+ then stays and leaves mixed batches as in print. It is about
  the H200's, raised by the ratio of the two GPUs' gaps of eq. 8 (4.5 at 512 tokens in and out).
- Their online threshold has a lower bound, 0.01 unless a script sets it. ``run_distribution_shift.sh`` sets 0.7 for EB
  and EB+. At c = 512 and 2048 no script sets it, but EB's TTFT and TPOT at c = 512 (a fitted row) are those of 0.7 on
  both GPUs, and not those of Algorithm 1's own 0.34 and 0.20; that is an inference. EB+ shows no such bound.
- The shifts' prompts are cut to their mean, outputs are within 25 % of it (``generate_distribution_shift_dataset.py``).
  ``vllm bench serve`` shuffles a custom data set by default, and the script does not disable it: the three "phases" of
  the distribution shift were served as one mixture.
- ``concurrency_shift`` gives the mean of its phases' throughputs, each phase a separate benchmark (their server
  keeps running in between, ours starts anew).
- ShareGPT's outputs were as long as the model made them in the runs printed for Qwen3-8B: about 360 tokens (their
  reproduction report). The Qwen3-30B-A3B cells printed for H200 are those of their rerun with the data set's own
  lengths, 292 tokens on average; the ones for RTX PRO 6000, and those of Gemma-3-1B-IT, are assumed to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbench.config.topology import TopologySpec
from ebbench.devices.base import EB_VLLM
from ebbench.installation import REFERENCE
from ebbench.spec.run import RunSpec, simulated

ASYNC_SCHEDULING = False
VLLM = EB_VLLM
"""Sizes the KV cache of the papers' runs."""
SYNTHETIC_WARMUP, REAL_WARMUP = 100, 20
PAPER_THETA_FLOOR = 0.7
MEAN_INPUT, MEAN_OUTPUT = 512, 256  # tokens, table 3's traffic levels
CONCURRENCY_PHASES = (32, 512, 1024, 256, 2048)
_FLOORED = {"eb": ("c=512", "c=2048", "distribution_shift"), "ebplus": ("distribution_shift",)}


EBPLUS_MARGIN_S_PER_TOKEN = {"rtx-pro-6000": 5e-5}
"""Margin of the published runs of EB+ where it is not the device's."""


def ebplus_as_run(device: str, **settings: float | bool) -> str:
    """EB+ with these settings, as the published runs on a device had it; a ``margin`` among them takes precedence."""
    given: dict[str, float | bool | str] = {"crossover_theta": "used"}
    if device in EBPLUS_MARGIN_S_PER_TOKEN:
        given["margin"] = EBPLUS_MARGIN_S_PER_TOKEN[device]
    given |= settings
    return "ebplus:" + ",".join(f"{name}={str(value).lower()}" for name, value in given.items())


@dataclass(frozen=True)
class Protocol:
    """One published run. ``plan``: arguments of :func:`ebbench.workloads.build_plan`, files as ``reference:PATH``.

    ``concurrencies``: if not empty, one run per value, with the mean of their figures. ``shuffle``: change the order of
    the requests. ``topology`` None is one GPU; ``dispatch`` and ``decode_dispatch`` as in a RunSpec.
    """

    policy: str
    plan: Mapping[str, str | int | float]
    max_num_seqs: int
    max_num_batched_tokens: int
    warmup: int
    shuffle: bool = False
    concurrencies: tuple[int, ...] = ()
    topology: TopologySpec | None = None
    dispatch: str | None = None
    decode_dispatch: str | None = None

    def plans(self) -> list[Mapping[str, str | int | float]]:
        """The plan's arguments of every run behind a figure."""
        return [{**self.plan, "max_concurrency": c} for c in self.concurrencies] or [self.plan]


def table3_protocol(scenario: str, scheduler: str, device: str) -> Protocol:
    """A cell of table 3, by the scenario's name in the reference table; policies that the paper does not have are
    allowed."""
    floor = {"theta_min": PAPER_THETA_FLOOR} if scenario in _FLOORED.get(scheduler, ()) else {}
    policy = scheduler
    if scheduler == "ebplus":
        policy = ebplus_as_run(device, **floor)
    elif floor:
        policy = f"{scheduler}:theta_min={PAPER_THETA_FLOOR}"
    if scenario == "distribution_shift":
        shift: dict[str, str | int] = {
            "workload": "balanced",
            "scenario": f"{REFERENCE}scenarios/distribution-shift-run.toml",
        }
        return Protocol(policy, shift, 2048, 18_432, warmup=0, shuffle=True)
    if scenario == "concurrency_shift":
        phase: dict[str, str | int] = {
            "workload": f"{REFERENCE}workloads/concurrency-shift-run.toml",
            "source": "profile",
        }
        return Protocol(policy, phase, 2048, 18_432, warmup=0, concurrencies=CONCURRENCY_PHASES)
    level: dict[str, str | int] = {
        "workload": "balanced", "source": "profile", "input_len": MEAN_INPUT, "output_len": MEAN_OUTPUT,
        "num_prompts": 4000, "max_concurrency": int(scenario.removeprefix("c=")),
    }  # fmt: skip
    return Protocol(policy, level, 1024, 14_336, warmup=SYNTHETIC_WARMUP)


def real_protocol(workload: str, model: str, scheduler: str, sizes: tuple[int, int]) -> Protocol:
    """A cell of table 2 and figure 5; ``workload`` as in ``ebbench workloads list``, ``sizes`` are (N, B)."""
    policy = "eb:memory_safe=false" if scheduler == "eb" else scheduler
    plan: dict[str, str | int] = {"workload": real_workload(workload, model), "source": "profile"}
    return Protocol(policy, plan | {"max_concurrency": 2048}, *sizes, warmup=REAL_WARMUP)


def synthetic_protocol(workload: str, policy: str, sizes: tuple[int, int]) -> Protocol:
    """A bar of figure 4 and a cell of the grid behind table 16; ``sizes`` are (N, B)."""
    plan: dict[str, str | int] = {"workload": workload, "source": "profile", "max_concurrency": 2048}
    return Protocol(policy, plan, *sizes, warmup=SYNTHETIC_WARMUP)


def real_workload(workload: str, model: str) -> str:
    """The workload with the lengths of the published runs: fixed outputs in two workloads (scripts), by model in a
    third (reports).

    WildChat's outputs are the data set's, cut at 256 tokens, as in the workload itself.
    """
    sharegpt = "sharegpt-qwen3-8b" if model == "qwen3-8b" else "sharegpt-qwen3-30b"
    forced = {name: f"{name}-forced" for name in ("longbench", "numinamath")} | {"sharegpt": sharegpt}
    return f"{REFERENCE}workloads/{forced[workload]}.toml" if workload in forced else workload


SERVER_BUDGET, SERVER_SEQS = 8192, 1024
"""vLLM's defaults for a server on a GPU of 70 to 160 GB, B and N; the scripts of tables 6, 19 and 20 set neither."""
FIXED_THETA = 0.8
"""Threshold of EB and EB+ in the first version of those scripts."""


def long_context_protocol(policy: str, input_tokens: int, concurrency: int, max_model_len: int) -> Protocol:
    """A run on long prompts (run_long_context_comparison.sh): no warm-up, outputs within 25 % of their mean; "eb" has a
    fixed threshold."""
    workload = f"{REFERENCE}workloads/long-context-{input_tokens}.toml"
    plan: dict[str, str | int] = {
        "workload": workload, "source": "profile", "max_concurrency": concurrency, "max_model_len": max_model_len,
    }  # fmt: skip
    fixed = f"eb:theta={FIXED_THETA}" if policy == "eb" else policy
    return Protocol(fixed, plan, SERVER_SEQS, SERVER_BUDGET, warmup=0)


FIGURE3_SEQS = 1024
FIGURE3_BUDGETS = {"decode-heavy": 16_384, "balanced": 14_336, "prefill-heavy": 18_432}


def figure3_protocol(workload: str, policy: str, *, uniform: bool = False) -> Protocol:
    """A point of figure 3 (H200): geometric output lengths, or with ``uniform`` the workload's own."""
    if policy == "eb":
        policy = "eb:memory_safe=false"
    name = workload if uniform else f"{REFERENCE}workloads/figure3-{workload}.toml"
    plan: dict[str, str | int] = {"workload": name, "source": "profile", "max_concurrency": 2048}
    return Protocol(policy, plan, FIGURE3_SEQS, FIGURE3_BUDGETS[workload], warmup=SYNTHETIC_WARMUP)


def fixed_threshold(k: int) -> str:
    """Figure 3's policy for a fixed k, which the scripts pass as the share k / N."""
    return f"eb:theta={min(k / FIGURE3_SEQS, 0.99):.4g}"


def protocol_cells(
    protocol: Protocol, device: str, model: str, num_prompts: int | None = None, weight: float = 1.0, seed: int = 0
) -> tuple[RunSpec, ...]:
    """The cells of one published figure; ``num_prompts`` replaces the protocol's number."""
    cells = []
    for plan in protocol.plans():
        arguments: dict[str, Any] = dict(plan) | ({} if num_prompts is None else {"num_prompts": num_prompts})
        cell = simulated(
            arguments.pop("workload"), protocol.policy, device, model, protocol.max_num_seqs,
            protocol.max_num_batched_tokens, warmup=protocol.warmup, async_scheduling=ASYNC_SCHEDULING,
            vllm_version=VLLM, shuffle=protocol.shuffle, weight=weight, seed=seed, topology=protocol.topology,
            dispatch=protocol.dispatch, decode_dispatch=protocol.decode_dispatch, **arguments,
        )  # fmt: skip
        cells.append(cell)
    return tuple(cells)
