"""Processes: starting and ending them, signals, timers, limits of open files, garbage collection, clusters."""
