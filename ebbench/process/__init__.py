"""The command line in general; starting and ending processes, signals, timers, open files, garbage, clusters."""
