"""Stored data: schemas, plans, manifests, run directories."""
