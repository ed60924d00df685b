"""The policies of this package: one per module, named after its file.

A module defines a subclass of :class:`vllm_eb.policy.PolicySpec` under the name ``POLICY`` and the
:class:`vllm_eb.strategy.Strategy` that it creates. A new module is found without further changes.
"""
