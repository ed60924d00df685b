"""Runs and documents in the formats of other tools."""
