"""Devices: cost models and profiles of GPUs that serve a model."""

from ebbench.devices.base import CostModel, Device, StepShape
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import list_devices, list_models

__all__ = ["CostModel", "Device", "StepShape", "list_devices", "list_models", "load_device"]
