"""Tables and figures of Zhang et al. (ICML 2026), a module per subject."""
