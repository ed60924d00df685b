"""The CI gate: measures two sides alternately, keeps baselines, and says its verdict."""
