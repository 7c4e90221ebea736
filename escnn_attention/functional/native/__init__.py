"""Loops in C++ for the CPU, and how they are built."""
