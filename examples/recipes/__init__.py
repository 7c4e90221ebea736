"""Training recipes and their results, beside twins of steerable convolutions."""
