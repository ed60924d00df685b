"""Engines run a plan under a policy: simulated, in vLLM on an emulated device, in vLLM, or on a server over HTTP."""
