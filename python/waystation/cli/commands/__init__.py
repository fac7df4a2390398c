"""One module for each command; each has `run`, which prints the outcome and ends with an exit code."""
