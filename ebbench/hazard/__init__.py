"""Completion hazards: output lengths from any source, and tests for a rising trend."""
