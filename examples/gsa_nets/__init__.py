"""The experiments of GSA-Nets."""
