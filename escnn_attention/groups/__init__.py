"""What layers need of a group: its elements as tables, and samples of a continuous one."""
