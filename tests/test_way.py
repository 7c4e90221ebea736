"""The page on extending the package shows the house as it is, and the way that a tensor takes through it."""

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from escnn import gspaces, nn

from escnn_attention import GroupSelfAttention, TransformerBlock
from escnn_attention.functional.backends.native import why_not_built

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "escnn_attention"
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
STATIONS = re.findall(r"^\d+\. `([\w/]+\.py)`", PAGE, re.MULTILINE)
MOST_STATIONS = 10

IMAGES = 11  # No table and no parameter of the layers below has a multiple of so many numbers: who has, has features.


def has_features(value: object) -> bool:
    """Whether a tensor of all images is in a value."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and value.numel() % IMAGES == 0
    if isinstance(value, nn.GeometricTensor):
        return has_features(value.tensor)
    if isinstance(value, dict):
        return any(map(has_features, value.values()))
    if dataclasses.is_dataclass(value):
        return has_features(vars(value))
    return isinstance(value, (list, tuple)) and any(map(has_features, value))


def files_passed(run: Callable[[], object]) -> list[str]:
    """The files of the package with a function that is given features, in the order of the first of these calls."""
    passed: dict[str, None] = {}

    def profile(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents and has_features(dict(frame.f_locals)):
            passed[path.relative_to(PACKAGE).as_posix()] = None

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(passed)


def layer_and_input():
    gspace = gspaces.rot2dOnR2(4)
    fields = nn.FieldType(gspace, 2 * [gspace.regular_repr])
    layer = GroupSelfAttention(fields, fields, num_heads=2, kernel_size=3)
    assert not any(map(has_features, layer.state_dict().values()))
    x = fields(torch.randn(IMAGES, fields.size, 9, 9, requires_grad=True))
    layer(x)  # The first call makes tables, and has a compiler build the loop.
    return layer, x


needs_compiler = pytest.mark.skipif(bool(why_not_built(torch.float32)), reason="the loop is not built here")


@needs_compiler
def test_a_tensor_passes_the_stations_of_the_page_and_no_more():
    layer, x = layer_and_input()
    assert files_passed(lambda: layer(x)) == STATIONS
    assert len(STATIONS) <= MOST_STATIONS


@needs_compiler
def test_gradients_pass_fewer():
    layer, x = layer_and_input()
    loss = layer(x).tensor.sum()
    passed = files_passed(loss.backward)
    back = PAGE.split("gradients a shorter one")[1].split("\n\n")[0]
    assert set(passed) == set(re.findall(r"`(functional/[\w/]+\.py)`", back))
    assert set(passed) < set(STATIONS)


@needs_compiler
def test_a_longer_way_is_noticed():
    layer, x = layer_and_input()
    block = TransformerBlock(x.type, x.type, attention=layer)
    passed = files_passed(lambda: block(x))
    assert set(STATIONS) < set(passed)
    assert "plain/layer_norm.py" in passed


def test_the_picture_shows_the_stations_of_the_page(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = ROOT / "examples" / "way.py"
    spec = importlib.util.spec_from_file_location("way", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert list(example.STATIONS) == STATIONS
    monkeypatch.setattr(sys, "argv", [str(path), "--output", str(tmp_path), "--dpi", "30"])
    example.main()
    assert [file.name for file in tmp_path.iterdir()] == ["way.png"]
    assert (ROOT / "docs" / "_static" / "way.png").exists()


def rooms_and_files(page: str) -> tuple[list[str], list[str]]:
    """The rooms of the page's list, in its order, and what else it names, by their paths."""
    rooms, paths = [], []
    for line in page.split("## The house")[1].split("```")[1].splitlines()[2:]:
        names = re.findall(r"\b\w+(?:\.py\b|/)", line)
        if line[:3].strip():  # not below a room
            rooms.append(names.pop(0))
        folder = rooms[-1]
        if names and names[0].endswith("/"):
            folder += names.pop(0)
        paths += [folder, *(folder + name for name in names)]
    return rooms, paths


def test_the_page_lists_the_rooms_in_the_order_of_their_imports(house_rules):
    rooms, files = rooms_and_files(PAGE)
    assert [room.rstrip("/").removesuffix(".py") for room in rooms] == list(house_rules.ROOMS)
    missing = [name for name in files if not (PACKAGE / name).exists()]
    assert not missing


def test_a_file_that_is_gone_is_noticed():
    _, files = rooms_and_files(PAGE.replace("cache.py", "cellar.py"))
    assert "geometry/cellar.py" in files
    assert not (PACKAGE / "geometry/cellar.py").exists()


@pytest.fixture(scope="module")
def house_rules():
    spec = importlib.util.spec_from_file_location("house", Path(__file__).with_name("test_house.py"))
    rules = importlib.util.module_from_spec(spec)
    sys.modules["house"] = rules  # for its dataclass
    try:
        spec.loader.exec_module(rules)
        yield rules
    finally:
        del sys.modules["house"]
