"""The papers' experiments: published figures, their protocols, and our results in comparison.

A table consists of cells (one run each) and a function that lays out their results next to the published numbers. Cells
run on the ``sim`` engine in a process pool and are stored in a runs directory under a content key.
"""
