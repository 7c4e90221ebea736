import pytest
import torch
from escnn import gspaces
from escnn.nn import FieldType

from escnn_attention.models import LieTransformer, LieTransformerBlock


def small(gspace, **options):
    return LieTransformer(gspace, 2, 3, **{"fields": 4, "num_blocks": 1, "num_heads": 2, **options}).double().eval()


@pytest.mark.parametrize(
    "make", [lambda: gspaces.flipRot2dOnR2(3), lambda: gspaces.octaOnR3(), lambda: gspaces.trivialOnR3()]
)
@pytest.mark.parametrize("options", [{}, {"readout": "points", "pool": "max", "encoding": "rotary"}])
def test_is_invariant(make, options):
    gspace = make()
    network, x = small(gspace, **options), torch.randn(5, 2, dtype=torch.float64)
    coords = torch.randn(5, gspace.dimensionality, dtype=torch.float64)
    expected = network(x, coords)
    for g in gspace.fibergroup.generators:
        matrix = torch.tensor(gspace.basespace_action(g), dtype=torch.float64)
        torch.testing.assert_close(network(x, coords @ matrix.T + 1), expected, rtol=1e-10, atol=1e-10)
    assert (network(x, 2 * coords) - expected).abs().max() > 1e-6
    torch.testing.assert_close(network.export()(x, coords), expected, rtol=1e-12, atol=1e-12)


def test_block_is_equivariant():
    gspace = gspaces.flipRot2dOnR2(4)
    block = LieTransformerBlock(FieldType(gspace, 4 * [gspace.regular_repr]), 2)
    assert max(error for _, error in block.check_equivariance(atol=1e-10, rtol=0)) < 1e-10


def test_bad_arguments():
    gspace = gspaces.rot2dOnR2(4)
    for options, message in (({"pool": "sum"}, "pool: got 'sum'"), ({"readout": "all"}, "readout: got 'all'")):
        with pytest.raises(ValueError, match=message):
            small(gspace, **options)
    with pytest.raises(ValueError, match=r"^in_type: LieTransformer needs trivial"):
        LieTransformer(gspace, FieldType(gspace, [gspace.irrep(1)]), 1, fields=4, num_blocks=1, num_heads=2)


def test_is_saved_and_loaded(tmp_path):
    pytest.importorskip("huggingface_hub")
    network = small(gspaces.rot2dOnR2(4))
    network.save_pretrained(tmp_path)
    x, coords = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    torch.testing.assert_close(LieTransformer.from_pretrained(tmp_path)(x, coords), network(x, coords), rtol=0, atol=0)
