"""The parameters that one token uses, as model cards state them."""

from __future__ import annotations

from ebbench.devices.geometry import ModelGeometry


def active_params(model: ModelGeometry) -> int:
    """With embeddings: all without the experts that a token is not sent to."""
    return model.params - model.expert_layers * (model.experts - model.experts_per_token) * model.expert_params
