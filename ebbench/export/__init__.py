"""Exports runs and documents to the formats of other tools."""
