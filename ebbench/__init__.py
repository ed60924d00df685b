"""ebbench: which batching discipline, on my GPU, for my traffic, and does this commit slow it down?"""

__version__ = "0.1.0"
