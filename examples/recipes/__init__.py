"""Recipes that train, and what they give, beside twins of steerable convolutions."""
