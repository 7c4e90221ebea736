"""Products and sums of many small matrices: against torch's own, in every layout, with derivatives of both orders."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from escnn_attention.functional import matmul as module
from escnn_attention.functional.columns import _Added, add_columns
from escnn_attention.functional.matmul import (
    Columns,
    _GatherColumns,
    add_to_each,
    apart,
    gather_columns,
    grouped_linear,
    grouped_linear_transpose,
    grouped_linears,
    in_groups,
    matmul,
)
from tests.packages import write_down


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def arguments(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [drawn(*shape) for shape in shapes]


# Short rows, short columns, both, neither.
SIZES = [(20, 5, 3), (3, 5, 20), (4, 5, 3), (17, 5, 18), (1, 4, 30), (30, 4, 1)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_products(rows, inner, columns, transposed):
    a = drawn(2, 3, rows, inner)
    b = drawn(2, 3, columns, inner).mT if transposed else drawn(2, 3, inner, columns)
    torch.testing.assert_close(matmul(a, b), a @ b)
    torch.testing.assert_close(matmul(a, b[:, :1]), a @ b[:, :1])
    weight = drawn(2, 3, rows, columns)
    torch.testing.assert_close(
        torch.autograd.grad((matmul(a, b) * weight).sum(), (a, b)),
        torch.autograd.grad(((a @ b) * weight).sum(), (a, b)),
    )


@pytest.mark.parametrize(("rows", "inner", "columns"), [(17, 2, 2), (2, 2, 17), (2, 2, 3)])
@pytest.mark.slow
def test_derivatives_of_both_orders(rows, inner, columns):
    for check in torch.autograd.gradcheck, torch.autograd.gradgradcheck:
        assert check(matmul, (drawn(2, rows, inner), drawn(2, inner, columns)))
        assert check(add_to_each, (drawn(2, 3, columns), drawn(2, 1, columns)))


# As PyTorch's own products, whose double precision autocast leaves alone.
under_autocast = pytest.mark.parametrize(
    ("dtype", "lower"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)]
)


@under_autocast
def test_half_precision_under_autocast(dtype, lower):
    a, b = (t.detach().to(dtype).requires_grad_() for t in (drawn(2, 20, 5), drawn(2, 5, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        y = matmul(a, b)
        assert y.dtype == (a @ b).dtype == lower
    assert [g.dtype for g in torch.autograd.grad(y.float().sum(), (a, b))] == [dtype, dtype]


@pytest.mark.parametrize("transposed", [False, True])
def test_long_sums_are_made_in_parts_where_there_are_many_cores(monkeypatch, transposed):
    """The gradients of weights of a network at every pair of points."""
    a, b = torch.randn(2, 3, 47, dtype=torch.float64), torch.randn(2, 47, 4, dtype=torch.float64)
    if transposed:
        b = b.mT.contiguous().mT
    expected, summed = a @ b, []
    monkeypatch.setattr(module.launch, "DEVICES", {"cpu"})
    monkeypatch.setattr(module, "_LONG_SUM", 40)
    monkeypatch.setattr(module, "_PARTS", 5)
    monkeypatch.setattr(module, "_sum_in_parts", lambda *t, f=module._sum_in_parts: summed.append(f(*t)) or summed[-1])
    torch.testing.assert_close(matmul(a, b), expected)
    weight, x = (
        torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(2, 4, 47, dtype=torch.float64),
    )
    (grad,) = torch.autograd.grad((matmul(weight, x) * a).sum(), weight)
    torch.testing.assert_close(grad, a @ x.mT)
    assert len(summed) == 2
    monkeypatch.setattr(module, "_FEW_SUMS", 11)
    assert torch.equal(matmul(a, b), expected)
    assert len(summed) == 2


@pytest.mark.parametrize("shape", [(2, 4, 3, 1, 6), (2, 4, 1, 1, 6), (2, 4, 3, 5, 6), (6,)])
def test_sums_with_rows_that_all_share(shape):
    x, rows = drawn(2, 4, 3, 5, 6), drawn(*shape)
    torch.testing.assert_close(add_to_each(x, rows), x + rows)
    torch.testing.assert_close(
        add_to_each(x, rows[..., ::2].repeat_interleave(2, -1)), x + rows[..., ::2].repeat_interleave(2, -1)
    )
    assert add_to_each(x.float(), rows).dtype == torch.float64


# With many channels for a group one product is taken for all of them.
channels = pytest.mark.parametrize("size", [3, 13])


@pytest.fixture(params=["ours", "PyTorch's"])
def gradients(request, monkeypatch):
    """Of maps of how few numbers PyTorch takes the gradients."""
    monkeypatch.setattr(module, "SMALL", 0 if request.param == "ours" else 2**20)


@pytest.mark.sampled(4)
@channels
@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.usefixtures("gradients")
def test_grouped_products(size, groups, biased):
    x, weight, y, added, shift = arguments((4, size), (groups, 2, size), (groups, 4, 2), (groups, 2), (size,))
    mapped, collected = torch.einsum("ns,gos->gno", x, weight), torch.einsum("gno,gos->ns", y, weight)
    for function, given, expected, bias, added_to_each in (
        (grouped_linear, x, mapped, added, added[:, None]),
        (grouped_linear_transpose, y, collected, shift, shift),
    ):
        inputs = (given, weight, bias) if biased else (given, weight)
        expected = expected + added_to_each if biased else expected
        torch.testing.assert_close(function(*inputs), expected)
        for check in torch.autograd.gradcheck, torch.autograd.gradgradcheck:
            assert check(function, inputs)


@channels
@under_autocast
@pytest.mark.usefixtures("gradients")
def test_grouped_products_under_autocast(dtype, lower, size):
    x, weight, y = (t.detach().to(dtype).requires_grad_() for t in arguments((4, size), (2, 2, size), (2, 4, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        mapped, collected = grouped_linear(x, weight), grouped_linear_transpose(y, weight)
        with_bias = grouped_linear(x, weight, weight[:, :, 0]), grouped_linear_transpose(y, weight, weight[0, 0])
    assert {out.dtype for out in (mapped, collected, *with_bias)} == {lower}
    for out, leaf in ((mapped, x), (collected, y)):
        gradients = torch.autograd.grad(out.float().sum(), (leaf, weight))
        assert [g.dtype for g in gradients] == [dtype, dtype]


@channels
def test_grouped_products_inside_transforms(size):
    """Derivatives in forward mode, and of many at once."""
    x, weight, y, added = (t.detach() for t in arguments((4, size), (5, 2, size), (5, 4, 2), (3, 2)))
    for function, inputs in ((grouped_linear, (x, weight, added)), (grouped_linear_transpose, (y, weight, x[0]))):
        expected, change = torch.func.jvp(function, inputs, inputs)
        torch.testing.assert_close(expected, function(*inputs))
        bilinear = function(inputs[0], weight)
        torch.testing.assert_close(change, function(*inputs) + bilinear)  # linear in each of the three
        many = torch.vmap(function)(*(torch.stack([t, 2 * t]) for t in inputs))
        torch.testing.assert_close(many, torch.stack([function(*inputs), function(*(2 * t for t in inputs))]))


GROUPS = pytest.mark.parametrize("groups", [1, 3])


class Copies(TorchDispatchMode):
    """Counts copies of features: those of a bias have fewer axes."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten.clone.default and args[0].dim() > 3
        return function(*args, **(kwargs or {}))


