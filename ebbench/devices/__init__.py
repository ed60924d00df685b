"""Devices: cost models and profiles of GPUs that serve a model."""
