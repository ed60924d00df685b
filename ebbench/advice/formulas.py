"""The formulas behind the schedulers, for given numbers: values by the papers' symbols, spelled out.

Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from msgspec import convert
from rich.table import Table

from ebbench.devices.loader import load_device
from ebbench.errors import InputFileError, UsageError
from ebbench.foreign.documents import read_text, read_toml
from ebbench.render.documents import Console
from vllm_eb import theory
from vllm_eb.calibration import Calibration, CalibrationError, MixedCost, calibration_from_json
from vllm_eb.policies.deferred import DeferredModel, approximate_chain, exact_chain

Value = float | int | bool | str | None

_LARGEST_CHAIN = 16_384  # time grows with the square; some seconds at this size


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Convert errors of vllm_eb, which come from an option, to UsageError."""
    try:
        yield
    except (theory.TheoryError, CalibrationError) as error:
        raise UsageError(str(error)) from None


@_usage_errors()
def threshold_values(
    p0: float, alpha_p: float, alpha_d: float, *, eta: float, beta_d: float | None, batch_size: int | None,
    discrete: bool, uncapped: bool,
) -> dict[str, Value]:  # fmt: skip
    """The optimal switching threshold. Raises UsageError."""
    if eta and (beta_d is None or batch_size is None):
        raise UsageError("the shift for --eta depends on the batch; add --beta-d and --batch-size")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, not {batch_size}")
    best = theory.optimal_threshold(
        p0, alpha_p, alpha_d, eta=eta, beta_d=beta_d or 0.0, n=batch_size or 0,
        cap=None if uncapped else theory.DELTA_CAP, discrete=discrete,
    )  # fmt: skip
    values: dict[str, Value] = {
        "theta0": best.theta0, "zeta": best.zeta, "delta_theta": best.delta_theta, "theta_star": best.theta_star,
    }  # fmt: skip
    return values if batch_size is None else values | {"k_star": max(1, int(best.theta_star * batch_size))}


@_usage_errors()
def memory_values(
    capacity: float, mu_l: float, p0: float, theta_share: float, epsilon: float, form: str
) -> dict[str, Value]:
    """The batch that is safe for the KV cache, by every formula. Raises UsageError."""
    if form not in ("code", "paper"):
        raise UsageError(f"--form is code or paper, not {form!r}")
    bounds = theory.memory_bounds(capacity, mu_l, p0, theta_share, epsilon)
    return {
        "n_star": bounds.n_code if form == "code" else bounds.n_paper, "n_code": bounds.n_code,
        "n_paper": bounds.n_paper, "n_peak": bounds.n_peak, "n_static": bounds.n_static,
        "slot_tokens": bounds.slot_tokens,
    }  # fmt: skip


@_usage_errors()
def crossover_values(
    given: Mapping[str, float | None], beta_mb: float | None, known: Calibration | None, *, mu_l: float, mu_o: float,
    n_obs: float, theta0: float | None, p0: float | None,
) -> dict[str, Value]:  # fmt: skip
    """Both sides of the crossover inequality; costs ``given`` replace those ``known``. Raises UsageError."""
    costs = _costs(given, beta_mb, known)
    hazard = 1.0 / max(mu_o, 1.0) if p0 is None else p0
    share = theory.base_threshold(hazard, costs.alpha_p, costs.alpha_d) if theta0 is None else theta0
    sides = theory.crossover(costs, mu_l=mu_l, mu_o=mu_o, n_obs=n_obs, theta0=share)
    return {
        "lhs": sides.lhs, "rhs": sides.rhs, "margin": costs.margin, "eb_wins": sides.eb_wins(costs.margin),
        "r": sides.r, "beta_mb": sides.beta_mb, "beta_eb": sides.beta_eb, "theta0": share,
        "eb_throughput": theory.eb_throughput(costs, theta=share, n=n_obs, p0=hazard, mu_l=mu_l) if share else None,
        "mb_throughput": theory.mb_throughput(costs, n=n_obs, mu_l=mu_l, mu_o=mu_o) if costs.mixed else None,
    }  # fmt: skip


@_usage_errors()
def deferred_values(
    batch_limit: int, alpha: float, c_p: float, c_d: float, *, t_d: float, t_p: float, d0: float, n: float,
    k: int | None,
) -> dict[str, Value]:  # fmt: skip
    """The best departure threshold by the exact chain and by the paper's approximation. Raises UsageError."""
    if not n > 0:
        raise UsageError(f"--n must be positive, not {n}")
    if batch_limit > _LARGEST_CHAIN:
        raise UsageError(f"--batch-limit {batch_limit} is too large for the exact chain; at most {_LARGEST_CHAIN}")
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
    return values if k is None else values | {"k": k, "throughput_k": float(exact.throughput[k - 1])}


def known_costs(path: Path | None, device: str | None, model: str | None) -> Calibration | None:
    """The costs of a calibration file or of a device; None without either. Raises UsageError, InputFileError."""
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
        return load_device(device, model).calibration
    return None


def _costs(given: Mapping[str, float | None], beta_mb: float | None, known: Calibration | None) -> Calibration:
    values = {name: value for name, value in given.items() if value is not None}
    mixed: MixedCost | None = None if beta_mb is None else MixedCost(beta_mb, 0.0, 0.0)
    if known is not None:
        return replace(known, **values, mixed=mixed or known.mixed)  # type: ignore[arg-type]
    missing = [name for name in ("alpha_p", "beta_p", "alpha_d", "beta_d") if name not in values]
    if missing:
        options = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise UsageError(f"costs missing: give {options}, or --device with --model, or --calibration")
    return Calibration(**values, mixed=mixed)  # type: ignore[arg-type]


def show(title: str, values: Mapping[str, Value], as_json: bool) -> None:
    """Print the values: one row per symbol with its meaning, or one JSON document."""
    if as_json:
        print(json.dumps(values, allow_nan=False))
        return
    meaning = convert(read_toml(Path(__file__).with_name("formulas.toml")), dict[str, str])
    rows = Table("symbol", "value", "meaning", title=title, title_justify="left")
    for name, value in values.items():
        rows.add_row(name, _text(value), meaning[name])
    Console().print(rows)


def _text(value: Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
