"""Commands of the command line: parse options, call the packages, show results."""
