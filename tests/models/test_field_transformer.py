"""Transformers from fields to fields."""

import numpy as np
import pytest
import torch
from escnn import group, gspaces
from escnn.nn import FieldType

from escnn_attention import sequence_space
from escnn_attention.models import FieldTransformer
from tests import spaces
from tests.layers import drawn

C8 = sequence_space(group.cyclic_group(8))
ACTION = FieldType(C8, [C8.irrep(1), C8.trivial_repr])
N = 4


def head(in_type=ACTION, out_type=ACTION, **options):
    return drawn(
        FieldTransformer(in_type, out_type, **{"fields": 2, "num_blocks": 2, "num_heads": 1, "condition": N, **options})
    )


def error(network, x, condition):
    with torch.no_grad():
        y = network(x, condition)
        return max(
            float((network(x.transform_fibers(g), condition).tensor - y.transform_fibers(g).tensor).abs().max())
            for g in spaces.generators(x.type.gspace)
        )


GROUPS = {"C8": group.cyclic_group(8), "D4": group.dihedral_group(4), "octahedral": group.octa_group()}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("block", [{}, {"causal": True, "encoding": "fourier"}], ids=str)
def test_equivariant_for_any_weights(name, block):
    tokens = sequence_space(GROUPS[name])
    fields = FieldType(tokens, [tokens.fibergroup.irreps()[-1], tokens.trivial_repr, tokens.fibergroup.irreps()[1]])
    network, x = head(fields, fields, block=block), spaces.random_field(fields, 5)
    condition = torch.randn(2, N).double()
    assert error(network, x, condition) < 1e-10
    assert (network(x, condition).tensor - network(x, -condition).tensor).abs().max() > 1e-2
    network.norm.plain.modulation.field = torch.arange(network.norm.in_type.size) % 2
    assert error(network, x, condition) > 1e-4  # the negative control: a scale for each pose


def test_causal_outputs_do_not_see_later_inputs():
    network, x, condition = head(block={"causal": True}), spaces.random_field(ACTION, 6), torch.randn(2, N).double()
    later = ACTION(torch.cat([x.tensor[..., :3], torch.randn(2, 3, 3).double()], 2))
    same = network(x, condition).tensor[..., :3] - network(later, condition).tensor[..., :3]
    assert same.abs().max() < 1e-12
    other = head()
    assert (other(x, condition).tensor - other(later, condition).tensor)[..., :3].abs().max() > 1e-3


@pytest.mark.parametrize("condition", [None, N])
def test_exports_and_masks(condition):
    network, x = head(condition=condition, block={"encoding": "none"}), spaces.random_field(ACTION, 5)
    c = None if condition is None else torch.randn(2, N).double()
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    plain = network.export()
    for hidden in (None, mask):
        torch.testing.assert_close(plain(x.tensor, c, hidden), network(x, c, hidden).tensor)
    y = network(x, c, mask).tensor
    assert not y[1, :, 3:].any()
    alone = network(ACTION(x.tensor[1:, :, :3]), None if c is None else c[1:]).tensor
    torch.testing.assert_close(y[1:, :, :3], alone)
    arguments = (x.tensor,) if c is None else (x.tensor, c)
    program = torch.export.export(plain, arguments, strict=False).module()
    np.testing.assert_allclose(program(*arguments).detach(), network(x, c).tensor.detach(), atol=1e-10)


def test_bad_arguments():
    with pytest.raises(NotImplementedError, match=r"in_type: .*continuous"):
        head(spaces.scalars(gspaces.rot2dOnR2(-1), 2), spaces.scalars(gspaces.rot2dOnR2(-1), 2))
    with pytest.raises(TypeError, match=r"crop: .*no such option"):
        head(block={"crop": 1})
    with pytest.raises(ValueError, match="condition: FieldTransformer got None"):
        head()(spaces.random_field(ACTION, 5))
    with pytest.raises(ValueError, match=r"condition: FieldTransformer .*has none"):
        head(condition=None)(spaces.random_field(ACTION, 5), torch.randn(2, N).double())
