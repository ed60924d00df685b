"""Measures how accurate simulated results are on this machine: runs are predicted from step times, then measured."""
