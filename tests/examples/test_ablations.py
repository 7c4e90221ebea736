import pytest

pytest.importorskip("lightning")

from escnn_attention.models import HybridNet
from escnn_attention.training.comparison.groups import gspace_by_name
from examples import ablations

TINY = ["--seeds", "2", "--epochs", "1", "--group", "c2", "--limit-train", "32", "--limit-test", "10"]


def test_every_variant_is_another_network():
    for name, variants in ablations.VARIANTS.items():
        made = []
        for changes in variants.values():
            described = ablations.describe_network(name, "c4", 16, 10, 900)["init_args"] | changes
            network = HybridNet(**described | {"gspace": gspace_by_name("c4")})
            made.append(network)
        assert len({str(network) for network in made}) == len(variants), name


def test_means_and_errors_of_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablations, "VARIANTS", {"steerable": {"the recipe": {}, "wider": {"widths": [2, 2]}}})
    ablations.main([*TINY, "--out", str(tmp_path), "--networks", "steerable"])
    page = (tmp_path / "ablations.md").read_text(encoding="utf-8")
    assert [line.split(" | ")[1] for line in page.splitlines()[2:]] == ["the recipe", "wider"]
    assert all(line.count(" ± ") == 2 for line in page.splitlines()[2:])
    monkeypatch.setattr(ablations, "train", None)  # what is finished is not trained again
    ablations.main([*TINY, "--out", str(tmp_path), "--networks", "steerable"])
    assert (tmp_path / "ablations.md").read_text(encoding="utf-8") == page


def test_mean():
    assert ablations._mean([1.0, 2.0, 3.0]) == "2.0 ± 0.6"
    assert ablations._mean([1.0]) == "1.0"
