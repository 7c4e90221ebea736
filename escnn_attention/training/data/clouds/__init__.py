"""Data sets of point clouds."""
