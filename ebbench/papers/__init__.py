"""The papers' experiments: what was published, how to repeat it, and ours beside it.

A table is a list of cells (one run each) and a function that lays their results out next to the published numbers.
Cells run through the ``sim`` engine in a process pool and are kept in a runs directory under a content key.
"""
