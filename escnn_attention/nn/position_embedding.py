"""Learned embeddings of the position, as fields."""

from __future__ import annotations

import copy

import torch
from escnn.nn import FieldType, GeometricTensor
from torch import Tensor

from escnn_attention._checks import check_int, check_length
from escnn_attention.encodings import Encoding, as_encoding
from escnn_attention.groups.fibers import fibers, frames, mass
from escnn_attention.groups.samples import Samples, as_samples
from escnn_attention.nn.arguments import check_field, check_type
from escnn_attention.nn.module import PlainModule
from escnn_attention.plain.position_embedding import PositionEmbedding as PlainPositionEmbedding
from escnn_attention.plain.projections import FromPoses

__all__ = ["PositionEmbedding"]


class PositionEmbedding(PlainModule):
    r"""Adds a learned field to features, the same for all inputs: an absolute position embedding that is steerable.

    .. math:: y(x) = f(x) + \sum_h \rho(h)\, W\, \varphi(h^{-1} x)

    with a continuous function :math:`\varphi` of the position and :math:`\rho` the representation of the features. The
    field that is added is invariant, :math:`\rho(g)\,p(g^{-1}x) = p(x)`, whatever :math:`\varphi` is, so that adding it
    commutes with the fiber group. It tells positions apart, and therefore does not commute with translations of an
    image. On a grid x is measured from its centre, in units of half its longest side; at points from the mean of the
    cloud, in units of ``length_scale``, so that translations of a cloud change nothing.

    Args:
        in_type: the type of the input and of the output: any fields.
        encoding: the function :math:`\varphi`, by name or as an object: ``"mlp"``, ``"separable"``, ``"fourier"`` or
            one of your own that is a function of the offset.
        channels: the number of its channels.
        length_scale: the length that is 1 to it, at points.
        samples: which elements stand for a continuous fiber group; None where it is finite.

    Shape:
        ``(B, in_type.size, *space)`` to the same; ``(N, in_type.size)`` at scattered points.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a gspace without a base space, or an encoding that is no function of the position.
        NotImplementedError: the fiber group is continuous, and there are no ``samples``.

    Example:
        >>> import torch
        >>> from escnn_attention import PositionEmbedding, assert_equivariant
        >>> from escnn import gspaces, nn
        >>> g = gspaces.flipRot2dOnR2(4)
        >>> fields = nn.FieldType(g, [g.regular_repr, g.irrep(1, 1), g.trivial_repr])
        >>> assert_equivariant(PositionEmbedding(fields), (2, 11, 7, 7), tolerance=1e-12)

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, for the embedding; Weiler and Cesa, NeurIPS
    2019, for functions that are steerable.
    """

    plain: PlainPositionEmbedding
    pointwise = True

    def __init__(
        self,
        in_type: FieldType,
        *,
        encoding: Encoding | str = "mlp",
        channels: int = 8,
        length_scale: float = 1.0,
        samples: Samples | int | None = None,
    ):
        check_type("in_type", in_type)
        group = fibers(in_type.gspace, as_samples(samples))
        if not group.dimension:
            raise ValueError(f"in_type: {in_type.gspace.name} has no base space, and so no positions")
        kernel, channels = as_encoding(encoding), check_int("channels", channels)
        name = type(kernel).__name__
        if type(kernel).start is not Encoding.start or type(kernel).rotations is not Encoding.rotations:
            raise ValueError(f"encoding: got {name}, needed a function of the position: mlp, separable, fourier")
        function = kernel.bind(group.dimension, 1, channels, 1)
        if function.offsets(torch.zeros(1, group.dimension)) is None:
            raise ValueError(f"encoding: got {name}, needed a function of the position: mlp, separable, fourier")
        project_out = FromPoses(
            frames(in_type, group=group, dual=True), in_type.size, channels, group.order, mass=mass(in_type)
        )
        scale = check_length("length_scale", length_scale)
        super().__init__(in_type, in_type, PlainPositionEmbedding(function, project_out, group.inverse_action, scale))

    def forward(
        self, input: GeometricTensor, batch: Tensor | None = None, *, mask: Tensor | None = None
    ) -> GeometricTensor:
        """Add the embedding.

        Args:
            input: features of type ``in_type``, on a grid or at points.
            batch: ``(N,)``, at points the number of the cloud of each; None for a single cloud.
            mask: ``(N,)``, at points: False for those that are not there, which are left out of the mean and zero.

        Raises:
            TypeError: ``input`` is not a GeometricTensor.
            ValueError: another gspace or type, or a ``batch`` or ``mask`` for a grid, or of another shape.
        """
        x = check_field(input, self.in_type, self)
        for name, value in (("batch", batch), ("mask", mask)):
            if x.coords is None and value is not None:
                raise ValueError(f"{name}: got a {type(value).__name__} for features on a grid; leave it at None")
        return GeometricTensor(self.plain(x.tensor, x.coords, batch, mask), self.out_type, x.coords)

    def export(self) -> torch.nn.Module:
        """A copy as a plain torch module in eval mode, on features of a grid, or on those of points and coordinates."""
        self.eval()
        return copy.deepcopy(self.plain).eval()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, encoding={type(self.plain.encoding).__name__}"
