"""What sets of experiments have in common: runs from configuration files, twins, tables, options of commands."""
