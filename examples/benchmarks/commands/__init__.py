"""The commands, one a file. Each takes its conditions and returns a report."""
