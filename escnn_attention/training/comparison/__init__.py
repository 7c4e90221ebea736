"""The comparison of four networks: configurations of experiments, and one table of what they measure."""
