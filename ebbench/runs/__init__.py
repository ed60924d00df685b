"""Runs: prepared, executed, concluded; batches of them with their keys, pools, and the store of results."""
