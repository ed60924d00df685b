"""vLLM's own scheduler tests, run on vLLM as it is and with the plugin in place of its scheduler (make vllm-tests)."""
