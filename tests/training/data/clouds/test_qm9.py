import io
import os
import tarfile

import numpy as np
import pytest
import torch

from escnn_attention.training import QM9
from escnn_attention.training.data.clouds import qm9
from escnn_attention.training.data.clouds.orientation import matrices
from escnn_attention.training.data.clouds.qm9 import ELEMENTS, NAMES, atom_features, parse_xyz, read
from escnn_attention.training.data.files import Published
from escnn_attention.training.errors import UserError
from tests import samples

COUNT = 40


@pytest.fixture
def arrays():
    """A small stand-in for qm9.npz."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 9, COUNT).astype(np.uint8)
    atoms = int(sizes.sum())
    return {
        "num_atoms": sizes,
        "charges": rng.choice([*ELEMENTS.values()], atoms).astype(np.uint8),
        "positions": rng.standard_normal((atoms, 3)).astype(np.float32),
        "targets": rng.standard_normal((COUNT, 15)),
        "target_names": np.array(NAMES),
        "index": np.arange(1, COUNT + 1, dtype=np.int32),
        "polarizability": rng.standard_normal((COUNT, 6)).astype(np.float32),
        "polarizability_names": np.array(["A_xx", "A_xy", "A_yy", "A_xz", "A_yz", "A_zz"]),
    }


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(qm9, "_NUM_TRAIN", 24)
    monkeypatch.setattr(qm9, "_NUM_VALID", 6)
    monkeypatch.setattr(qm9, "_NUM_EXCLUDED", 2)


@pytest.fixture
def folder(tmp_path, arrays):
    np.savez(tmp_path / "qm9.npz", **arrays)
    return tmp_path


def loaded(folder, **options):
    data = QM9(folder, **{"batch_size": 4, "eval_batch_size": 50, **options})
    data.prepare_data()
    data.setup()
    return data


def order():
    found = np.random.RandomState(0).permutation(COUNT)
    return {"train": found[:24], "valid": found[24:30], "test": found[30:]}


def test_the_published_split(folder, arrays):
    data = loaded(folder)
    starts = np.cumsum(arrays["num_atoms"], dtype=int) - arrays["num_atoms"]
    for part, numbers in order().items():
        taken = data._sources[part].take(range(len(numbers)))
        assert taken.batch.bincount().tolist() == arrays["num_atoms"][numbers].tolist()
        places = np.concatenate([starts[n] + np.arange(arrays["num_atoms"][n]) for n in numbers])
        expected = arrays["positions"][places]
        means = [expected[taken.batch == n].mean(0) for n in range(len(numbers))]
        np.testing.assert_allclose(taken.coords, expected - np.stack(means)[taken.batch], atol=1e-6)
        kinds = [[*ELEMENTS.values()].index(charge) for charge in arrays["charges"][places]]
        assert torch.equal(taken.features, atom_features()[kinds])
    assert len(data.train_dataloader()) == 6
    (batch,) = data.test_dataloader()
    assert batch.targets.shape == (10, 12)
    assert (batch.coords.dtype, batch.features.dtype, batch.targets.dtype) == 3 * (torch.float32,)
    assert data.in_channels == batch.features.shape[1] == 15


def test_atom_features():
    features = atom_features()
    assert features.shape == (5, 15)
    for kind, charge in enumerate((1, 6, 7, 8, 9)):
        expected = np.zeros(15)
        expected[3 * kind : 3 * kind + 3] = 1, charge / 9, (charge / 9) ** 2
        np.testing.assert_allclose(features[kind], expected, rtol=1e-6)


def test_units(folder, arrays):
    data = loaded(folder, standardise=False)
    assert data.targets == ("mu", "alpha", "homo", "lumo", "gap", "r2", "zpve", "U0", "U", "H", "G", "Cv")
    owners = np.repeat(np.arange(COUNT), arrays["num_atoms"])
    atoms = np.array(
        [[((owners == n) & (arrays["charges"] == z)).sum() for z in (1, 6, 7, 8, 9)] for n in range(COUNT)]
    )
    raw = dict(zip(NAMES, arrays["targets"].T, strict=True))
    expected = {
        "mu": raw["Dipole_debye"],
        "alpha": raw["Polarizability_bohr3"],
        "homo": 27.211386245988 * raw["HOMO_au"],
        "lumo": 27.211386245988 * raw["LUMO_au"],
        "gap": 27.211386245988 * raw["HOMO_LUMO_gap_au"],
        "r2": raw["R2_bohr2"],
        "zpve": 27211.386245988 * raw["ZPVE_au"],
        "Cv": raw["Heatcapacity_Cv_cal_mol_K"] - 2.981 * arrays["num_atoms"],
    }
    references = {
        "U0": ("InternalEnergy_0K_au", [-0.500273, -37.846772, -54.583861, -75.064579, -99.718730]),
        "U": ("InternalEnergy_298K_au", [-0.498857, -37.845355, -54.582445, -75.063163, -99.717314]),
        "H": ("Enthalphy_298K_au", [-0.497912, -37.844411, -54.581501, -75.062219, -99.716370]),
        "G": ("GibbsFreeEnergy_298K_au", [-0.510927, -37.861317, -54.598897, -75.079532, -99.733544]),
    }
    for name, (column, atom) in references.items():
        expected[name] = 27.211386245988 * (raw[column] - atoms @ atom)
    (batch,) = data.test_dataloader()
    for place, name in enumerate(data.targets):
        np.testing.assert_allclose(batch.targets[:, place], expected[name][order()["test"]], rtol=1e-6)
    assert data.units == (
        *("D", "bohr³", "eV", "eV", "eV", "bohr²", "meV"),
        *("eV", "eV", "eV", "eV", "cal/(mol K)"),
    )


def test_columns_are_found_by_their_names(folder, arrays):
    (expected,) = loaded(folder).test_dataloader()
    shuffled = np.random.default_rng(0).permutation(15)
    arrays |= {"targets": arrays["targets"][:, shuffled], "target_names": arrays["target_names"][shuffled]}
    np.savez(folder / "qm9.npz", **arrays)
    (batch,) = loaded(folder).test_dataloader()
    assert torch.equal(batch.targets, expected.targets)


def test_targets_are_standardised_by_the_training_molecules(folder):
    plain, data = loaded(folder, standardise=False), loaded(folder)
    train = plain._sources["train"].targets.double()
    torch.testing.assert_close(data.mean, train.mean(0).float())
    torch.testing.assert_close(data.std, train.std(0, correction=0).float())
    found = data._sources["train"].targets
    torch.testing.assert_close(found.mean(0), torch.zeros(12), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.std(0, correction=0), torch.ones(12), rtol=0, atol=1e-5)
    for part in ("valid", "test"):
        source = data._sources[part]
        torch.testing.assert_close(data.original(source.targets), plain._sources[part].targets, rtol=1e-4, atol=1e-4)
    # By those in use, and for the test alone, too.
    alone = QM9(folder, limit_train=10)
    with pytest.raises(UserError, match=r"not known before setup\(\)"):
        alone.original(torch.ones(1, 12))
    alone.setup("test")
    torch.testing.assert_close(alone.mean, train[:10].mean(0).float())
    assert len(alone._sources) == 1


def test_some_targets(folder):
    every, some = loaded(folder, standardise=False), loaded(folder, targets=["gap", "mu"], standardise=False)
    (all_batch,), (batch,) = every.test_dataloader(), some.test_dataloader()
    assert torch.equal(batch.targets, all_batch.targets[:, [4, 0]])
    assert some.units == ("eV", "D")


def test_limits(folder):
    data = loaded(folder, limit_train=8, limit_valid=2, limit_test=100)
    assert len(data.train_dataloader()) == 2
    assert [len(batch.targets) for batch in data.val_dataloader()] == [2]
    assert [len(batch.targets) for batch in data.test_dataloader()] == [10]


def test_the_tensor(folder, arrays, monkeypatch):
    # Here as if all were printed in the frame of the atoms; the frame has tests of its own.
    monkeypatch.setattr(qm9, "in_frame_of_positions", lambda s, c, x, entries, chosen: matrices(entries[chosen]))
    plain, data = (loaded(folder, targets=["polarizability"], standardise=how) for how in (False, True))
    (batch,) = plain.test_dataloader()
    a = arrays["polarizability"][order()["test"]].T
    expected = np.moveaxis(np.array([[a[0], a[1], a[3]], [a[1], a[2], a[4]], [a[3], a[4], a[5]]]), 2, 0)
    np.testing.assert_allclose(batch.targets, expected, rtol=1e-6)
    assert (data.is_tensor, data.units) == (True, ("bohr³",))

    train = plain._sources["train"].targets
    mean = train.diagonal(dim1=1, dim2=2).mean()
    torch.testing.assert_close(data.mean, mean * torch.eye(3))
    torch.testing.assert_close(data.std, (train - data.mean).square().mean().sqrt())
    (standardised,) = data.test_dataloader()
    torch.testing.assert_close(data.original(standardised.targets), batch.targets, rtol=1e-5, atol=1e-5)

    # With the molecule turned, the tensor turns, standardised or not.
    (turned,) = loaded(folder, targets=["polarizability"], rotate_test=True).test_dataloader()
    seen = 0
    for n in range(10):
        one, other = (b.coords[b.batch == n].double() for b in (standardised, turned))
        if torch.linalg.svdvals(one)[2] < 0.5:  # too flat to tell the rotation
            continue
        seen += 1
        rotation = torch.linalg.lstsq(one, other).solution.T
        torch.testing.assert_close(
            turned.targets[n].double(), rotation @ standardised.targets[n].double() @ rotation.T, rtol=0, atol=1e-4
        )
    assert seen > 3
    assert (turned.targets - standardised.targets).abs().max() > 0.1
    # Another order of the entries.
    shuffled = [3, 0, 5, 1, 4, 2]
    for name in ("polarizability", "polarizability_names"):
        arrays[name] = arrays[name][..., shuffled]
    np.savez(folder / "qm9.npz", **arrays)
    (again,) = loaded(folder, targets=["polarizability"]).test_dataloader()
    assert torch.equal(again.targets, standardised.targets)


def test_a_file_without_the_tensor(folder, arrays):
    del arrays["polarizability"]
    np.savez(folder / "qm9.npz", **arrays)
    loaded(folder)
    with pytest.raises(UserError, match="not have polarizability"):
        loaded(folder, targets=["polarizability"])


@pytest.mark.parametrize("targets", [[], ["mu", "mu"], ["dipole"], ["mu", "polarizability"], "all"])
def test_targets_that_there_are_not(targets):
    with pytest.raises(UserError, match=r"targets: .*different ones"):
        QM9(targets=targets)
    assert QM9(targets="mu").targets == ("mu",)


# The published files.


def xyz(number, arrays):
    """A published text of a molecule."""
    start = int(arrays["num_atoms"][:number].sum())
    names = {charge: element for element, charge in ELEMENTS.items()}
    atoms = range(start, start + arrays["num_atoms"][number])
    lines = [
        str(len(atoms)),
        "\t".join(["gdb " + str(number + 1), *map(repr, map(float, arrays["targets"][number])), ""]),
    ]
    for atom in atoms:
        place = "\t".join(np.format_float_positional(value) for value in arrays["positions"][atom])
        lines.append(f"{names[arrays['charges'][atom]]}\t{place}\t-1.5*^-6")
    return "\n".join([*lines, "1341.307\t1341.3284", "C\tC", "InChI=1S/CH4/h1H4\tInChI=1S/CH4/h1H4", ""])


def archive(arrays, changed=None):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:bz2") as members:
        for number in reversed(range(COUNT)):
            text = (changed or {}).get(number, xyz(number, arrays)).encode()
            member = tarfile.TarInfo(f"dsgdb9nsd_{number + 1:06}.xyz")
            member.size = len(text)
            members.addfile(member, io.BytesIO(text))
    return content.getvalue()


LIST = "       Index  InChI\n=====  =====\n  3   CC  InChI=1S\n  30  CN  InChI=1S\n----- \ntotal of compounds\n"


@pytest.fixture
def publish(server, monkeypatch):
    def start(content, listed=LIST):
        served = [server.put("archive", content), server.put("list", listed.encode())]
        files = [Published(file.name, *where) for file, where in zip(qm9.DOWNLOADS, served, strict=True)]
        monkeypatch.setattr(qm9, "DOWNLOADS", files)

    return start


def test_download(tmp_path, arrays, publish, server, monkeypatch):
    publish(archive(arrays))
    monkeypatch.setattr(qm9, "_NUM_TRAIN", 22)
    data = loaded(tmp_path)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["qm9.npz"]
    assert len(data._sources["test"]) == 10
    found = read(tmp_path / "qm9.npz")
    kept = np.array([number for number in range(COUNT) if number + 1 not in (3, 30)])
    owners = np.repeat(np.arange(COUNT), arrays["num_atoms"])
    chosen = np.isin(owners, kept)
    np.testing.assert_array_equal(found.sizes, arrays["num_atoms"][kept])
    np.testing.assert_array_equal(found.charges, arrays["charges"][chosen])
    np.testing.assert_array_equal(found.positions, arrays["positions"][chosen])
    np.testing.assert_allclose(found.targets, arrays["targets"][kept], rtol=1e-15)
    with np.load(tmp_path / "qm9.npz", allow_pickle=False) as content:
        np.testing.assert_array_equal(content["index"], kept + 1)
    requests = len(server.requests)
    loaded(tmp_path)
    assert len(server.requests) == requests == 2


def test_powers_of_ten():
    text = "1\ngdb 5\t" + "\t".join(["1.2*^-3", *["0"] * 14]) + "\t\nO\t-6.*^-05\t 2\t3\t-0.1\n"
    index, charges, positions, targets = parse_xyz(text)
    assert (index, charges.tolist(), targets[0]) == (5, [8], 0.0012)
    np.testing.assert_allclose(positions, [[-6e-5, 2, 3]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "list index"),
        ("2\ngdb 1\n", "2 lines, expected 4 at least"),
        ("1\ngdb 1 2 3\nH 0 0 0 0\n", "gdb and 2 properties, expected gdb and 15"),
        ("1\ngdb 1 " + 15 * "0 " + "\nX 0 0 0 0\n", "an atom that is not one of H, C, N, O, F"),
        ("1\ngdb 1 " + 15 * "0 " + "\nH 0 0 0\n", "with five columns"),
        ("1\ngdb 1 " + 15 * "x " + "\nH 0 0 0 0\n", "could not convert"),
    ],
)
def test_texts_with_other_content(text, message):
    with pytest.raises((ValueError, IndexError), match=message):
        parse_xyz(text)


@pytest.mark.parametrize(
    ("changed", "listed", "message"),
    [
        ({5: "2\nno molecule\n"}, LIST, "cannot read .*dsgdb9nsd"),
        ({}, "nothing", "0 molecules are listed, expected 2"),
    ],
)
def test_archives_with_other_content(tmp_path, arrays, publish, changed, listed, message):
    publish(archive(arrays, changed), listed)
    with pytest.raises(UserError, match=message):
        QM9(tmp_path).prepare_data()
    assert "qm9.npz" not in [path.name for path in tmp_path.glob("[!.]*")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "positions"),
        ({"positions": np.zeros((3, 3))}, r"positions must be floats \(\d+, 3\), found float64 \(3, 3\)"),
        ({"charges": lambda a: a["charges"] * 0 + 5}, "charges must be those of H, C, N, O, F"),
        ({"charges": lambda a: a["charges"].astype(float)}, "charges must be integers"),
        ({"targets": lambda a: a["targets"] * np.nan}, "targets must be finite"),
        ({"target_names": lambda a: np.char.add(a["target_names"], "x")}, "target_names must have Dipole_debye"),
        ({"num_atoms": lambda a: a["num_atoms"] * 0}, "num_atoms must be at least 1"),
        ({"num_atoms": np.array(3)}, r"num_atoms must be integers \(1,\), found int64 \(\)"),
        ({"num_atoms": np.array([object()])}, "allow_pickle"),
        ({"polarizability_names": np.array(list("abcdef"))}, "polarizability_names must be A_xx"),
        ({"polarizability": np.zeros((COUNT, 5))}, r"polarizability must be floats \(40, 6\)"),
    ],
)
def test_files_with_other_content(tmp_path, arrays, change, message):
    for name, value in change.items():
        arrays[name] = value(arrays) if callable(value) else value
    np.savez(tmp_path / "qm9.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(UserError, match=message):
        QM9(tmp_path, targets=["polarizability"]).setup("fit")


def test_too_few_molecules(folder, monkeypatch):
    monkeypatch.setattr(qm9, "_NUM_TRAIN", 34)
    with pytest.raises(UserError, match=r"40 molecules, .*too few"):
        QM9(folder).setup()
    monkeypatch.setattr(qm9, "_NUM_TRAIN", 24)
    with pytest.raises(UserError, match=r"limit_train: .*not differ"):
        QM9(folder, limit_train=1).setup()


real = samples.needs("qm9.npz")


@pytest.fixture
def whole(monkeypatch):
    monkeypatch.setattr(qm9, "_NUM_TRAIN", 100_000)
    monkeypatch.setattr(qm9, "_NUM_VALID", 17_748)


@pytest.mark.sampled(1, of="data sets as they are published")
@real
def test_the_real_data(whole):
    data = QM9(batch_size=1_000)
    data.setup()
    sizes = {part: len(source) for part, source in data._sources.items()}
    assert sizes == {"train": 100_000, "valid": 17_748, "test": 13_083}
    mean, std = (dict(zip(data.targets, values.tolist(), strict=True)) for values in (data.mean, data.std))
    assert (mean["mu"], std["mu"]) == pytest.approx((2.67, 1.50), abs=0.01)
    assert (mean["alpha"], std["alpha"]) == pytest.approx((75.3, 8.17), abs=0.05)
    assert (mean["homo"], std["homo"]) == pytest.approx((-6.54, 0.60), abs=0.01)
    assert (mean["U0"], std["U0"]) == pytest.approx((-76.1, 10.3), abs=0.05)
    # Methane, the first molecule, is put together from its atoms.
    molecules = read(os.path.join(os.environ["ESCNN_ATTENTION_DATA"], "qm9.npz"))
    methane = qm9.in_units(molecules, ["U0", "zpve", "homo"], np.array([0]))[0]
    np.testing.assert_allclose(methane, [-17.1722, 1217.68, -10.5499], rtol=1e-4)


@pytest.mark.sampled(1, of="data sets as they are published")
@real
def test_real_tensors_are_turned_as_their_molecules_are(whole):
    data = QM9(targets=["polarizability"], limit_train=800, limit_valid=1, limit_test=1, standardise=False)
    data.setup("fit")
    clouds = data._sources["train"].take(range(800))
    alphas = clouds.targets.double().numpy()

    def along(tensors):
        """How much the tensors are those of the shapes of their molecules, in the median."""
        found = []
        for n, alpha in enumerate(tensors):
            x = clouds.coords[clouds.batch == n].double().numpy()
            shape, alpha = (a - np.trace(a) / 3 * np.eye(3) for a in (x.T @ x, alpha))
            found.append((shape * alpha).sum() / np.linalg.norm(shape) / np.linalg.norm(alpha))
        return np.median(found)

    # Molecules are polarised most along their length.
    assert along(alphas) > 0.9
    # The control: as the tensors are printed, they do not know how the molecule lies.
    path = os.path.join(os.environ["ESCNN_ATTENTION_DATA"], "qm9.npz")
    printed = matrices(read(path, tensors=True).tensors[np.random.RandomState(0).permutation(130_831)[:800]])
    np.testing.assert_allclose(np.linalg.eigvalsh(printed), np.linalg.eigvalsh(alphas), atol=1e-3)
    assert abs(along(printed)) < 0.3
