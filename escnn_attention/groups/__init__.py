"""Tables of the elements of finite groups, and samples of continuous ones."""
