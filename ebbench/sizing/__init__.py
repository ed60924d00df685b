"""The highest load that a deployment serves within latency limits, and the cheapest deployment for a load."""
