import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from escnn import gspaces, nn
from escnn.group import _clebsh_gordan
from escnn.group.groups import ico, octa
from joblib.memory import MemorizedFunc

from escnn_attention._escnn.lie_learn import is_usable

# escnn's caches on disk are joblib's: here they start empty.
FRESH_CACHE = """
import sys
import warnings
from pathlib import Path
import joblib
import sklearn.utils.extmath
memory = joblib.Memory
joblib.Memory = lambda location=None, **options: memory(sys.argv[1], verbose=0)

def build():
    for gspace in gspaces.rot2dOnR2(2), gspaces.conicalOnR3(2):
        scalar, regular = nn.FieldType(gspace, [gspace.trivial_repr]), nn.FieldType(gspace, [gspace.regular_repr])
        convolution = nn.R2Conv if gspace.dimensionality == 2 else nn.R3Conv
        assert convolution(scalar, regular, 3).basisexpansion.dimension() > 0
        assert any(path.is_file() for path in Path(sys.argv[1]).rglob("*")), "the cache was not a fresh one"
"""
# The import is silent about py3nj.
PLUGIN_FIRST = """
warnings.filterwarnings("error", message=".*py3nj")
import escnn_attention
from escnn import gspaces, nn
build()
"""
ESCNN_FIRST = """
from escnn import gspaces, nn
try:
    build()
except TypeError as error:
    print(error)
warnings.filterwarnings("error", message=".*py3nj")
import escnn_attention
build()
"""


@pytest.fixture
def printed_by(run_python: Callable[..., str], tmp_path: Path) -> Callable[[str], str]:
    """Runs code where kernel bases have to be built."""
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("the fault needs scikit-learn")
    return lambda code: run_python(FRESH_CACHE + code, tmp_path)


def test_kernel_bases_can_be_built_on_a_fresh_cache(printed_by):
    assert printed_by(PLUGIN_FIRST) == ""


def test_kernel_bases_can_be_built_where_escnn_alone_could_not(printed_by):
    """The control, and the other order."""
    if not is_usable():
        pytest.skip("escnn cannot be imported first where lie_learn cannot")
    error = printed_by(ESCNN_FIRST)
    if not error:
        pytest.skip("this scikit-learn still takes np.matrix")
    assert "np.matrix is not supported" in error


WITHOUT_ESCNN = """
sys.modules["escnn"] = None
import escnn_attention
import escnn_attention.functional, escnn_attention.plain.self_attention, escnn_attention.plain.blocks
for name in escnn_attention.__all__:
    try:
        getattr(escnn_attention, name)
    except ImportError as error:
        print(error)
try:
    from escnn_attention import GroupSelfAttention
except ImportError as error:
    print(error)
try:
    escnn_attention.GroupSelfAttentoin
except AttributeError as error:
    print(error)
"""


def test_without_escnn_the_package_says_how_to_install_it(run_python):
    import escnn_attention

    *errors, last = run_python(WITHOUT_ESCNN).splitlines()
    assert len(errors) == len(escnn_attention.__all__) + 1
    for name, error in zip([*escnn_attention.__all__, "GroupSelfAttention"], errors, strict=True):
        assert name in error
        assert "pip install --no-deps escnn" in error
    assert last == "module 'escnn_attention' has no attribute 'GroupSelfAttentoin'"


def test_irreps_of_polyhedra_are_read_without_a_word(capfd):
    group = gspaces.octaOnR3().fibergroup
    irreps = [octa._build_octa_irrep_picklable(group, -1) for _ in range(2)]  # the second from the disk
    assert len(irreps[0]) == len(irreps[1]) == group.order()
    assert capfd.readouterr() == ("", "")
    assert ico._build_ico_irrep_picklable._verbose == octa._build_octa_irrep_picklable._verbose == 0


def test_coefficients_are_read_once(monkeypatch):
    read, call = [], MemorizedFunc.__call__

    def watched(kept, *arguments, **named):
        read.append(kept.func.__name__)
        return call(kept, *arguments, **named)

    monkeypatch.setattr(MemorizedFunc, "__call__", watched)
    remembered = _clebsh_gordan._clebsh_gordan_tensor
    remembered.cache_clear()
    group = gspaces.flipRot2dOnR2(5).fibergroup
    first, again = (group._clebsh_gordan_coeff((1, 1), (1, 1), (1, 2)) for _ in range(2))
    assert first is again
    assert read == ["_clebsh_gordan_tensor"]
    with pytest.raises(ValueError, match="read-only"):
        first += 1
    # As escnn alone has it, which reads it each time.
    alone = remembered.__wrapped__.__wrapped__
    for _ in range(2):
        np.testing.assert_array_equal(alone((1, 1), (1, 1), (1, 2), "DihedralGroup", N=5), first)
    assert len(read) == 3


def test_elements_of_products_are_made_once(monkeypatch):
    group = gspaces.fullOctaOnR3().fibergroup
    elements = list(group.elements)
    monkeypatch.setattr(type(group), "pair_elements", None)
    assert group.order() == len(group.elements) == 48
    assert all(a is b for a, b in zip(group.elements, elements, strict=True))
    monkeypatch.undo()
    # As escnn alone has them, which makes them each time.
    alone = type(group).elements.fget.__wrapped__
    assert alone(group) == elements
    assert alone(group)[0] is not elements[0]
    assert gspaces.flipRot3dOnR3().fibergroup.elements is None


@pytest.mark.parametrize(
    ("name", "gspace", "options"),
    [
        ("R2Conv", gspaces.rot2dOnR2(4), {"padding": 1, "padding_mode": "circular"}),
        ("R3Conv", gspaces.rot2dOnR3(2), {"padding": 1, "padding_mode": "reflect"}),
        ("R2ConvTransposed", gspaces.rot2dOnR2(4), {"padding": 1, "stride": 2, "output_padding": 1}),
        ("R3ConvTransposed", gspaces.rot2dOnR3(2), {"padding": 1, "stride": 2, "output_padding": 1}),
        ("PointwiseMaxPool2D", gspaces.rot2dOnR2(4), {"stride": 2, "ceil_mode": True}),
        ("PointwiseMaxPool3D", gspaces.rot2dOnR3(2), {"stride": 2, "ceil_mode": True}),
    ],
)
def test_exports_have_all_options(name, gspace, options):
    """And escnn's own, the controls, do not."""
    fields = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    types = (fields,) if "Pool" in name else (fields, fields)
    module = getattr(nn, name)(*types, kernel_size=3, **options).eval()
    x = torch.randn(2, fields.size, *gspace.dimensionality * [6])
    expected = module(fields(x)).tensor
    torch.testing.assert_close(module.export()(x), expected)
    alone = type(module).export.__wrapped__(module)(x)
    assert alone.shape != expected.shape or not torch.allclose(alone, expected, atol=1e-3)
