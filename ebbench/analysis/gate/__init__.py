"""Regression gate: paired units, verdict, stored baselines, self-test."""
