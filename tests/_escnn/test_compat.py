import importlib.util
import subprocess
from collections.abc import Callable

import pytest

from escnn_attention._escnn.lie_learn import is_usable

# escnn's caches on disk are joblib's: here they start empty.
FRESH_CACHE = """
import sys
import joblib
memory = joblib.Memory
joblib.Memory = lambda location=None, **options: memory(sys.argv[1], verbose=0)
"""
# The import is silent about py3nj. Of that alone: escnn imports torch_geometric where it is installed, which warns too.
PLUGIN = "import warnings\nwarnings.filterwarnings('error', message='.*py3nj')\nimport escnn_attention"
ESCNN = "from escnn import gspaces, nn"
BASES = """
from pathlib import Path
import sklearn.utils.extmath
for gspace in gspaces.flipRot2dOnR2(4), gspaces.conicalOnR3(4):
    scalar, regular = nn.FieldType(gspace, [gspace.trivial_repr]), nn.FieldType(gspace, [gspace.regular_repr])
    convolution = nn.R2Conv if gspace.dimensionality == 2 else nn.R3Conv
    assert convolution(scalar, regular, 3).basisexpansion.dimension() > 0
    assert any(path.is_file() for path in Path(sys.argv[1]).rglob("*")), "the cache was not a fresh one"
"""
ORDERS = {"plugin first": [PLUGIN, ESCNN], "escnn first": [ESCNN, PLUGIN], "escnn alone": [ESCNN]}


@pytest.fixture(scope="module")
def bases_on_a_fresh_cache(
    start_python: Callable[..., subprocess.Popen], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.Popen]:
    """A process for each order of imports, all started at once: they take seconds."""
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("the fault needs scikit-learn")
    return {
        order: start_python("\n".join([FRESH_CACHE, *imports, BASES]), tmp_path_factory.mktemp("cache"))
        for order, imports in ORDERS.items()
        if order == "plugin first" or is_usable()
    }


@pytest.mark.parametrize("order", ["plugin first", "escnn first"])
def test_kernel_bases_can_be_built_on_a_fresh_cache(order, bases_on_a_fresh_cache):
    if order not in bases_on_a_fresh_cache:
        pytest.skip("escnn cannot be imported first where lie_learn cannot")
    output, errors = bases_on_a_fresh_cache[order].communicate(timeout=120)
    assert bases_on_a_fresh_cache[order].returncode == 0, errors
    if order == "plugin first":
        assert "py3nj" not in output + errors


def test_without_the_plugin_they_cannot(bases_on_a_fresh_cache):
    if "escnn alone" not in bases_on_a_fresh_cache:
        pytest.skip("escnn cannot be imported alone where lie_learn cannot")
    process = bases_on_a_fresh_cache["escnn alone"]
    _, errors = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("this scikit-learn still takes np.matrix")
    assert "np.matrix is not supported" in errors


WITHOUT_ESCNN = """
import sys
sys.modules["escnn"] = None
import escnn_attention
import escnn_attention.functional, escnn_attention.plain.self_attention, escnn_attention.plain.blocks
assert not any(name.startswith("escnn.") for name in sys.modules)
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
