"""``ebbench theory``: evaluates the formulas behind the schedulers for given numbers.

Options and JSON keys are the symbols of the papers, spelled out. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbench.cli.options import Command
from ebbench.errors import InputFileError, UsageError

if TYPE_CHECKING:
    from vllm_eb.calibration import Calibration, MixedCost

Value = float | int | bool | str | None

app = typer.Typer(
    name="theory",
    help="Evaluate the papers' formulas: threshold, memory-safe batch, EB/MB crossover, deferred prefill.",
    no_args_is_help=True,
    add_completion=False,
)

_LARGEST_CHAIN = 16_384  # time grows with the square; some seconds at this size

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
P0 = Annotated[float, typer.Option("--p0", help="Completion hazard per output token (1/mean when geometric).")]
AlphaP = Annotated[float, typer.Option("--alpha-p", help="Fixed cost of a prefill step, s.")]
AlphaD = Annotated[float, typer.Option("--alpha-d", help="Fixed cost of a decode step, s.")]
MuL = Annotated[float, typer.Option("--mu-l", help="Mean prompt length, tokens.")]

_MEANING: Mapping[str, str] = {
    "theta0": "optimal threshold at constant hazard, share of N",
    "zeta": "-ln(1 - theta0)",
    "delta_theta": "shift for the increasing hazard",
    "theta_star": "optimal threshold, share of N",
    "k_star": "switch to prefill when this many slots are idle",
    "slot_tokens": "D, expected KV tokens per slot at the start of decoding",
    "n_star": "memory-safe batch by the chosen formula",
    "n_code": "memory-safe batch as in the authors' code",
    "n_paper": "memory-safe batch as in the paper (eq. 6)",
    "n_peak": "batch whose expected peak fits",
    "n_static": "batch that fits at the start of decoding",
    "r": "decode share of the tokens",
    "beta_mb": "mixed batch, s/token (none: not measured)",
    "beta_eb": "exclusive batches, weighted, s/token",
    "lhs": "cost of co-location, s/token",
    "rhs": "what mixed batching saves in fixed costs, s/token",
    "margin": "priority margin, s/token",
    "eb_wins": "lhs > rhs + margin",
    "eb_throughput": "exclusive batches at theta0, requests/s",
    "mb_throughput": "mixed batches, requests/s",
    "throughput": "at k_star, requests/s",
    "e_n1": "decode iterations of a cycle at k_star",
    "e_x_s": "requests still decoding at the switch, at k_star",
    "throughput_k1": "when refilling after every departure, requests/s",
    "gain": "throughput over throughput_k1, less one",
    "k_star_approximation": "best K of the paper's approximation",
    "throughput_approximation": "the approximation's throughput there, requests/s (none: no bound)",
    "k": "the given threshold",
    "throughput_k": "at that threshold, requests/s",
}


@app.command(cls=Command)
def threshold(
    p0: P0,
    alpha_p: AlphaP,
    alpha_d: AlphaD,
    eta: Annotated[float, typer.Option("--eta", help="Growth of the hazard per token.")] = 0.0,
    beta_d: Annotated[float | None, typer.Option("--beta-d", help="Decode cost per sequence, s.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="N, slots.")] = None,
    discrete: Annotated[bool, typer.Option("--discrete", help="Use the exact discrete-time hazard -ln(1-p0).")] = False,
    uncapped: Annotated[bool, typer.Option("--uncapped", help="Do not limit delta_theta to 5*theta0.")] = False,
    as_json: Json = False,
) -> None:
    """Optimal switching threshold (Zhang et al. 2026, Prop. 3.1 and Thm 3.2).

    Example: ebbench theory threshold --p0 0.0036 --alpha-p 0.0047 --alpha-d 0.0104
    """
    from vllm_eb.theory import DELTA_CAP, optimal_threshold

    if eta and (beta_d is None or batch_size is None):
        raise UsageError("the shift for --eta depends on the batch; add --beta-d and --batch-size")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, not {batch_size}")
    with _usage_errors():
        found = optimal_threshold(
            p0,
            alpha_p,
            alpha_d,
            eta=eta,
            beta_d=beta_d or 0.0,
            n=batch_size or 0,
            cap=None if uncapped else DELTA_CAP,
            discrete=discrete,
        )
    values: dict[str, Value] = {
        "theta0": found.theta0,
        "zeta": found.zeta,
        "delta_theta": found.delta_theta,
        "theta_star": found.theta_star,
    }
    if batch_size is not None:
        values["k_star"] = max(1, int(found.theta_star * batch_size))
    _show("Switching threshold", values, as_json)


@app.command(cls=Command)
def memory(
    capacity: Annotated[float, typer.Option("--capacity", help="KV cache, tokens.")],
    mu_l: MuL,
    p0: P0,
    theta: Annotated[float, typer.Option("--theta", help="Switching threshold, share of N.")],
    epsilon: Annotated[float, typer.Option("--epsilon", help="Allowed probability of overflow.")] = 0.01,
    form: Annotated[str, typer.Option("--form", help="Formula of n_star: code or paper.")] = "code",
    as_json: Json = False,
) -> None:
    """Batch size that is safe for the KV cache (Prop. 3.3, appendix D.5).

    Example: ebbench theory memory --capacity 400000 --mu-l 105 --p0 0.0036 --theta 0.2
    """
    from vllm_eb.theory import memory_bounds

    if form not in ("code", "paper"):
        raise UsageError(f"--form is code or paper, not {form!r}")
    with _usage_errors():
        bounds = memory_bounds(capacity, mu_l, p0, theta, epsilon)
    values: dict[str, Value] = {
        "n_star": bounds.n_code if form == "code" else bounds.n_paper,
        "n_code": bounds.n_code,
        "n_paper": bounds.n_paper,
        "n_peak": bounds.n_peak,
        "n_static": bounds.n_static,
        "slot_tokens": bounds.slot_tokens,
    }
    _show("Memory-safe batch", values, as_json)


@app.command(cls=Command)
def crossover(
    mu_l: MuL,
    mu_o: Annotated[float, typer.Option("--mu-o", help="Mean output length, tokens.")],
    n_obs: Annotated[float, typer.Option("--n-obs", help="Active sequences.")],
    alpha_p: Annotated[float | None, typer.Option(help="Fixed cost of a prefill step, s.")] = None,
    beta_p: Annotated[float | None, typer.Option(help="Prefill, s/token.")] = None,
    alpha_d: Annotated[float | None, typer.Option(help="Fixed cost of a decode step, s.")] = None,
    beta_d: Annotated[float | None, typer.Option(help="Decode, s/sequence.")] = None,
    alpha_mb: Annotated[float | None, typer.Option(help="Fixed cost of a mixed step, s (default: alpha-p).")] = None,
    beta_mb: Annotated[float | None, typer.Option(help="Mixed step, s/token, at this decode share.")] = None,
    theta0: Annotated[float | None, typer.Option(help="Threshold, share of N (default: optimal at p0).")] = None,
    p0: Annotated[float | None, typer.Option(help="Completion hazard (default: 1/mu-o).")] = None,
    margin: Annotated[float | None, typer.Option(help="Priority margin, s/token (default: the device's).")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Calibration JSON with the costs.")] = None,
    device: Annotated[str | None, typer.Option(help="Device with the costs, with --model.")] = None,
    model: Annotated[str | None, typer.Option(help="Model with the costs, with --device.")] = None,
    as_json: Json = False,
) -> None:
    """Exclusive or mixed batching? Both sides of Prop. 3.4. Costs given as options replace those of the device.

    Example: ebbench theory crossover --device rtx-pro-6000 --model qwen3-8b --mu-l 105 --mu-o 280 --n-obs 512
    """
    from vllm_eb import theory

    with _usage_errors():
        given = {"alpha_p": alpha_p, "beta_p": beta_p, "alpha_d": alpha_d, "beta_d": beta_d}
        given |= {"alpha_mb": alpha_mb, "margin": margin}
        costs = _costs(given, beta_mb, _known_costs(calibration, device, model))
        hazard = 1.0 / max(mu_o, 1.0) if p0 is None else p0
        share = theory.base_threshold(hazard, costs.alpha_p, costs.alpha_d) if theta0 is None else theta0
        sides = theory.crossover(costs, mu_l=mu_l, mu_o=mu_o, n_obs=n_obs, theta0=share)
        values: dict[str, Value] = {
            "lhs": sides.lhs,
            "rhs": sides.rhs,
            "margin": costs.margin,
            "eb_wins": sides.eb_wins(costs.margin),
            "r": sides.r,
            "beta_mb": sides.beta_mb,
            "beta_eb": sides.beta_eb,
            "theta0": share,
            "eb_throughput": theory.eb_throughput(costs, theta=share, n=n_obs, p0=hazard, mu_l=mu_l) if share else None,
            "mb_throughput": theory.mb_throughput(costs, n=n_obs, mu_l=mu_l, mu_o=mu_o) if costs.mixed else None,
        }
    _show("EB/MB crossover", values, as_json)


@app.command(cls=Command)
def deferred(
    batch_limit: Annotated[int, typer.Option("--batch-limit", "--c", help="C, requests in the batch.")],
    alpha: Annotated[float, typer.Option("--alpha", help="Probability that a request ends at a token.")],
    c_p: Annotated[float, typer.Option("--c-p", help="Fixed cost of a prefill, s.")],
    c_d: Annotated[float, typer.Option("--c-d", help="Fixed cost of a decode iteration, s.")],
    t_d: Annotated[float, typer.Option("--t-d", help="Decode cost per request, s.")] = 0.0,
    t_p: Annotated[float, typer.Option("--t-p", help="Time to prefill --n tokens, s.")] = 0.0,
    d0: Annotated[float, typer.Option("--d0", help="Prompt length, tokens.")] = 0.0,
    n: Annotated[float, typer.Option("--n", help="Tokens prefilled in parallel in --t-p.")] = 1.0,
    k: Annotated[int | None, typer.Option("--k", help="Also show this threshold.")] = None,
    as_json: Json = False,
) -> None:
    """Best fixed departure threshold K (Mohanty et al. 2025): the exact chain, and the paper's approximation.

    Example: ebbench theory deferred --batch-limit 331 --alpha 0.004975 --c-p 0.028 --c-d 0.04
    """
    from vllm_eb.policies.deferred import DeferredModel, approximate_chain, exact_chain

    if not n > 0:
        raise UsageError(f"--n must be positive, not {n}")
    if batch_limit > _LARGEST_CHAIN:
        raise UsageError(f"--batch-limit {batch_limit} is too large for the exact chain; at most {_LARGEST_CHAIN}")
    with _usage_errors():
        costs = DeferredModel(batch_limit, alpha, c_p, c_d, t_d, t_p * d0 / n)
    if k is not None and not 1 <= k <= batch_limit:
        raise UsageError(f"--k must lie between 1 and the batch limit {batch_limit}, not {k}")
    exact, rough = exact_chain(costs), approximate_chain(costs)
    best = exact.best_k
    at_best, at_one = float(exact.throughput[best - 1]), float(exact.throughput[0])
    promised = float(rough.throughput[rough.best_k - 1])
    bounded = math.isfinite(promised)  # without any cost but the last decode step's, which it leaves out, it is not
    values: dict[str, Value] = {
        "k_star": best,
        "throughput": at_best,
        "e_n1": float(exact.e_n1[best - 1]),
        "e_x_s": float(exact.e_x_s[best - 1]),
        "throughput_k1": at_one,
        "gain": at_best / at_one - 1.0,
        "k_star_approximation": rough.best_k if bounded else None,
        "throughput_approximation": promised if bounded else None,
    }
    if k is not None:
        values |= {"k": k, "throughput_k": float(exact.throughput[k - 1])}
    _show("Deferred prefill", values, as_json)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Convert errors of vllm_eb, which come from an option, to UsageError."""
    from vllm_eb.calibration import CalibrationError
    from vllm_eb.theory import TheoryError

    try:
        yield
    except (TheoryError, CalibrationError) as error:
        raise UsageError(str(error)) from None


