import pytest
import torch
from escnn import gspaces

from escnn_attention.models import PlatonicTransformer


def small(gspace, in_type=2, out_type=3, **options):
    options = {"fields": 8, "num_blocks": 2, "num_heads": 2, **options}
    return PlatonicTransformer(gspace, in_type, out_type, **options).double().eval()


def test_blocks_have_the_options_that_are_given():
    for options, keys in (({"keys": "all", "norm_scope": "position"}, "all"), (None, "own")):
        (block,) = small(gspaces.rot2dOnR2(4), num_blocks=1, block=options).blocks
        assert block.attention.plain.keys == keys
        assert ("pose" in repr(block.norm)) == (options is None)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("pool", ["sum", None])
def test_is_equivariant(positions, pool):
    gspace = gspaces.octaOnR3()
    named = {"scalar": 1, "vector": 1}
    network = small(gspace, named, named, positions=positions, pool=pool, divisor=2.0)
    x, coords = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    expected = network(x, coords)
    torch.testing.assert_close(network.export()(x, coords), expected, rtol=1e-12, atol=1e-12)
    for g in gspace.fibergroup.generators:
        rho = torch.tensor(network.in_type.representation(g), dtype=torch.float64)
        matrix = torch.tensor(gspace.basespace_action(g), dtype=torch.float64)
        y = network(x @ rho.T, coords @ matrix.T)
        torch.testing.assert_close(y, expected @ rho.T, rtol=1e-10, atol=1e-10)
    assert (network(x, coords + 1) - expected).abs().max() > 1e-6 if positions else True
    if not positions:
        torch.testing.assert_close(network(x, coords + 1), expected, rtol=1e-10, atol=1e-10)


def test_bad_arguments():
    gspace = gspaces.rot2dOnR2(4)
    for options, message in (
        ({"num_heads": 3}, r"^num_heads: got 3, needed a number that gives each head an even part of 8"),
        ({"pool": "max"}, r"^pool: got 'max'"),
        ({"fields": 5, "positions": True}, r"^fields: got 5, needed an even number with positions"),
        ({"divisor": 0.0}, r"^divisor"),
        ({"block": {"norm_kind": "none"}}, r"^norm_kind: got 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            small(gspace, **options)


def test_a_lone_scalar_needs_a_constant_beside_it():
    """Norms take out the scale of what is embedded without a bias, as published."""
    torch.manual_seed(0)
    x, coords = torch.rand(5, 1, dtype=torch.float64) + 0.5, torch.randn(5, 2, dtype=torch.float64)
    changed = x.clone()
    changed[0] *= 3
    differences = []
    for beside in ([], [torch.ones_like(x)]):
        network = small(gspaces.rot2dOnR2(4), 1 + len(beside), num_blocks=1)
        one, other = (
            network.blocks[0](network.embedding(network.in_type(torch.cat([f, *beside], dim=1), coords))).tensor[1:]
            for f in (x, changed)
        )
        differences.append((one - other).abs().max())
    assert differences[0] < 1e-3
    assert differences[1] > 1e-2
