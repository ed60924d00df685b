"""The plugin's logger. It is a child of vLLM's, whose handler would otherwise not show what the plugin logs."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.vllm_eb")
