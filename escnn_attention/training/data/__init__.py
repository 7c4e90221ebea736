"""Lightning data modules for images, fields and point clouds."""

# Command lines and configurations name classes that have been imported.
from escnn_attention.training.data import fields  # noqa: F401
from escnn_attention.training.data.clouds import charged_particles, constellations, modelnet40, qm9, springs  # noqa: F401
from escnn_attention.training.data.images import canvas, cifar10, digits, mnist, patch_camelyon  # noqa: F401
