"""Exclusive batching for vLLM: threshold theory, online controller, scheduler plugin.

All modules except :mod:`vllm_eb.scheduler` and :mod:`vllm_eb.compat` are plain Python and numpy and import neither vLLM
nor ebbench, so that the simulator and the real engine run the same policy code.
"""
