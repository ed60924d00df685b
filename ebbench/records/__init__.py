"""Stored data: schemas, plans, manifests, run directories."""

CHUNK_TOKENS = 512
"""Prompt tokens per hash id, where a plan does not say otherwise: as in Mooncake's traces."""
