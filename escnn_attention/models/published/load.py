"""The importer of the networks of all published code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from escnn_attention._checks import check_option
from escnn_attention.functional.call import Normalization
from escnn_attention.models.checkpoint import Checkpoint
from escnn_attention.models.published.attgconv import from_attgconv
from escnn_attention.models.published.g_selfatt import from_gevit, from_gsa
from escnn_attention.models.published.lie_transformer import from_lie_transformer
from escnn_attention.models.published.octic_vit import from_octic_vit
from escnn_attention.models.published.platonic import from_platonic
from escnn_attention.nn.arguments import check_options, option_names
from escnn_attention.nn.pointwise import Activation

_KINDS: dict[str, Callable[..., torch.nn.Module]] = {
    "att_gconvs": from_attgconv,
    "g_selfatt": from_gsa,
    "gevit": from_gevit,
    "lie_transformer": from_lie_transformer,
    "octic_vit": from_octic_vit,
    "platonic": from_platonic,
}


class PublishedOptions(TypedDict, total=False):
    """Options of all importers of published networks: facts that the tensors do not show."""

    crops: Sequence[int] | None
    group: str | None
    lift_samples: int
    normalization: Normalization | None
    pool: Literal["mean", "sum", "max"] | None
    positive_quaternions: bool
    lie_algebra_nonlinearity: str | None
    mc_samples: int
    fill: float
    num_heads: int
    vectors: int
    rope_on_values: bool
    activation: Activation
    divisor: float
    attention: bool
    mean_aggregation: bool


def from_published(
    state_dict: Mapping[str, Tensor | np.ndarray], kind: str, **options: Unpack[PublishedOptions]
) -> torch.nn.Module:
    r"""The network of a state dict of published code, in layers of this package and with these weights.

    Numbers of channels, heads, blocks and classes, and the group, follow from the names and shapes of the tensors.
    Where the published layers commute with their group, the outputs agree to rounding error. Where they do not, the
    loaded network is still equivariant, its outputs differ, and a warning is issued: it is a starting point for
    training. The documentation, "Porting weights", describes and compares each code base.

    ``kind`` is one of:

    - ``"att_gconvs"``: attentive group convolutions, all networks that the published scripts train: :class:`GroupCNN`,
      :class:`AllCNNC`, :class:`ResNet44` and :class:`GroupDenseNet`, plain and attentive. Images must be normalised as
      for the training: those of rotated MNIST, ``(B, 1, 28, 28)``, are ``(pixels / 255 - 0.13249) / 0.29277``,
      transposed as in the published files.
    - ``"g_selfatt"``: GSA-Nets, local and global. The option ``crops``, the margin that each block takes off
      the grid, is required for networks other than the three published ones.
    - ``"gevit"``: GE-ViT, with the same option.
    - ``"lie_transformer"``: the LieTransformer, with its default kernel and that for QM9 ("2232"), and both heads, as
      :class:`LieTransformer`. ``group`` is ``"T(2)"``, ``"T(3)"``, ``"Trivial(2)"`` or ``"Trivial(3)"``, or with
      ``lift_samples`` ``"SE(2)"``, ``"SE(2)_canonical"`` or ``"SE(3)"``; ``normalization`` is ``"softmax"`` (the
      default but for QM9) or ``"count"`` (there ``"dot_product"``); ``pool`` is ``"mean"`` or ``"max"``;
      ``positive_quaternions`` and ``lie_algebra_nonlinearity`` are as there. Attention is to all points, or with
      ``mc_samples`` and ``fill`` to all of the nearest points from which the published network draws some.
    - ``"octic_vit"``: octic vision transformers, hybrid and invariant, DeiT-III and DINOv2, as
      :class:`VisionTransformer`. ``num_heads`` is 16 as published.
    - ``"platonic"``: Platonic Transformers, as :class:`PlatonicTransformer`. ``vectors`` is the number of vectors among
      the features, behind the scalars; ``rope_on_values``, ``attention`` (by default True) and ``mean_aggregation`` are
      as published; ``activation``, ``pool`` and ``divisor`` are as there, by default ``"gelu"``, ``"sum"`` (with
      ``mean_aggregation`` ``"mean"``) and 1. Linear attention, ``attention=False``, is loaded as
      ``normalization="count"``, which needs ``mean_aggregation=True``; sums over the points are refused.

    Args:
        state_dict: the tensors by the names of the published modules, buffers included, with or without ``"module."``
            or ``"backbone."`` in front; if some names begin with ``"weight/"``, as in files that hold images, too, only
            these. Torch tensors or numpy arrays of any floating-point type.
        kind: the code base, see above.
        options: facts that the tensors do not show, see above.

    Returns:
        the network, in eval mode and in PyTorch's default precision.

    Raises:
        TypeError: a value is no array of real numbers, or there is no such option.
        ValueError: an unknown kind; a tensor is missing, has another shape than its network needs or belongs to no
            network, or a group that escnn lacks; the message begins with its name.

    Example:
        >>> import torch
        >>> from escnn_attention.models import from_published
        >>> tensors = {"c1.weight": torch.randn(3, 1, 3, 3), "c7.weight": torch.randn(10, 3, 4, 4, 4)}
        >>> tensors |= {f"c{i}.weight": torch.randn(3, 3, 4, 3, 3) for i in range(2, 7)}
        >>> for i in range(1, 7):
        ...     for name in ("weight", "bias", "running_mean", "running_var"):
        ...         tensors[f"bn{i}.{name}"] = torch.rand(3)
        >>> network = from_published(tensors, kind="att_gconvs")
        >>> network(torch.randn(2, 1, 28, 28)).shape
        torch.Size([2, 10])

    Source: the implementations that the classes of the networks cite; Xu et al., "E(2)-Equivariant Vision Transformer",
    UAI 2023, for GE-ViT.
    """
    load = _KINDS[check_option("kind", kind, tuple(_KINDS))]
    check_options(f"kind {kind!r}", options, option_names(load))
    return load(Checkpoint(state_dict), **options)