def columns(groups: int) -> Columns:
    return Columns.of(torch.stack([torch.randperm(5) for _ in range(4)]), groups)


def by_function(weight: torch.Tensor, seen: Columns) -> torch.Tensor:
    """As on a GPU."""
    return _GatherColumns.apply(weight, *seen)


@GROUPS
@pytest.mark.parametrize("gather", [gather_columns, by_function])
def test_columns(groups, gather):
    weight, seen = drawn(6, 5), columns(groups)
    found = gather(weight, seen)
    for field in range(6):
        for pose in range(4):
            place = (0, field, pose) if groups == 1 else (field // 2, pose, field % 2)
            assert torch.equal(found[place], weight[field, seen.seen[pose]])
    with torch.no_grad():
        assert torch.equal(gather_columns(weight, seen), found)
    (weighted,) = torch.autograd.grad((found * (other := drawn(*found.shape))).sum(), weight)
    torch.testing.assert_close(add_columns(other, seen.back), weighted)


@GROUPS
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_a_kernel_adds_columns(monkeypatch, interpreted_kernels, groups, dtype, tolerance):
    seen = Columns.of(torch.stack([torch.randperm(70) for _ in range(4)]), groups)
    of_poses = torch.randn_like(gather_columns(torch.randn(6, 70), seen)).to(dtype).requires_grad_()
    found = add_columns(of_poses, seen.back)
    weight = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, of_poses, weight)
    monkeypatch.undo()
    assert found.dtype == grad.dtype == dtype
    exact = add_columns(of_poses.double(), seen.back)
    assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()
    assert torch.equal(grad, gather_columns(weight, seen))


