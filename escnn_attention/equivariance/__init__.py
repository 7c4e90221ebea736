"""Measures of how exactly a module commutes with its group, and what looks into it."""
