"""What a command simulates where neither a device nor a model is given."""

DEFAULT_DEVICE, DEFAULT_MODEL = "rtx-pro-6000", "qwen3-8b"
