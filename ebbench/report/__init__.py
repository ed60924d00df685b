"""Results in other forms: the HTML report, paired comparisons, trends, lists of runs, runs as a database."""
