"""Which policy to run: candidates simulated on the same plans, beside what theory says."""
