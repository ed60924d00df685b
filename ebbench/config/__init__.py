"""Settings as users write them: strict TOML and topologies."""
