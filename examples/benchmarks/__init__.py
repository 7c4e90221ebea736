"""The benchmark of the attention layers: ``python examples/benchmarks --help``."""
