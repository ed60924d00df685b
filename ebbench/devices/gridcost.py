"""A device from step times measured with ``ebbench calibrate``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ebbench.devices.base import StepShape
from ebbench.errors import InputFileError
from ebbench.foreign.documents import read_text
from vllm_eb.calibration import Calibration, CalibrationError, CostGrid, calibration_from_json


@dataclass(frozen=True)
class GridCost:
    """Step time from a measured grid: interpolated, extrapolated linearly, never below that of its parts.

    The grid was measured with one prompt per step. The part that grows with the square of a prompt's length, its
    attention, is removed from ``grid`` and added per prompt (``square_s`` per pair of tokens): 512 tokens in four
    prompts cost less than in one. ``request_s``: cost of a request outside its steps, added for every prompt that a
    step completes. ``drafted``: the same of steps whose decodes verify ``drafts`` tokens each, where measured; others
    lie between the two in proportion to their drafts.
    """

    grid: CostGrid
    request_s: float = 0.0
    square_s: float = 0.0
    drafted: GridCost | None = None
    drafts: int = 0

    @classmethod
    def of(cls, calibration: Calibration, request_s: float = 0.0) -> GridCost:
        """From a calibration written by `ebbench calibrate`, which has a grid."""
        assert calibration.grid is not None  # measured_calibration requires one
        measured = cls.measured(calibration.grid, request_s)
        if not calibration.drafts:
            return measured
        plain = measured if calibration.undrafted is None else cls.measured(calibration.undrafted, request_s)
        return replace(plain, drafted=measured, drafts=calibration.drafts)

    @classmethod
    def measured(cls, grid: CostGrid, request_s: float = 0.0) -> GridCost:
        """From a grid written by `ebbench calibrate`."""
        square_s = _square_s(grid)
        if square_s:
            grid = replace(
                grid,
                prefill=tuple(t - square_s * x * x for x, t in zip(grid.tokens, grid.prefill, strict=True)),
                mixed=tuple(
                    tuple(tuple(t - square_s * x * x for t in row) for row in rows)
                    for x, rows in zip(grid.tokens, grid.mixed, strict=True)
                ),
            )
        return cls(grid, request_s, square_s)

    def step_s(self, shape: StepShape) -> float:
        """Time (s) of one step; prompts count by their total tokens, decodes by number and mean context.

        A drafted token counts as a decode, with the keys of its sequence divided among them: they are read once; unless
        steps with drafts were measured.
        """
        if self.drafted is not None and shape.draft_tokens:
            share = shape.draft_tokens / (shape.decode_seqs * self.drafts)
            plain = shape._replace(draft_tokens=0)
            without_s = self._step_s(plain)
            return without_s + share * (self.drafted._step_s(plain) - without_s)
        return self._step_s(shape)

    def _step_s(self, shape: StepShape) -> float:
        seqs = shape.decode_seqs + shape.draft_tokens
        tokens = squares = 0
        for chunk, before in shape.prefill:
            tokens += chunk
            squares += chunk * (chunk + 2 * before)
        beside = self.request_s * (shape.sampled_seqs - shape.decode_seqs) + self.square_s * squares
        if not seqs:
            return self.grid.prefill_s(tokens) + beside
        context = shape.decode_kv_tokens / seqs
        decode = self.grid.decode_s(seqs, context)
        if not tokens:
            return decode
        return max(self.grid.mixed_s(tokens, seqs, context), decode, self.grid.prefill_s(tokens)) + beside


def _square_s(grid: CostGrid) -> float:
    """Time (s) per pair of tokens: the common curvature of step times over prompt tokens, by least squares.

    0 with two sizes, if it is negative, or if removing it would make times decrease with tokens (noise).
    """
    tokens = np.array(grid.tokens, float)
    if len(tokens) < 3:
        return 0.0
    columns = np.column_stack([grid.prefill, np.array(grid.mixed).reshape(len(tokens), -1)])
    line = np.polynomial.polynomial.polyfit(tokens, tokens**2, 1)
    bend = tokens**2 - np.polynomial.polynomial.polyval(tokens, line)  # the part of x^2 that no line explains
    square_s = float((bend @ columns).mean() / (bend @ tokens**2))
    without_square = columns - square_s * tokens[:, None] ** 2
    return (
        square_s
        if square_s > 0.0 and (without_square[0] > 0.0).all() and (np.diff(without_square, axis=0) >= 0.0).all()
        else 0.0
    )


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file written by ``ebbench calibrate``. Raises InputFileError."""
    try:
        return calibration_from_json(read_text(path))
    except CalibrationError as error:
        raise InputFileError(path, str(error)) from None


def measured_calibration(path: Path) -> Calibration:
    """:func:`read_calibration` of one with a grid. Raises InputFileError that names the field."""
    calibration = read_calibration(path)
    if calibration.grid is None:
        raise InputFileError(path, "field grid is missing; write it with `ebbench calibrate`")
    return calibration
