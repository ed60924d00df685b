"""Simulator: event loop, engine instances with vLLM's scheduling rules, KV blocks, release of requests."""
