"""Many runs: grids of settings over processes or a cluster, and pairs measured back and forth."""
