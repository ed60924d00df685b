"""Batches of runs: cells with their keys, pools that execute them, and the store of results."""
