"""Cost models and device profiles: a GPU holding a model, as an engine sees it."""

from ebbench.devices.base import CostModel, Device, StepShape
from ebbench.devices.loader import load_device
from ebbench.devices.profiles import list_devices, list_models

__all__ = ["CostModel", "Device", "StepShape", "list_devices", "list_models", "load_device"]
