"""The equivariant modules, one concept a file."""
