"""Stored data: schemas, plans, manifests, the run directory."""
