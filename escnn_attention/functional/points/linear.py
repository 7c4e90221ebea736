"""Attention without a softmax in whole clouds, at a cost that is linear in the number of points."""

from __future__ import annotations

from torch import Tensor

from escnn_attention.functional.grid.linear import sums
from escnn_attention.functional.points.call import MANY, PointCall
from escnn_attention.functional.points.dense import in_clouds, why_no_product


def why_unsupported(call: PointCall) -> str | None:
    """Why a call is not a sum over whole clouds, without a softmax, by an encoding that factorises."""
    if call.normalization != "count":
        return 'it is for normalization="count"'
    return "it has no scores to drop" if call.dropout else why_no_product(call)


def why_not_first(call: PointCall) -> str | None:
    """Why another backend is better for a call that this one could serve."""
    return None if call.has_sums_to_share else f"clouds have no more than {MANY} points, or than a head has channels"


def attention(call: PointCall) -> Tensor:
    """Attention without a softmax in all clouds: see :func:`escnn_attention.functional.attention`."""
    return in_clouds(call, sums)


def exported(call: PointCall) -> Tensor:
    """The same attention in a program that PyTorch exports, for clouds of any sizes."""
    return in_clouds(call, sums, [call.query_points.clouds_at_once()])
