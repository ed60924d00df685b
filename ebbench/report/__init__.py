"""Results in other forms: gate verdicts for CI, the HTML report, paired comparisons, runs as a database."""
