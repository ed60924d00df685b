"""The policies that come with the package: every module here is one, known by its file name.

A module holds a subclass of :class:`vllm_eb.policy.PolicySpec` under the name ``POLICY`` and the
:class:`vllm_eb.strategy.Strategy` it makes. Nothing else has to be changed to add one.
"""
