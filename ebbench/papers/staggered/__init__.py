"""Tables and figures of Tian et al. (2025), staggered batch scheduling."""
