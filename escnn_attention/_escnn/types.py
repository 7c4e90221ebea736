"""escnn's types of fields and of tensors that belong to one, for what lies below the layers."""

from escnn.nn import FieldType, GeometricTensor

__all__ = ["FieldType", "GeometricTensor"]
