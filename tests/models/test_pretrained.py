"""Networks in folders."""

import copy
import importlib.util
import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from escnn import gspaces, nn
from huggingface_hub import PyTorchModelHubMixin
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

from escnn_attention import FieldLayerNorm, PairKernel, Samples, models
from escnn_attention.functional.layout import LAYOUT
from escnn_attention.models import (
    CNN,
    EquivariantClassifier,
    FieldUNet,
    GSANet,
    HamiltonianNetwork,
    HybridNet,
    PointTransformer,
    PretrainedMixin,
    pretrained,
)
from escnn_attention.models.pretrained import CONFIGURATION, shortened
from escnn_attention.models.weights_file import WEIGHTS, digest_of
from tests.layers import CASES

C4, D4 = gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(4)
C8 = gspaces.rot2dOnR2(8)
NOT_FINITE = (math.nan, math.inf, -math.inf)


def hybrid(**options):
    small = {"widths": (4, 4), "convolutions": (1, 0), "attention": (0, 1), "kernel_size": 3, "num_heads": 2}
    return HybridNet(C8, 1, 3, **{**small, **options})


def cnn():
    return CNN(1, 3, widths=(2,), convolutions=(1,), features=2)


def sampled():
    space = gspaces.rot2dOnR2(-1)
    fields = nn.FieldType(space, 2 * [space.fibergroup.bl_regular_representation(1)])
    return PointTransformer(space, 2, "vector", fields=fields, num_blocks=1, num_heads=1, samples=Samples(4))


def molecules():
    options = {"encoding": PairKernel("concat", "raw", "mlp", hidden=3), "attention": {"length_scale": 3.0}}
    return PointTransformer(C4, {"scalar": 2}, 1, fields=2, num_blocks=1, num_heads=1, pool="sum", **options)


def cosets():
    """Subgroups have ids that are tuples, which JSON does not have."""
    return PointTransformer(D4, {"scalar": 2}, 1, fields=2, num_blocks=1, num_heads=1, attention={"poses": (None, 2)})


def cloud():
    return torch.randn(5, 2), torch.randn(5, 2)


NETWORKS = {
    "CNN": (cnn, lambda: (torch.randn(2, 1, 8, 8),)),
    "molecules": (molecules, cloud),
    "cosets": (cosets, cloud),
    "sampled": (sampled, cloud),
}
LISTED = [name for name in CASES if hasattr(models, name.partition(",")[0])]


