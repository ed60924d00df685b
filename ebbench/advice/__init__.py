"""Advises a policy: simulates candidates on the same plans and compares with the theory."""
