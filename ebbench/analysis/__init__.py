"""Metrics, validity, comparisons and explanations of stored runs."""
