"""What a command simulates where neither a device nor a model is given."""

DEFAULT_DEVICE, DEFAULT_MODEL = "rtx-pro-6000", "qwen3-8b"
DEFAULT_VLLM = "0.32"
"""The version by whose rules a simulated server sizes its KV cache: the newest that the plugin is tested with."""
