"""Configuration formats: strict TOML files, setting strings, topologies."""
