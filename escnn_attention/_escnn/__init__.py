"""What makes escnn work here: faults of its releases that are kept away, and its types for pickle."""
