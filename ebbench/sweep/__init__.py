"""Sweeps: grids of settings run by processes or a cluster."""
