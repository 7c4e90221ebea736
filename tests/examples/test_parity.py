"""The script that compares with published code, where there is none of it."""

import sys

import numpy as np
import pytest
import torch

from escnn_attention.models import from_published
from examples import parity
from tests.models.published.test_attgconv import rotated_mnist

CODE = """
import torch
from escnn_attention.models import from_published
from tests.models.published.test_attgconv import rotated_mnist


class P4CNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tensors = rotated_mnist()
        self.inside = [from_published(self.tensors, "att_gconvs")]  # in which nothing is drawn anew

    def state_dict(self):
        return self.tensors

    def forward(self, x):
        return self.inside[0](x) + self.too_much


P4CNN.too_much = 0
A_P4CNN = A_Ch_P4CNN = A_Sp_P4CNN = fA_P4CNN = P4CNN
"""


@pytest.fixture(autouse=True)
def double():
    default = torch.get_default_dtype()
    yield
    torch.set_default_dtype(default)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["parity.py", *map(str, arguments)])
    parity.main()


def test_table(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "experiments" / "rot_mnist"
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(CODE)
    tensors, x = rotated_mnist(), torch.randn(2, 1, 28, 28)
    network = from_published(tensors, "att_gconvs").double()
    arrays = {f"weight/{n}": t.numpy() for n, t in tensors.items()} | {"input": x.numpy()}
    np.savez(tmp_path / "own.npz", **arrays, logits=network(x.double()).detach().numpy())
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [n for n in sys.modules if n.split(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, name)
    run(monkeypatch, "att_gconvs", tmp_path, "--weights", tmp_path / "own.npz")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        *[f"| {name}: logits" for name in ("P4CNN", "A_P4CNN", "A_Ch_P4CNN", "A_Sp_P4CNN", "fA_P4CNN")],
        "| own, published weights: logits",
    ]
    assert all(float(row[1]) < 1e-5 for row in rows)  # weights in float32
    assert all(float(row[4].strip(" |")) < 1e-10 for row in rows)
    models = sys.modules["experiments.rot_mnist.models"]
    models.P4CNN.too_much = 1
    run(monkeypatch, "att_gconvs", tmp_path)
    assert float(capsys.readouterr().out.splitlines()[2].split(" | ")[1]) > 1e-2


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="no such folder"):
        run(monkeypatch, "gevit", tmp_path / "nowhere")
    with pytest.raises(SystemExit, match="checkout of LieConv"):
        run(monkeypatch, "lie_transformer", tmp_path)
    with pytest.raises(SystemExit, match="no checkout of this"):
        run(monkeypatch, "platonic", tmp_path)
