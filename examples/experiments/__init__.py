"""Shared code of the experiments: runs from configuration files, twins, tables, options of commands."""
