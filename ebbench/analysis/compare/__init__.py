"""Runs side by side: over policies, and paired by plan."""
