"""Exclusive batching for vLLM: threshold theory, online controller and the scheduler plugin.

Everything but :mod:`vllm_eb.scheduler` and :mod:`vllm_eb.compat` is plain Python and numpy and imports
neither vLLM nor ebbench, so the simulator and the real engine run the same policy code.
"""