@pytest.mark.sampled(2, of="machine code for GPUs")
@pytest.mark.parametrize(("dtype", "chip"), [(torch.bfloat16, 80), (torch.float32, 90), (torch.float64, 80)])
def test_kernels_compile_for_a_gpu(compiled, dtype, chip):
    tensors = torch.empty(3, 4, 2, 70, dtype=dtype, device="meta"), torch.empty(4, 70, dtype=torch.long, device="meta")
    assert [one.kernel for one in compiled("columns:_sum_columns", _Added(*tensors), chip)] == ["add_columns"]


@GROUPS
@pytest.mark.usefixtures("gradients")
@pytest.mark.parametrize("size", [2, 2000])  # of which one takes one product for all groups
def test_products_with_columns_are_those_with_what_they_give(groups, size):
    weight, seen, x = drawn(6, 5), columns(groups), drawn(size, 5)
    bias = drawn(groups, 1, 2) if groups > 1 else drawn(1, 6, 1)
    everywhere = in_groups(weight[:, seen.seen], groups)
    expected = torch.einsum("ns,gabs->gnab", x, everywhere) + bias.unsqueeze(1)
    y, shift = drawn(*expected.shape), drawn(5)
    back = torch.einsum("gnab,gabs->ns", y, everywhere) + shift
    for found, wanted, leaves in (
        (grouped_linear(x, weight, bias, seen), expected, (x, weight, bias)),
        (grouped_linear_transpose(y, weight, shift, seen), back, (y, weight, shift)),
    ):
        torch.testing.assert_close(found, wanted)
        like = torch.randn_like(wanted)
        torch.testing.assert_close(
            torch.autograd.grad(found, leaves, like, retain_graph=True),
            torch.autograd.grad(wanted, leaves, like, retain_graph=True),
        )


@GROUPS
@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("held", [0, 2**22])
def test_positions_side_by_side(groups, images, held, monkeypatch):
    """Images of channels are multiplied, and images of channels come out, without a copy; few positions may be."""
    monkeypatch.setattr("escnn_attention.functional.matmul._FEW_GRADIENTS", held)
    weight, seen, x, rows = drawn(6, 5), columns(groups), drawn(images, 5, 3 if held else 1, 2), 3 if held else 1
    bias, shift = drawn(max(1, groups - 1), 1, 2) if groups > 1 else drawn(1, 6, 1), drawn(5)
    everywhere = in_groups(weight[:, seen.seen], groups)
    y = drawn(images, *everywhere.shape[:3], rows, 2)
    lies = [x.movedim(1, -1), y.permute(1, 0, 4, 5, 2, 3)]
    added = torch.cat(
        [bias.expand(-1, *everywhere.shape[1:3]), torch.zeros(groups - len(bias), *everywhere.shape[1:3])]
    )
    expected = torch.einsum("bxys,goas->gbxyoa", lies[0], everywhere) + added[:, None, None, None]
    back = torch.einsum("gbxyoa,goas->bxys", lies[1], everywhere) + shift
    for function, given, wanted, leaf, of_bias in (
        (grouped_linear, lies[0], expected, x, bias),
        (grouped_linear_transpose, lies[1], back, y, shift),
    ):
        grad = torch.randn_like(wanted)
        with Copies() as copies:
            found = function(given, weight, of_bias, seen, True)
            gradients = torch.autograd.grad(found, (leaf, weight, of_bias), torch.empty_like(found).copy_(grad))
        assert not copies.number
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(
            gradients, torch.autograd.grad(wanted, (leaf, weight, of_bias), grad, retain_graph=True)
        )
        with Copies() as copies:
            function(given, weight, of_bias, seen, False)
        assert copies.number or images == 1


@pytest.mark.parametrize("positions", [2, 15, 16, 63, 64])
@pytest.mark.parametrize("few", [False, True])
def test_images_of_few_positions_are_rows(positions, few, monkeypatch):
    """A product for each image would have too few columns, or few numbers."""
    monkeypatch.setattr("escnn_attention.functional.matmul.SMALL", 2**20 if few else 0)
    x, weight = drawn(3, 5, positions).movedim(1, -1), drawn(1, 4, 5)
    forth, back = grouped_linear(x, weight)[0], grouped_linear_transpose(x[None], weight.mT)
    assert (forth.stride(1) == 1) == (positions >= 16)
    assert (back.stride(1) == 1) == (positions >= (64 if few else 16))
    torch.testing.assert_close(forth, x @ weight[0].T)
    torch.testing.assert_close(back, forth)


