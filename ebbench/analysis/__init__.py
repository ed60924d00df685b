"""What runs mean: metrics, verdicts, comparisons and explanations, from Run directories only."""
