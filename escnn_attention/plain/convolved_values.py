"""Values that pass through a kernel of the location, on plain tensors."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from escnn_attention.functional.points.weights import Values

__all__ = ["ConvolvedValues"]


class ConvolvedValues(torch.nn.Module):
    r"""Values that pass through a kernel.

    .. math:: \sum_{j, \hat h} \alpha\, W(h^{-1}\Delta, h^{-1}\hat h)\, v(x_j, \hat h)

    The kernel is :math:`W(\delta, p) = \sum_f \phi_f(\delta) W_f[p]`, with functions :math:`\phi_f` that a network
    makes and one C × C matrix for each of them and every pose.

    Args:
        dim: the coordinates of the relation.
        num_heads: M.
        channels: C.
        num_poses: the poses of the keys; 1 where they have none.
        features: the number of functions.
        pose_features: the number of features of a pose, where the fiber group is continuous.
    """

    def __init__(
        self, dim: int, num_heads: int, channels: int, num_poses: int, *, features: int, pose_features: int = 0
    ):
        super().__init__()
        self.num_poses = num_poses
        self.features = features
        self.kernel = torch.nn.Sequential(
            torch.nn.Linear(dim, 2 * features), torch.nn.SiLU(), torch.nn.Linear(2 * features, features)
        )
        first = cast(torch.nn.Linear, self.kernel[0])
        torch.nn.init.normal_(first.weight, std=2.0)
        torch.nn.init.uniform_(first.bias, -1, 1)
        self.pose_features = pose_features
        # Of a continuous group the kernel is a constant and a linear function of the features of the pose.
        rows = pose_features + 1 if pose_features and num_poses > 1 else num_poses
        weight = torch.randn(num_heads, rows, features, channels, channels)
        self.weight = Parameter(weight * math.sqrt(4 / (features * channels)))

    def bind(self, quotient: Tensor, relative: Tensor | None) -> Values:
        """The sum of the values, each times the kernel."""
        if self.num_poses == 1:
            weight = self.weight.unsqueeze(1)
        elif self.pose_features and relative is not None:
            features = torch.nn.functional.pad(relative.to(self.weight.dtype), (1, 0), value=1.0)
            weight = torch.einsum("hpr,mrfic->mhpfic", features, self.weight) / math.sqrt(features.shape[-1])
        else:
            weight = self.weight[:, quotient]

        return _Bound(self.kernel, weight, self.features)


class _Bound:
    """The sum of the values, each times the kernel.

    Args:
        kernel: makes the functions of the location.
        weight: ``(M, H or 1, P, F, C, C)``; their matrices for every pair of poses.
        features: F.
    """

    def __init__(self, kernel: torch.nn.Module, weight: Tensor, features: int):
        self._kernel, self._weight, self.features = kernel, weight, features

    def __call__(self, p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        poses = seen.shape[1]
        functions = self._kernel(seen).expand(-1, -1, -1, p.shape[-2], -1, -1)
        # For every head and key pose of a group: the values weighted by attention and function,
        # (A · H · F, K) · (K, C).
        weights = torch.einsum("gmhapk,ghapkf->gmpahfk", p, functions)
        sums = weights.flatten(3, 5) @ v.squeeze(2)
        return torch.einsum(
            "gmpahfc,mhpfic->gmhai",
            sums.unflatten(3, weights.shape[3:6]),
            self._weight.expand(-1, poses, -1, -1, -1, -1),
        )
