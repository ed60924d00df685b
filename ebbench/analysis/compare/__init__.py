"""Compares runs: grouped by policy, and paired by plan."""
