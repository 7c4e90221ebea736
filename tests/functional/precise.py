"""The formula of attention and its gradients in extended precision, which rounding errors are measured against."""

import numpy as np
import torch

EXTENDED = np.finfo(np.longdouble).eps < 1e-18
"""Whether there is a precision beyond that of float64."""


def exact(q, k, v, grad, own, spatial, pose):
    """The output, and the gradients of q, k, v, spatial and pose.

    Args:
        q: ``(N, J, C)``.
        k, v: ``(K, P, C)``.
        grad: ``(N, H, C)``, of the output.
        own: whether an output pose has its own query pose, or all of them.
        spatial: a table ``(H, L, C)`` and the rows ``(N, K)`` in it, negative for keys that are not seen.
        pose: ``(H, P, C)``.
    """
    q, k, v, grad, table, pose = (t.detach().numpy().astype(np.longdouble) for t in (q, k, v, grad, spatial[0], pose))
    rows, scale = spatial[1].numpy(), 1 / np.sqrt(np.longdouble(q.shape[-1]))
    asking = q[:, :, None] if own else np.repeat(q[:, None], grad.shape[1], 1)  # N, H, J, C
    located = table[:, np.maximum(rows, 0)].transpose(1, 0, 2, 3)[:, :, :, None]  # N, H, K, 1, C
    seen = k + located + pose[:, None]  # N, H, K, P, C
    score = scale * np.einsum("nhjc,nhkpc->nhjkp", asking, seen)
    score = np.where((rows < 0)[:, None, None, :, None], -np.inf, score)
    p = np.exp(score - score.max((-2, -1), keepdims=True))
    p /= p.sum((-2, -1), keepdims=True)
    of_p = np.einsum("nhc,kpc->nhkp", grad, v)[:, :, None]
    of_score = scale * p * (of_p - (p * of_p).sum((-2, -1), keepdims=True))
    of_asking, of_seen = (
        np.einsum("nhjkp,nhkpc->nhjc", of_score, seen),
        np.einsum("nhjkp,nhjc->nhkpc", of_score, asking),
    )
    of_table = np.zeros_like(table)
    n, key = (rows >= 0).nonzero()
    np.add.at(of_table.transpose(1, 0, 2), rows[n, key], of_seen.sum(3)[n, :, key])
    out, of_v = np.einsum("nhjkp,kpc->nhc", p, v), np.einsum("nhjkp,nhc->kpc", p, grad)
    of_q = of_asking[:, :, 0] if own else of_asking.sum(1)
    return [out, of_q, of_seen.sum((0, 1)), of_v, of_table, of_seen.sum((0, 2))]


def errors(got, expected):
    """Of the output relative to its largest number, and of the gradients relative to the largest of all."""
    differences = [abs(a.detach().numpy().astype(np.longdouble) - b).max() for a, b in zip(got, expected, strict=True)]
    largest = [abs(b).max() for b in expected]
    return np.array([differences[0] / largest[0], max(differences[1:]) / max(largest[1:])], float)


def mean_ratio(ours, theirs, dtype):
    """By which factor errors of some draws are larger than others, on geometric average: a draw alone may be lucky."""
    least = torch.finfo(dtype).eps
    ratios = (np.maximum(ours, least), np.maximum(theirs, least))
    return np.exp(np.log(ratios[0] / ratios[1]).mean(0)).max()
