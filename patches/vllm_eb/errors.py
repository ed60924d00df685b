"""The base class of errors in settings that the user gave."""

from __future__ import annotations


class GivenValueError(ValueError):
    """A policy, setting, calibration or coefficient that cannot be; the message says what to give instead."""
