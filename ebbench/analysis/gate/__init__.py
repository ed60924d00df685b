"""The regression gate: paired units, verdict, baselines, self-test."""
