"""What every error of a setting that the user gave is: programs catch it by this class."""

from __future__ import annotations


class GivenValueError(ValueError):
    """A policy, setting, calibration or coefficient that cannot be; the message says what to give instead."""
