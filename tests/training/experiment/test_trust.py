"""A folder's own configuration runs nothing but networks, data and optimisers that are known."""

import json
import os
import shutil
import sys

import pytest
import torch
import yaml

from escnn_attention.models import list_models
from escnn_attention.training import recipe
from escnn_attention.training.errors import UserError
from escnn_attention.training.experiment import load_network, run_experiment
from escnn_attention.training.experiment.trust import check_kept
from tests.training.experiment.runs import ROOT, SHORT, files, of

LIGHTNING = "lightning.pytorch"
CALLS = of(f"{LIGHTNING}.callbacks.LambdaCallback", on_test_start="evil_module.run")
WRITES = of(f"{LIGHTNING}.loggers.CSVLogger", save_dir="ELSEWHERE")
NET = "evil_module.Net"

EVIL = """
import torch
open({mark!r}, "w")
class Net(torch.nn.Linear):
    def __init__(self): super().__init__(1, 1)
def run(trainer, module): open({mark!r} + " called", "w")
"""


# Where in the configuration, and what stands there.
HOSTILE = [
    ("trainer.callbacks", [CALLS]),
    ("trainer.callbacks", CALLS),
    ("trainer.callbacks", [f"{LIGHTNING}.callbacks.Timer"]),
    ("trainer.callbacks", "Timer"),
    ("trainer.callbacks", ["Timer"]),
    ("trainer.callbacks", [of("LambdaCallback", on_test_start="evil_module.run")]),
    ("trainer.callbacks", [json.dumps(CALLS)]),
    ("trainer.callbacks", yaml.safe_dump([CALLS])),
    ("trainer.callbacks", "[{class_path: evil_module.Net}]"),
    ("trainer.callbacks", "hidden.yaml"),
    ("trainer.callbacks", "hidden"),
    ("trainer.logger", WRITES),
    ("trainer.logger", [WRITES]),
    ("trainer.logger", json.dumps(WRITES)),
    ("trainer.logger", f"{LIGHTNING}.loggers.CSVLogger"),
    ("trainer.profiler", of(f"{LIGHTNING}.profilers.AdvancedProfiler", dirpath="ELSEWHERE")),
    ("trainer.plugins", [of("evil_module.Net")]),
    ("trainer.strategy", of(f"{LIGHTNING}.strategies.DDPStrategy")),
    ("trainer.default_root_dir", "ELSEWHERE"),
    ("model.network", of(NET)),
    ("model.network", NET),
    ("model.network", "../evil.yaml"),
    ("model.network", of("Net")),
    ("model.network", of([NET])),
    ("model.network", of("torch.nn.Sequential", dict_kwargs=of(NET))),
    ("model.network.init_args.gspace", of(NET)),
    ("model.network.init_args.encoding", {"class_path": "escnn_attention.PairKernel", "dict_kwargs": {"x": of(NET)}}),
    ("model.network.init_args.blocks", [[{"x": [of(NET)]}]]),
    ("model.network.init_args.block", {"norm": "evil_module.run"}),
    ("model.network.class_path", "torch.load"),
    ("model.network.class_path", "torch.hub.load"),
    ("model.network.class_path", "torch.jit.load"),
    ("model.network.class_path", "torch.jit.ScriptModule"),
    ("model.network.class_path", "torch.fx.GraphModule"),
    ("model.network.class_path", "torch.package.PackageImporter"),
    ("model.network.class_path", "torch.utils.data.DataLoader"),
    ("model.network.class_path", "torch.utils.cpp_extension.load_inline"),
    ("model.network.class_path", "torch.nn.modules.linear.torch.load"),
    ("model.network.class_path", "torch.nn.functional.relu"),
    ("model.network.class_path", "torch.nn.parallel.DataParallel.load_state_dict"),
    ("model.network.class_path", "escnn.nn.os.system"),
    ("model.network.class_path", "escnn_attention.training.experiment.run_experiment"),
    ("model.network.class_path", "escnn_attention.training.experiment.command.TensorBoardLogger"),
    ("model.network.class_path", "os.system"),
    ("model.optimizer", of(NET)),
    ("model.optimizer", "evil_module.run"),
    ("model.optimizer", of("torch.optim.lr_scheduler.LambdaLR", lr_lambda="evil_module.run")),
    ("data", of(NET)),
    ("data", f"{LIGHTNING}.LightningDataModule.load_from_checkpoint"),
    ("data.init_args.batch_size", of("evil_module.run")),
    ("data.init_args.path", of("evil_module.run")),
    ("config", "../evil.yaml"),
    ("ckpt_path", "../evil.ckpt"),
    ("folder", "ELSEWHERE"),
    ("trust", True),
]


def with_value(content, place, value):
    changed = json.loads(json.dumps(content))
    *path, last = place.split(".")
    part = changed
    for key in path:
        part = part[key]
    part[last] = value
    return changed