@GROUPS
@pytest.mark.usefixtures("gradients")
@pytest.mark.slow
def test_derivatives_of_both_orders_with_columns(groups):
    weight, seen, x = drawn(6, 5), columns(groups), drawn(2, 5)
    bias, shift = drawn(1, 1, 2) if groups > 1 else drawn(1, 6, 1), drawn(5)
    y = drawn(*gather_columns(weight, seen).shape[:1], 2, *gather_columns(weight, seen).shape[1:3])
    for check in torch.autograd.gradcheck, torch.autograd.gradgradcheck:
        for gather in gather_columns, by_function:
            assert check(lambda weight, gather=gather: gather(weight, seen), weight)
        assert check(lambda x, weight, bias: grouped_linear(x, weight, bias, seen), (x, weight, bias))
        assert check(lambda y, weight, shift: grouped_linear_transpose(y, weight, shift, seen), (y, weight, shift))


@GROUPS
def test_inside_transforms(groups):
    weight, seen, x = drawn(6, 5).detach(), columns(groups), drawn(2, 5).detach()
    several = torch.stack([weight, 2 * weight])
    found = torch.func.vmap(lambda weight: grouped_linear(x, weight, None, seen))(several)
    torch.testing.assert_close(found[1], 2 * grouped_linear(x, weight, None, seen))
    _, tangent = torch.func.jvp(lambda weight: gather_columns(weight, seen), (weight,), (weight,))
    torch.testing.assert_close(tangent, gather_columns(weight, seen))


@pytest.mark.parametrize("lies", ["by group", "across", "by position", "otherwise"])
def test_parts_have_gradients_in_every_order_of_memory(request, lies):
    """With a gradient in one piece that lies as the product has made what is taken apart."""
    if lies in ("across", "by position"):  # as a GPU would have it
        request.getfixturevalue("interpreted_kernels")
    axes = {
        "by group": (0, 1, 2, 3, 4, 5),
        "across": (1, 0, 4, 5, 2, 3),
        "by position": (1, 2, 3, 0, 4, 5),
        "otherwise": (2, 3, 0, 1, 5, 4),
    }[lies]
    by_group = torch.randn(6, 4, 3, 2, 2, 5, dtype=torch.float64)
    back = [axes.index(i) for i in range(6)]
    made = by_group.permute(axes).contiguous().permute(back).requires_grad_()

    def parts(made):
        return apart(made, 3, made.stride(2) == 2)

    def weighted(made):
        return sum((i + 1) * part.square().sum() for i, part in enumerate(parts(made)))

    (grad,) = torch.autograd.grad(weighted(made), made)
    assert grad.stride() == made.stride()
    assert all(torch.equal(part, whole) for part, whole in zip(parts(made), by_group.chunk(3), strict=True))
    expected = 2 * torch.arange(1.0, 4.0).repeat_interleave(2).view(-1, 1, 1, 1, 1, 1) * by_group
    torch.testing.assert_close(grad, expected.detach())
    assert torch.autograd.gradgradcheck(weighted, made, fast_mode=True)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("biased", [0, 2, 4, 6])
@pytest.mark.parametrize("few", [0, 2**16])
@pytest.mark.parametrize("number", [3, 6])
@pytest.mark.parametrize(("across", "many"), [(False, 64), (True, 64), (True, 0)])
@pytest.mark.usefixtures("gradients")
def test_parts_are_those_of_one_map(gathers, biased, few, number, across, many, monkeypatch):
    """One product or several; some of the first groups have a bias."""
    monkeypatch.setattr("escnn_attention.functional.matmul._FEW", few)
    monkeypatch.setattr("escnn_attention.functional.matmul._MANY_POSITIONS", many)
    weight, seen, x = drawn(6, 5), columns(6) if gathers else None, drawn(2, 5, 3, 2).movedim(1, -1)
    weight = weight if gathers else drawn(6, 2, 1, 5)
    bias = drawn(biased, 1, 1) if biased else None
    leaves = [weight, x] + [bias] * (bias is not None)
    whole = grouped_linear(x, weight, bias, seen, across)
    parts = grouped_linears(number, x, weight, bias, seen, across)
    assert len(parts) == number
    assert all(part.stride(-3) == 1 if across else part.is_contiguous() for part in parts)
    torch.testing.assert_close(torch.cat(list(parts)), whole)
    gradients = torch.autograd.grad(torch.cat(list(parts)).square().sum(), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(whole.square().sum(), leaves))
    write_down(monkeypatch)
    monkeypatch.setattr(module, "_positions_last", lambda _: pytest.fail("nothing in a program reads by positions"))
    torch.testing.assert_close(torch.cat(list(grouped_linears(number, x, weight, bias, seen, across))), whole)
