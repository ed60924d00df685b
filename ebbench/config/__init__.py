"""Declared settings and their options, topologies, addresses of servers."""
