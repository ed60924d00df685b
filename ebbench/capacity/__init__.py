"""The highest load that a deployment serves within its latency limits: probes, search, estimate."""
