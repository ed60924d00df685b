"""A device from step times measured on this very engine (``ebbench calibrate``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ebbench.devices.base import StepShape
from ebbench.errors import InputFileError
from vllm_eb.calibration import Calibration, CalibrationError, calibration_from_json
from vllm_eb.costs import CostGrid


@dataclass(frozen=True)
class GridCost:
    """Step time read off a measured grid: linear between its points, continued beyond, never below its parts.

    ``request_s`` is added for every prompt that a step completes: what a request costs beside its steps.
    """

    grid: CostGrid
    request_s: float = 0.0

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step; prompts count by their tokens together, decodes by number and mean context."""
        seqs = shape.decode_seqs
        beside = self.request_s * (shape.sampled_seqs - seqs)
        tokens = 0
        for chunk, _ in shape.prefill:
            tokens += chunk
        if not seqs:
            return self.grid.prefill_s(tokens) + beside
        context = shape.decode_kv_tokens / seqs
        decode = self.grid.decode_s(seqs, context)
        if not tokens:
            return decode
        return max(self.grid.mixed_s(tokens, seqs, context), decode, self.grid.prefill_s(tokens)) + beside


def measured_calibration(path: Path) -> Calibration:
    """Read a calibration that ``ebbench calibrate`` wrote. Raises InputFileError with the field named."""
    try:
        calibration = calibration_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror}); the profile names it as measured") from None
    except CalibrationError as error:
        raise InputFileError(path, str(error)) from None
    if calibration.grid is None:
        raise InputFileError(path, "field grid is missing; write it with `ebbench calibrate`")
    return calibration
