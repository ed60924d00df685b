"""Tables and figures of Zhang et al. (ICML 2026), one module per published table or figure."""
