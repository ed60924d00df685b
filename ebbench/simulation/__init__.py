"""The simulator: virtual clock, instances with vLLM's scheduling rules, KV blocks, releases."""
