"""Completion hazards: lengths from any source, and tests for a rising trend."""
