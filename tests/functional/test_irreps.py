"""Maps in irreps: the compiled loop against the sums written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.functional import irreps as module
from tests.functional.cases import in_threads

needs_compiler = pytest.mark.skipif(
    module.why_not_built(torch.float64) is not None, reason=str(module.why_not_built(torch.float64))
)
ORDER = 7


class Case:
    """A map of drawn transforms, with features and fields of it that lie in memory as drawn.

    There are irreps of 1, 2 and 1 components that stand 1, 2 and 2 times in a field, and features of two
    representations of the sizes 2 and 5.
    """

    def __init__(self, images=2, number=9, fields=2, parts=1, groups=1, copies=(2, 3, 4), dtype=torch.float64, lead=0):
        draw = np.random.default_rng(lead)
        self.irreps = [(m, d, k) for (m, d), k in zip(((1, 1), (2, 2), (1, 2)), copies, strict=True)]
        size = sum(m * k for m, _, k in self.irreps)
        numbers = [size % 5 // 2 if size % 5 % 2 == 0 else (size % 5 + 5) // 2]
        numbers.append((size - 2 * numbers[0]) // 5)
        self.shape, self.parts, self.groups = (images, number), parts, parts * groups
        self.fields = fields * self.groups

        def sparse(n):
            return draw.normal(size=(n, n)) * (draw.random((n, n)) < 0.6)

        self.poses = [sparse(ORDER) for _ in range(2)]
        channels, rows = draw.permutation(size), draw.permutation(size)
        self.segments, start = [], 0
        for n, length, factors in ((numbers[0], 2, [sparse(2)]), (numbers[1], 5, [sparse(5), sparse(5)])):
            stretch = slice(start, start + n * length)
            self.segments.append((channels[stretch].reshape(n, length), rows[stretch].reshape(length, n), factors))
            start += n * length
        whole, values = module.tables(ORDER, self.fields, self.irreps, self.poses, self.segments)
        torch.manual_seed(lead)
        count = sum(d * self.fields * k for _, d, k in self.irreps)
        self.weights = torch.randn(count, dtype=dtype)
        self.maps = module.Maps(torch.from_numpy(whole), torch.from_numpy(values).to(dtype), self.weights, self.groups)
        self.x = self.laid_out(images, number, size)
        self.y = [self.laid_out(groups, images, number, ORDER, fields) for _ in range(parts)]
        self.of_fields, self.of_features = torch.randn(self.fields, dtype=dtype), torch.randn(copies[0], dtype=dtype)

    def laid_out(self, *shape):
        """Random numbers of the shape, with their axes in any order in memory."""
        axes = torch.randperm(len(shape))
        return torch.randn(*shape, dtype=self.weights.dtype).permute(*axes).contiguous().permute(*axes.argsort())

    def features_map(self, transposed):
        """The matrix of all transforms of features."""
        matrix = torch.zeros(self.x.shape[2], self.x.shape[2], dtype=self.weights.dtype)
        for channels, rows, factors in self.segments:
            product = torch.from_numpy(np.linalg.multi_dot([*factors, np.eye(len(rows))])).to(matrix)
            for field, of_field in enumerate(channels):
                matrix[np.ix_(rows[:, field], of_field)] = product
        return matrix.T if transposed else matrix

    def each(self, weights):
        """The weights of each irrep, and which rows of features and of a field it has."""
        start = feature = row = 0
        for m, d, k in self.irreps:
            yield (
                weights[start : start + d * self.fields * k].view(d, self.fields, k),
                (feature, m, k),
                (row, m, d),
            )
            start, feature, row = start + d * self.fields * k, feature + m * k, row + m * d

    def to_fields(self, x, weights, bias):
        seen = x @ self.features_map(True)
        parts = [
            torch.einsum("dfk,bnmk->bnmdf", w, seen[..., at : at + m * k].unflatten(-1, (m, k))).flatten(2, 3)
            for w, (at, m, k), _ in self.each(weights)
        ]
        parts[0] = parts[0] + bias
        poses = torch.from_numpy(self.poses[0] @ self.poses[1]).to(weights)
        y = torch.einsum("ih,bnif->bnhf", poses, torch.cat(parts, 2)).unflatten(-1, (self.groups, -1))
        return list(y.movedim(3, 0).chunk(self.parts))

    def to_features(self, y, weights, bias):
        poses = torch.from_numpy(self.poses[0] @ self.poses[1]).to(weights)
        seen = torch.einsum("ih,gbnhc->bnigc", poses, y).flatten(3)
        parts = [
            torch.einsum("dfk,bnmdf->bnmk", w, seen[:, :, at : at + m * d].unflatten(2, (m, d))).flatten(2)
            for w, _, (at, m, d) in self.each(weights)
        ]
        parts[0] = parts[0] + bias
        return torch.cat(parts, 2) @ self.features_map(False)

    def written_out(self):
        """Fields, and the gradients for the case's fields; features, and the gradients for the case's features."""
        leaves = [t.clone().requires_grad_() for t in (self.x, self.weights, self.of_fields)]
        made = self.to_fields(*leaves)
        found = [*made, *torch.autograd.grad(made, leaves, self.y)]
        if self.parts == 1:
            leaves = [t.clone().requires_grad_() for t in (self.y[0], self.weights, self.of_features)]
            features = self.to_features(*leaves)
            found += [features, *torch.autograd.grad(features, leaves, self.x)]
        return [t.detach() for t in found]

    def natively(self):
        def like(t):
            return torch.full_like(t, torch.nan)

        made = [like(t) for t in self.y]
        module.run(self.maps, features=self.x, bias=self.of_fields, made_fields=made)
        grads = [like(self.x), like(self.weights), like(self.of_fields)]
        module.run(self.maps, self.x, self.y, None, grads[0], gradients=grads[1:], bias_of_fields=True)
        found = [*made, *grads]
        if self.parts == 1:
            features, grads = like(self.x), [like(self.y[0]), like(self.weights), like(self.of_features)]
            module.run(self.maps, fields=self.y, bias=self.of_features, made_features=features)
            module.run(self.maps, self.x, self.y, made_fields=grads[:1], gradients=grads[1:])
            found += [features, *grads]
        return found


@needs_compiler
@given(st.data())
def test_the_sums(data):
    small = st.integers(1, 7)
    sizes = {name: data.draw(st.integers(1, 3)) for name in ("images", "parts", "groups")}
    copies = tuple(data.draw(small) + (8 if data.draw(st.booleans()) else 0) for _ in range(3))
    numbers = st.integers(1, 9) | st.integers(60, 140) | st.sampled_from([0, 64, 128])
    case = Case(
        **sizes, number=data.draw(numbers), fields=data.draw(small), copies=copies, lead=data.draw(st.integers(0, 999))
    )
    for found, expected in zip(case.natively(), case.written_out(), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-10)


@needs_compiler
def test_the_same_bits_for_any_number_of_threads():
    case = Case(images=3, number=500, fields=5, groups=2, dtype=torch.float32)
    first, *others = in_threads((1, 2, 5), case.natively)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@needs_compiler
def test_what_is_not_finite_stays_at_its_position():
    case = Case(images=1, number=100, fields=3)
    case.x[0, 17] = torch.inf
    case.y[0][:, 0, 40] = torch.nan
    fields, features = case.natively()[0], case.natively()[4]
    assert not fields[:, 0, 17].isfinite().any(-1).all()
    assert fields[:, 0, torch.arange(100) != 17].isfinite().all()
    assert features[0, torch.arange(100) != 40].isfinite().all()
