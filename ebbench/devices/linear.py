"""The linear cost model of the EB paper (section 3.1, appendix A) with its published coefficients."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ebbench.devices.base import Device, StepShape
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.identity import identity_given
from ebbench.devices.profiles import DATA, DeviceProfile
from ebbench.errors import UsageError
from vllm_eb.calibration import Calibration, MixedCost

SOURCE = "weifang231/eb-vllm (Apache-2.0), calibration of Zhang et al., ICML 2026"
# The authors calibrated both releases of the same Llama weights.
_ALIASES = {"meta-llama/meta-llama-3.1-8b-instruct": "meta-llama/llama-3.1-8b-instruct"}


@dataclass(frozen=True)
class LinearCost:
    """Step time linear in tokens: prefill, decode, and mixed by the measured beta_mb(r) if there is one.

    A mixed step is never cheaper than either of its parts: the fitted polynomial falls below them for a few decodes
    with a very short chunk, outside the range it was fitted on. Without a measured mixed cost the parts are added, with
    the fixed cost counted once. ``kv_token_s``: seconds per KV token that a decode step reads; if set, the device is a
    unit of separate pools, whose decode steps cost nothing for the last prompt token of a joining request.
    """

    calibration: Calibration
    kv_token_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        """Time (s) of one step; context lengths matter only through ``kv_token_s`` (docs/theory.md)."""
        cal = self.calibration
        tokens = 0
        for chunk, _ in shape.prefill:
            tokens += chunk
        n = shape.decode_seqs + shape.draft_tokens
        if not n:
            return cal.alpha_p + cal.beta_p * tokens
        if not tokens or self.kv_token_s:
            return cal.alpha_d + cal.beta_d * n + self.kv_token_s * shape.decode_kv_tokens
        if cal.mixed is None:
            return max(cal.alpha_p, cal.alpha_d) + cal.beta_p * tokens + cal.beta_d * n
        total = tokens + n
        alpha = cal.alpha_p if cal.alpha_mb is None else cal.alpha_mb
        mixed = alpha + cal.mixed.at(n / total) * total
        return max(mixed, cal.alpha_p + cal.beta_p * tokens, cal.alpha_d + cal.beta_d * n)


GIVEN = "linear:"
"""Prefix of the name of a device that is given by its constants."""


def given_device(name: str, model: str) -> Device:
    """A device given as ``linear:alpha_p,beta_p,alpha_d,beta_d,KV[,kv_token]``: seconds, KV tokens, s per KV token.

    Raises UsageError for any other text.
    """
    try:
        values = [float(value) for value in name.removeprefix(GIVEN).split(",")]
        alpha_p, beta_p, alpha_d, beta_d, kv_tokens, kv_token_s = [*values, 0.0] if len(values) == 5 else values
    except ValueError:
        raise UsageError(
            f"device {name!r} is not {GIVEN}alpha_p,beta_p,alpha_d,beta_d,KV with five or six numbers"
        ) from None
    costs = Calibration(alpha_p, beta_p, alpha_d, beta_d)
    cost = LinearCost(costs, kv_token_s)
    source, own = "linear cost model, constants as given", identity_given(cost, int(kv_tokens))
    return Device("linear", model, cost, int(kv_tokens), costs, source, identity=own)


def published_calibration(profile: DeviceProfile, model: ModelGeometry) -> Calibration | None:
    """The authors' coefficients for this device and model, or None if they published none."""
    key = model.hf_id.lower()
    for device in profile.calibration_names:
        found = _calibrations().get((device, key))
        if found is not None:
            mixed = next((_mixed()[d, key] for d in profile.calibration_names if (d, key) in _mixed()), None)
            return replace(found, mixed=mixed, margin=profile.margin_s_per_token)
    return None


@cache
def _calibrations() -> dict[tuple[str, str], Calibration]:
    return {
        (row["device_name"], _model_key(row["model"])): Calibration(
            alpha_p=float(row["alpha_p_s"]),
            beta_p=float(row["beta_p_s_per_token"]),
            alpha_d=float(row["alpha_d_s"]),
            beta_d=float(row["beta_d_s_per_seq"]),
            source=f"{SOURCE}, {row['source_file']}",
        )
        for row in _rows(DATA / "eb_vllm" / "calibration.csv")
    }


@cache
def _mixed() -> dict[tuple[str, str], MixedCost]:
    return {
        (row["device_name"], _model_key(row["model"])): MixedCost(
            a=float(row["a_s_per_token"]), b=float(row["b_s_per_token"]), c=float(row["c_s_per_token"])
        )
        for row in _rows(DATA / "eb_vllm" / "beta_mb.csv")
    }


def _model_key(name: str) -> str:
    return _ALIASES.get(name.lower(), name.lower())


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
