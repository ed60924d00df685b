"""Tables of Mohanty et al. (EuroMLSys 2025)."""