def _known_costs(path: Path | None, device: str | None, model: str | None) -> Calibration | None:
    from ebbench.foreign.documents import read_text
    from vllm_eb.calibration import CalibrationError, calibration_from_json

    if (device is None) != (model is None):
        raise UsageError("--device and --model go together")
    if path is not None and device is not None:
        raise UsageError("give --calibration or --device, not both")
    if path is not None:
        try:
            return calibration_from_json(read_text(path))
        except CalibrationError as error:
            raise InputFileError(path, str(error)) from None
    if device is not None and model is not None:
        from ebbench.devices.loader import load_device

        return load_device(device, model).calibration
    return None


def _costs(given: Mapping[str, float | None], beta_mb: float | None, known: Calibration | None) -> Calibration:
    from vllm_eb.calibration import Calibration, MixedCost

    values = {name: value for name, value in given.items() if value is not None}
    mixed: MixedCost | None = None if beta_mb is None else MixedCost(beta_mb, 0.0, 0.0)
    if known is not None:
        return replace(known, **values, mixed=mixed or known.mixed)  # type: ignore[arg-type]
    missing = [name for name in ("alpha_p", "beta_p", "alpha_d", "beta_d") if name not in values]
    if missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise UsageError(f"costs missing: give {options}, or --device with --model, or --calibration")
    return Calibration(**values, mixed=mixed)  # type: ignore[arg-type]


def _show(title: str, values: Mapping[str, Value], as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(values, allow_nan=False))
        return
    from rich.table import Table

    from ebbench.render.documents import Console

    table = Table("symbol", "value", "meaning", title=title, title_justify="left")
    for name, value in values.items():
        table.add_row(name, _text(value), _MEANING[name])
    Console().print(table)


def _text(value: Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
