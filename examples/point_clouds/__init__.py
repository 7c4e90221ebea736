"""Experiments on point clouds: constellations, springs, molecules."""
