"""Many runs: what a run is, its key, the pools that make runs, and the directory that keeps them."""