@pytest.fixture
def downloaded(configuration, fitted, tmp_path, monkeypatch):
    """A run from elsewhere with files beside it, and what is left where any of its code runs."""
    run, mark = tmp_path / "run", tmp_path / "it ran"
    fitted(configuration(**SHORT, data__init_args__limit_test=1), run)
    (tmp_path / "evil_module.py").write_text(EVIL.format(mark=str(mark)), encoding="utf-8")
    for place in (run / "hidden", run / "hidden.yaml", tmp_path / "evil.yaml"):
        place.write_text(yaml.safe_dump(CALLS), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(run)
    yield run, mark
    sys.modules.pop("evil_module", None)


def write(run, content):
    (run / "config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


@pytest.mark.slow
def test_what_a_folder_names_is_not_run(downloaded, tmp_path):
    """Nothing is imported, nothing is built, and nothing is written."""
    run, mark = downloaded
    content = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    before = files(run)
    for place, value in HOSTILE:
        value = json.loads(json.dumps(value).replace("ELSEWHERE", str(tmp_path / "elsewhere")))
        write(run, with_value(content, place, value))
        for command in ("validate", "test", "predict"):
            with pytest.raises(UserError) as caught:
                run_experiment([command, "--folder", str(run)])
            assert str(caught.value).startswith(f"{run}/config.yaml: "), place
            assert "--trust" in str(caught.value), place
            assert place.split(".")[0] in str(caught.value), place
        assert not mark.exists(), place
        assert "evil_module" not in sys.modules, place
    write(run, content)
    check_kept(run / "config.yaml")
    assert files(run) | {run / "config.yaml": b""} == before | {run / "config.yaml": b""}
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_with_trust_or_as_the_users_own_it_runs(downloaded, tmp_path):
    """The control: what is refused would have run."""
    run, mark = downloaded
    run_experiment(["test", "--folder", str(run), "--trainer.callbacks", "Timer"])
    content = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    called = mark.with_name("it ran called")
    write(run, with_value(content, "trainer.callbacks", [CALLS]))
    run_experiment(["test", "--folder", str(run), "--trust"])
    assert mark.exists()
    assert called.exists()
    called.unlink()
    run_experiment(["test", "--folder", str(run), "--config", str(run / "config.yaml")])
    assert called.exists()
    logger = with_value(WRITES, "init_args.save_dir", str(tmp_path / "elsewhere"))
    write(run, with_value(content, "trainer.logger", logger))
    run_experiment(["test", "--folder", str(run), "--trust"])
    assert (tmp_path / "elsewhere").exists()


def test_the_data_may_name_the_file_that_they_read(tmp_path):
    path = tmp_path / "config.yaml"
    (tmp_path / "flow data.npz").touch()
    data = of("escnn_attention.training.FieldData", path="flow data.npz", inputs={"vector": 1})
    write(tmp_path, {"task": "fields", "data": data})
    check_kept(path)
    for place in ("data.init_args.split", "model.network.init_args.path"):  # nothing else may
        content = {"data": data, "model": {"network": of("torch.nn.ReLU")}}
        write(tmp_path, with_value(content, place, "flow data.npz"))
        with pytest.raises(UserError, match=rf"{place} is .*, the name of a file"):
            check_kept(path)


@pytest.mark.slow
def test_configurations_that_are_none(downloaded):
    run, mark = downloaded
    path = run / "config.yaml"
    texts = {
        "- 1\n": "it holds a list, not a configuration",
        "model: &x {a: *x}\n": "model.a refers to another part",
        "a: &x [1]\nmodel: *x\n": "it has a part 'a'",
        "task: &x [1]\nmodel: [*x, *x]\n": "model refers to another part",
        "model: !!set {evil_module.Net}\n": "model is a set",
        "model: !!binary aGk=\n": "model is a bytes",
        f"model: !!python/object/apply:os.mkdir [{str(mark)!r}]\n": "it is not YAML",
        "a: [": "it is not YAML",
        "model: " + 3000 * "[" + 3000 * "]": "it is not YAML",
        "#" + (1 << 20) * " ": "it is longer than 1048576 bytes",
    }
    for text, message in texts.items():
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            run_experiment(["test", "--folder", str(run)])
        assert str(caught.value).startswith(f"{path}: {message}")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not YAML"):
        run_experiment(["test", "--folder", str(run)])
    assert not mark.exists()


def test_a_network_larger_than_its_weights_is_not_built(downloaded):
    """Though the checkpoint says that it is of this network."""
    run, _ = downloaded
    checkpoint = torch.load(run / "best.ckpt", weights_only=True)
    changes = {
        "channels": (10**9, r"channels: got 1000000000, needed at most \d+ for weights"),
        "num_heads": (15_000, "more (parameters )?than belong to its weights"),
    }
    content = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    for name, (value, message) in changes.items():
        place = f"model.network.init_args.{name}"
        write(run, with_value(content, place, value))
        facts = checkpoint["callbacks"]["_Provenance"]
        told = with_value(facts["configuration"], place, value)
        torch.save({**checkpoint, "callbacks": {"_Provenance": {**facts, "configuration": told}}}, run / "best.ckpt")
        with pytest.raises(UserError, match=message):
            run_experiment(["test", "--folder", str(run)])
        with pytest.raises(UserError, match=message):
            load_network(run)


def test_pipes_are_no_checkpoints(downloaded):
    run, _ = downloaded
    (run / "best.ckpt").unlink()
    os.mkfifo(run / "best.ckpt")
    with pytest.raises(UserError, match=r"best\.ckpt: .*not a file"):
        run_experiment(["test", "--folder", str(run)])


def test_trust_is_no_option_of_fit(configuration, tmp_path):
    with pytest.raises(UserError, match="--trust"):
        run_experiment(["fit", "--config", str(configuration()), "--folder", str(tmp_path / "run"), "--trust"])


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("configurations/*.yaml")), ids=lambda p: p.stem)
def test_what_trainings_of_this_package_name_is_known(path, tmp_path):
    shutil.copy(path, tmp_path / "config.yaml")
    check_kept(tmp_path / "config.yaml")


@pytest.mark.parametrize("name", list_models(pretrained=True))
def test_what_recipes_name_is_known(name, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe(name)), encoding="utf-8")
    check_kept(tmp_path / "config.yaml")
