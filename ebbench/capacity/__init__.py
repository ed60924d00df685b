"""The highest load a deployment carries within its latency limits: probes, search, estimate."""
