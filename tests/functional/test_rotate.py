"""Rotations of pairs of channels, by the kernel and by operations of PyTorch."""

import pytest
import torch

from escnn_attention.functional import rotate as module
from escnn_attention.functional.rotate import attach_waves, rotate
from tests.functional.cuda import needs_cuda

SHAPES = [
    ((2, 1, 3, 5, 1, 9), (2, 4, 1, 5, 1, 4)),  # all poses rotate the keys of an image
    ((1, 3, 2, 5, 2, 8), (1, 3, 2, 5, 1, 4)),  # several vectors at a position
    ((6, 1, 2, 7, 1, 8), (6, 1, 2, 7, 1, 3)),  # with channels that are left
    ((3, 1, 4, 2, 2, 6), (1, 2, 1, 2, 1, 3)),  # an angle of many vectors
]
POSES = [None, (1, 4, 1, 1, 1, 9), (1, 1, 1, 1, 2, 8), (6, 1, 1, 1, 1, 8), (3, 2, 1, 1, 2, 6)]


def turned(a: torch.Tensor, b: torch.Tensor, angle: torch.Tensor) -> list[torch.Tensor]:
    z = torch.complex(*torch.broadcast_tensors(a, b)) * torch.exp(1j * angle)
    return [z.real, z.imag]


def side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    shape = torch.broadcast_shapes(*(t.shape[:-1] for t in parts))
    return torch.cat([t.expand(*shape, -1) for t in parts], -1)


def complex_product(x: torch.Tensor, angle: torch.Tensor, pose: torch.Tensor | None = None) -> torch.Tensor:
    pairs, x = angle.shape[-1], x if pose is None else x + pose
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return side_by_side([*turned(a, b, angle), x[..., 2 * pairs :]])


def complex_waves(x, angle, amplitudes=None, pose=None):
    if amplitudes is None:
        amplitudes = torch.ones_like(angle).new_tensor([1.0, 0.0]).repeat_interleave(angle.shape[-1])
    a, b = amplitudes.chunk(2, -1)
    out = side_by_side([x if pose is None else x + pose, *turned(a, b, angle)])
    return torch.nn.functional.pad(out, (0, 3))


def compare(device: str, dtype: torch.dtype, shapes: list, tolerance: float, function, formula):
    given = [None if s is None else torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    expected = formula(*given)
    weight = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), [t for t in given if t is not None])]
    given = [None if t is None else t.detach().to(device, dtype).requires_grad_() for t in given]
    out = function(*given)
    found = torch.autograd.grad((out * weight.to(out)).sum(), [t for t in given if t is not None])
    for a, b in zip([out, *found], wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.detach().double().cpu(), b.detach(), rtol=tolerance, atol=tolerance)


def compare_all(device: str, dtype: torch.dtype, shape, angles, tolerance: float):
    fitting = [p for p in POSES if p is None or (p[-1] == shape[-1] and p[4] in (1, shape[4]))]
    amplitudes = (*shape[:1], angles[1], *shape[2:5], 2 * angles[-1])
    width = shape[-1] + 2 * angles[-1] + 3
    for pose in fitting:
        compare(device, dtype, [shape, angles, pose], tolerance, rotate, complex_product)
        for some in (None, amplitudes):
            waves = [shape, angles, some, pose]
            compare(device, dtype, waves, tolerance, lambda *t: attach_waves(*t, width=width), complex_waves)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("shape", "angles"), SHAPES)
@pytest.mark.parametrize("way", ["passes", "operations", "interpreter"])
def test_rotating_is_complex_multiplication(monkeypatch, request, way, shape, angles):
    if way == "operations":
        monkeypatch.setattr(module, "needs_operators", lambda *_: True)
    if way == "interpreter":
        request.getfixturevalue("interpreted_kernels")
        monkeypatch.setattr(module, "_LEAST", 3)  # stretches, of which the last is not full
    compare_all("cpu", torch.float64, shape, angles, 1e-12)


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize(("shape", "angles"), SHAPES)
def test_rotating_on_cuda(shape, angles, dtype, tolerance):
    compare_all("cuda", dtype, shape, angles, tolerance)


def test_of_fewer_axes():
    x, angle = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, angle), complex_product(x, angle))
    torch.testing.assert_close(attach_waves(x, angle, width=16), complex_waves(x, angle))


@pytest.mark.sampled(2, of="machine code for GPUs")
@pytest.mark.parametrize(
    ("dtypes", "waves", "unit", "pose", "chip"),  # pairs of the vectors with a pose, amplitudes, and cosines
    [
        ((torch.bfloat16, torch.bfloat16), False, False, True, 80),
        ((torch.float16, torch.float32), True, False, False, 90),
        ((torch.float64, torch.float64), True, True, True, 80),
    ],
)
def test_kernels_compile_for_a_gpu_in_every_precision(compiled, dtypes, waves, unit, pose, chip):
    def empty(channels, dtype):
        return torch.empty(2, 3, 1, 4, 5, channels, dtype=dtype, device="meta")

    x, amplitudes, angle = empty(7, dtypes[0]), empty(6, dtypes[0]), empty(3, dtypes[1])
    amplitudes = amplitudes if waves and not unit else None
    of_pose = empty(7, dtypes[1]) if pose else None
    arguments = module._Arguments(x, angle, amplitudes, of_pose, waves, 16 if waves else 7)
    assert [one.kernel for one in compiled("rotate:_operator", arguments, chip)] == ["rotate", "rotate_back"]