def trained(make):
    """A network whose weights and running statistics are none that it could begin with."""
    network = make()
    with torch.no_grad():
        for tensor in (*network.parameters(), *(b for n, b in network.named_buffers() if "running" in n)):
            tensor.add_(torch.rand_like(tensor))
    return network.eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a hybrid, and the network; tests that change it take a copy."""
    torch.manual_seed(0)
    network, folder = trained(hybrid), tmp_path_factory.mktemp("saved")
    network.save_pretrained(folder)
    return folder, network


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "network")


def seal(folder, **changes):
    """Change a configuration, with the digest that its author would give it."""
    path = folder / CONFIGURATION
    content = json.loads(path.read_text()) | changes
    content = {name: value for name, value in content.items() if value is not ...}
    path.write_text(json.dumps(content | {"sha256": digest_of(content, folder / WEIGHTS)}))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*NETWORKS, *LISTED])
def test_networks_come_back_from_folders(name, dtype, tmp_path):
    make, inputs = NETWORKS.get(name) or (CASES[name].make, None)
    network = trained(make).train().to(dtype).eval()
    arguments = [x.to(dtype) for x in (inputs() if inputs else CASES[name].inputs(network))]

    def output(of):
        torch.manual_seed(2)  # for lifts that are drawn
        return of(*arguments) if inputs else CASES[name].output(of, *arguments)

    expected = output(network)
    assert network.save_pretrained(tmp_path) is None
    for again in (models.from_pretrained(tmp_path), type(network).from_pretrained(str(tmp_path))):
        assert type(again) is type(network)
        assert not any(module.training for module in again.modules())
        assert torch.equal(output(again), expected)
    assert {path.name for path in tmp_path.iterdir()} == {WEIGHTS, CONFIGURATION, "README.md"}


def test_fields_come_back_in_their_order(tmp_path):
    """Other mappings of the same fields are other types, and so other networks."""
    types = {"in_type": {"vector": 1, "scalar": 2}, "out_type": {"vector": 2, "scalar": 1}}
    sizes = {"widths": (1,), "attention": (1,), "num_heads": 1}
    network = trained(lambda: FieldUNet(gspaces.rot2dOnR2(4), **types, **sizes))
    network.save_pretrained(tmp_path)
    again = models.from_pretrained(tmp_path)
    assert (again.in_type, again.out_type) == (network.in_type, network.out_type)
    x = torch.randn(1, 4, 5, 5)
    assert torch.equal(again(x), network(x))
    content = json.loads((tmp_path / CONFIGURATION).read_text())
    (tmp_path / CONFIGURATION).write_text(json.dumps(content, sort_keys=True))
    with pytest.raises(ValueError, match="has changed since save_pretrained"):
        models.from_pretrained(tmp_path)


def test_networks_are_hub_models(saved):
    assert all(issubclass(cls, PyTorchModelHubMixin) for cls in (PretrainedMixin, GSANet, CNN, HamiltonianNetwork))
    assert "library_name: escnn_attention" in (saved[0] / "README.md").read_text()


def test_the_configuration_has_all_arguments_by_escnn_names(saved):
    configuration = json.loads((saved[0] / CONFIGURATION).read_text())
    assert configuration["class_path"] == "escnn_attention.models.HybridNet"
    assert configuration["gspace"] == {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 8}}
    assert configuration["widths"] == [4, 4]
    assert configuration["conv_kernel"] == 3  # a default
    assert configuration["antialiased"] is False


def test_a_folder_from_before_there_was_an_option(folder, saved):
    x = torch.randn(2, 1, 9, 9)
    seal(folder, antialiased=...)
    assert torch.equal(models.from_pretrained(folder)(x), saved[1](x))
    seal(folder, antialiased=True)  # the control: with another value of the option
    assert not torch.equal(models.from_pretrained(folder)(x), saved[1](x))


def test_weights_are_the_same_in_either_mode(saved, tmp_path):
    folder, network = saved
    copy.deepcopy(network).train().save_pretrained(tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_a_copy_knows_what_it_was_made_with(saved, tmp_path):
    pickle.loads(pickle.dumps(copy.deepcopy(saved[1]))).save_pretrained(tmp_path)
    assert (tmp_path / CONFIGURATION).read_bytes() == (saved[0] / CONFIGURATION).read_bytes()


def test_arguments_can_take_the_place_of_those_in_the_folder(saved):
    folder, network = saved
    x = torch.randn(1, 1, 9, 9)
    changed = models.from_pretrained(folder, block={"backend": "reference"})
    assert changed.stages["attention_2_1"].attention.plain.backend == "reference"
    assert torch.allclose(changed(x), network(x), atol=1e-5)
    with pytest.raises(ValueError, match="nonsense"):
        models.from_pretrained(folder, nonsense=1)


def test_a_base_class_takes_its_kinds_and_no_others(saved):
    assert type(EquivariantClassifier.from_pretrained(saved[0])) is HybridNet
    with pytest.raises(ValueError, match="HybridNet, not a GSANet"):
        GSANet.from_pretrained(saved[0])


def test_a_class_of_somebody_else_loads_its_own(tmp_path):
    class Mine(CNN):
        def __init__(self, features):
            super().__init__(1, 3, widths=(2,), convolutions=(1,), features=features)

    network = Mine(2).eval()
    network.save_pretrained(tmp_path)
    x = torch.randn(1, 1, 8, 8)
    assert torch.equal(Mine.from_pretrained(tmp_path)(x), network(x))
    with pytest.raises(ValueError, match=r"names .*Mine"):
        models.from_pretrained(tmp_path)


def test_saving_again_replaces_the_network_and_keeps_the_card(folder):
    (folder / "README.md").write_text("mine")
    network = trained(cnn)
    network.save_pretrained(folder)
    assert type(models.from_pretrained(folder)) is CNN
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.parametrize("name", [CONFIGURATION, WEIGHTS])
def test_what_is_of_something_else_is_not_replaced(saved, tmp_path, name):
    (tmp_path / name).write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="something else"):
        saved[1].save_pretrained(tmp_path)
    assert (tmp_path / name).read_text() == '{"model_type": "bert"}'
    assert len(list(tmp_path.iterdir())) == 1


def test_what_json_cannot_hold_is_not_saved(tmp_path):
    fields = nn.FieldType(C4, [C4.regular_repr])
    network = EquivariantClassifier({"norm": FieldLayerNorm(fields)}, 3)
    with pytest.raises(ValueError, match=r"stages: .*FieldLayerNorm.*export\(\)"):
        network.save_pretrained(tmp_path / "new")
    with pytest.raises(ValueError, match="config: got one"):
        hybrid().save_pretrained(tmp_path / "new", config={"a": 1})
    assert not (tmp_path / "new").exists()


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("it ran"),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_not_read(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    (folder / WEIGHTS).unlink()
    torch.save({"weight": Trap()}, folder / name)
    with pytest.raises(FileNotFoundError, match=f"{name} .*is a pickle"):
        models.from_pretrained(folder)
    (folder / name).rename(folder / WEIGHTS)  # under another name it is no better
    with pytest.raises(ValueError, match="not a safetensors file"):
        models.from_pretrained(folder)
    assert not (folder / "it ran").exists()


def test_damaged_weights_are_refused(folder):
    whole = (folder / WEIGHTS).read_bytes()
    for part in (whole[:-9], whole[:20], b"", whole + b"more"):
        (folder / WEIGHTS).write_bytes(part)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            models.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="it has no weights"):
        models.from_pretrained(folder)


def test_folders_have_the_layout_of_weights_and_others_are_refused(folder):
    configuration = json.loads((folder / CONFIGURATION).read_text())
    assert configuration["layout"] == LAYOUT
    for layout in (None, LAYOUT + 1, "new"):
        seal(folder, layout=... if layout is None else layout)
        with pytest.raises(ValueError, match=rf"layout {layout}, .*up to {LAYOUT}"):
            models.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("head.weight"), "head.weight is missing"),
        (lambda t: t.update(more=torch.zeros(1)), "more is no tensor of this network"),
        (lambda t: t.update({"head.bias": torch.zeros(7)}), r"head.bias has shape \(7,\), needed \(3,\)"),
        (lambda t: t.update({"head.bias": torch.zeros(3, dtype=torch.int64)}), "head.bias is of torch.int64"),
        *((lambda t, v=v: t["head.bias"].fill_(v), r"head\.bias has .*infinite") for v in NOT_FINITE),
    ],
)
def test_weights_of_another_network_and_what_is_not_finite_are_refused(folder, change, message):
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / WEIGHTS)
    seal(folder)
    with pytest.raises(ValueError, match=message):
        models.from_pretrained(folder)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIGURATION])
def test_no_flipped_bit_is_taken(folder, name):
    path = folder / name
    whole = path.read_bytes()
    for place in range(8, 8 * len(whole), 8 * len(whole) // 60):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            models.from_pretrained(folder)
        assert str(caught.value).rpartition(":")[2].strip()
    path.write_bytes(whole)
    models.from_pretrained(folder)


def test_a_folder_without_a_digest_is_refused(folder):
    content = json.loads((folder / CONFIGURATION).read_text())
    assert len(content.pop("sha256")) == 64
    (folder / CONFIGURATION).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"sha256 .*is missing"):
        models.from_pretrained(folder)
    (folder / CONFIGURATION).write_text(json.dumps({**content, "sha256": 64 * "0", "dropout": 0.5}))
    with pytest.raises(ValueError, match="has changed since save_pretrained"):
        models.from_pretrained(folder)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_what_is_not_finite_is_not_saved(tmp_path, value):
    network = hybrid()
    with torch.no_grad():
        network.head.bias[1] = value
    with pytest.raises(ValueError, match=r"HybridNet: head\.bias has .*infinite"):
        network.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes")
def test_what_never_ends_is_not_read(folder):
    (folder / CONFIGURATION).unlink()
    os.mkfifo(folder / CONFIGURATION)
    with pytest.raises(ValueError, match=r"config\.json is not"):
        models.from_pretrained(folder)
    (folder / CONFIGURATION).unlink()
    (folder / CONFIGURATION).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"config\.json is not"):
        models.from_pretrained(folder)
    (folder / CONFIGURATION).unlink()
    (folder / CONFIGURATION).write_text(" " * (1 << 20) + "{}")
    with pytest.raises(ValueError, match="longer than 1048576 bytes"):
        models.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    (folder / CONFIGURATION).write_text('{"class_path": "escnn_attention.models.HybridNet", "layout": 1}')
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in it"):
        models.from_pretrained(folder)


def test_reasons_are_never_empty(folder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(HybridNet, "__init__", refuse)
    with pytest.raises(ValueError, match=r"its HybridNet: AssertionError$"):
        models.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[]", "names no class_path"),
        ('{"class_path": 3}', "names no class_path"),
        ('{"model_type": "bert"}', "names no class_path"),
        ('{"class_path": "os.mkdir", "layout": 1}', r"names 'os\.mkdir'"),
        ('{"class_path": "escnn_attention.models.PoseMean", "layout": 1}', "no network that is saved"),
        ('{"class_path": "escnn_attention.models.HybridNet", "layout": 1}', "cannot build its HybridNet"),
        ('{"class_path": "escnn_attention.models.CNN", "layout": 1, "x": {"class_path": "os.mkdir"}}', r"os\.mkdir"),
        ('{"class_path": "escnn_attention.models.HybridNet"}', "its weights are in layout None"),
        (8000 * "[" + 8000 * "]", "is not JSON|names no class_path"),
    ],
)
def test_configurations_of_something_else_are_refused(folder, text, message):
    (folder / CONFIGURATION).write_text(text, errors="surrogateescape")
    if text.startswith('{"class_path": "escnn'):
        seal(folder)
    with pytest.raises(ValueError, match=message):
        models.from_pretrained(folder)


def test_a_folder_without_a_configuration_is_refused(folder):
    (folder / CONFIGURATION).unlink()
    with pytest.raises(FileNotFoundError, match="save_pretrained wrote"):
        HybridNet.from_pretrained(folder)
    with pytest.raises(TypeError, match="needed a folder"):
        HybridNet.from_pretrained(3)
    with pytest.raises(FileNotFoundError, match=r"no folder '\./nothing'"):
        HybridNet.from_pretrained("./nothing")


def test_repositories_are_read_file_by_file_and_pickles_never(folder, saved, monkeypatch):
    asked = []

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options.get("revision")))
        if not (folder / filename).exists():
            raise RemoteEntryNotFoundError("404", response=_Response())
        return str(folder / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    x = torch.randn(1, 1, 9, 9)
    assert torch.equal(models.from_pretrained("somebody/hybrid", revision="v1")(x), saved[1](x))
    assert {(repository, revision) for repository, _, revision in asked} == {("somebody/hybrid", "v1")}
    (folder / WEIGHTS).unlink()
    torch.save({"weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pickles, .*run code"):
        HybridNet.from_pretrained("somebody/hybrid")
    assert {name for _, name, _ in asked} == {CONFIGURATION, WEIGHTS}


class _Response:
    """What errors of the Hub look at."""

    def __init__(self):
        self.headers, self.request, self.status_code = {}, None, 404


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch):
    def download(**options):
        raise LocalEntryNotFoundError("cannot find the file on the Hub")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(FileNotFoundError, match=r"'somebody/hybrid'.* cannot be reached"):
        models.from_pretrained("somebody/hybrid")


def test_push_uploads_what_a_folder_has(saved, monkeypatch):
    pushed = {}

    class Api:
        def __init__(self, **options):
            pass

        def create_repo(self, repo_id, **options):
            return type("Repository", (), {"repo_id": repo_id})()

        def upload_folder(self, folder_path, **options):
            pushed.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
            return "https://example.org/commit"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    folder, network = saved
    assert network.push_to_hub("somebody/hybrid") == "https://example.org/commit"
    assert pushed == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_without_huggingface_hub_networks_work_and_say_what_is_missing(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "huggingface_hub" else find(name, *rest)
    )
    spec = importlib.util.spec_from_file_location("without_hub", pretrained.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)

    class Network(without.PretrainedMixin, torch.nn.Linear):
        pass

    network = Network(2, 3)
    assert network(torch.zeros(1, 2)).shape == (1, 3)
    calls = [lambda: network.save_pretrained("x"), lambda: network.push_to_hub("a/b")]
    for call in (*calls, lambda: Network.from_pretrained("x")):
        with pytest.raises(ImportError, match="pip install huggingface_hub safetensors"):
            call()
    assert not issubclass(Network, PyTorchModelHubMixin)


SPACES = [gspaces.flipRot2dOnR2(4), gspaces.dihedralOnR3(3), gspaces.rot2dOnR2(-1), gspaces.octaOnR3()]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.name)
def test_types_are_named_by_their_fields(space):
    scalars = nn.FieldType(space, 3 * [space.trivial_repr])
    mixed = nn.FieldType(space, [space.trivial_repr, space.fibergroup.irreps()[-1], space.fibergroup.irreps()[-1]])
    name, vectors = space.trivial_repr.name, space.fibergroup.irreps()[-1].name
    assert shortened(f"A({scalars}, {mixed}, b=1)") == f"A(3 {name}, 1 {name}, 2 {vectors}, b=1)"


def test_what_does_nothing_is_left_out():
    network = HybridNet(gspaces.rot2dOnR2(4), 1, 3, widths=(4,), convolutions=(1,), attention=(1,), kernel_size=3)
    text = repr(network)
    assert text.splitlines()[1] == f"  C4_on_R2[(None, 4)], {sum(p.numel() for p in network.parameters()):,} parameters"
    assert "(attention): GroupSelfAttention(4 regular, num_heads=4" in text
    assert "(before): FieldLayerNorm(4 regular" in text
    assert "R2Conv(1 irrep_0, 4 regular, kernel_size=5, padding=2, bias=False)" in text
    assert not any(word in text for word in ("Identity", "margin=0", "stride", "SequentialModule()"))
    assert text.count("(") == text.count(")")


def test_other_text_is_left_alone():
    text = "Linear(in_features=2, out_features=[3], bias=True)"
    assert shortened(text) == text
