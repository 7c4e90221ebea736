"""Networks of published code, with their weights, in layers of this package."""

from escnn_attention.models.published.load import from_published

__all__ = ["from_published"]
