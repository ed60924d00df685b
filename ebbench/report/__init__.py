"""Results for other readers: verdicts for CI, the HTML report, exports to other tools' formats, runs as a database."""
