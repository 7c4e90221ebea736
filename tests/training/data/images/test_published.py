import itertools
import os
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import requests
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from escnn_attention.training.data import CIFAR10, MNIST, PatchCamelyon, RotMNIST
from escnn_attention.training.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """A rotmnist.npz with 20 images to train, 7 to validate and 9 to test, labelled by their numbers modulo 10."""
    generator = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 20), ("valid", 7), ("test", 9)):
        arrays[f"{part}_images"] = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(count) % 10
    np.savez(tmp_path / "rotmnist.npz", **arrays)
    return tmp_path


def loaded(folder, rank=0, world_size=1, **options):
    module = RotMNIST(folder, **options)
    module.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=0))),
    )
    module.prepare_data()
    module.setup()
    return module


def joined(loader, epoch=0):
    loader.sampler.set_epoch(epoch)
    batches = list(loader)
    return [images for images, _ in batches], [labels.tolist() for _, labels in batches]


def flat(batches):
    return list(itertools.chain(*batches))


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_see_together_what_one_sees(folder, world_size):
    single, labels = joined(loaded(folder, batch_size=6, seed=5).train_dataloader(), epoch=2)
    assert [len(images) for images in single] == [6, 6, 6]  # 20 images: two are left out
    parts = [
        joined(loaded(folder, rank, world_size, batch_size=6, seed=5).train_dataloader(), epoch=2)
        for rank in range(world_size)
    ]
    for number, batch in enumerate(single):
        assert torch.equal(torch.cat([images[number] for images, _ in parts]), batch)
        assert flat(labels[number] for _, labels in parts) == labels[number]
    # The control: another epoch has another order.
    assert joined(loaded(folder, batch_size=6, seed=5).train_dataloader(), epoch=3)[1] != labels


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("name", "count"), [("val", 7), ("test", 9), ("predict", 9)])
def test_every_image_is_evaluated_once(folder, world_size, name, count):
    seen = []
    for rank in range(world_size):
        module = loaded(folder, rank, world_size, batch_size=6)
        seen += flat(joined(getattr(module, f"{name}_dataloader")())[1])
    assert sorted(seen) == [number % 10 for number in range(count)]


def test_limits(folder):
    with pytest.warns(UserWarning, match="limit_test: got 100, but there are 9 images: all of them are used") as warned:
        module = loaded(folder, batch_size=2, limit_train=5, limit_valid=3, limit_test=100, eval_batch_size=4)
    assert len(warned) == 1
    train, valid, test = (
        joined(loader)[1] for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader())
    )
    assert [len(batch) for batch in train] == [2, 2]
    assert set(flat(train)) < set(range(5))
    assert valid == [[0, 1, 2]]
    assert test == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"eval_batch_size": -1}, "eval_batch_size must be at least 1, got -1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"num_workers": -2}, "num_workers must be at least 0"),
        ({"limit_train": 0}, "limit_train must be at least 1"),
        ({"limit_valid": 0}, "limit_valid must be at least 1"),
        ({"limit_test": 0}, "limit_test must be at least 1"),
        ({"batch_size": True}, "batch_size must be an integer, got True"),
        ({"batch_size": "8"}, "batch_size must be an integer, got '8'"),
        ({"eval_batch_size": 2.0}, r"eval_batch_size must be an integer, got 2\.0"),
        ({"limit_train": 0.5}, r"limit_train must be an integer, got 0\.5"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"num_workers": False}, "num_workers must be an integer, got False"),
    ],
)
@pytest.mark.parametrize("module", [RotMNIST, MNIST, CIFAR10, PatchCamelyon])
def test_arguments_are_checked_at_once(module, options, message):
    with pytest.raises(UserError, match=message):
        module(**options)


def test_batches_that_cannot_be_shared(folder):
    module = loaded(folder, 0, 2, batch_size=5, eval_batch_size=3)
    with pytest.raises(UserError, match="batch_size must be a multiple of the number of processes, got 5 for 2"):
        module.train_dataloader()
    with pytest.raises(UserError, match="eval_batch_size must be a multiple of the number of processes, got 3 for 2"):
        module.val_dataloader()


def test_fewer_images_than_a_batch(folder):
    with pytest.raises(UserError, match="batch_size must be at most the number of training images, got 21 for 20"):
        loaded(folder, batch_size=21).train_dataloader()
    assert len(loaded(folder, batch_size=20).train_dataloader()) == 1


def test_fewer_images_than_processes(folder):
    with pytest.raises(UserError, match="limit_test must be at least the number of processes, got 2 for 3"):
        loaded(folder, 0, 3, batch_size=3, limit_test=2).test_dataloader()


def test_images_that_are_not_loaded(folder):
    module = RotMNIST(folder)
    module.setup("test")
    module.test_dataloader()
    with pytest.raises(UserError, match="call prepare_data"):
        module.val_dataloader()
    with pytest.raises(UserError, match="stage must be one of fit, validate, test, predict, got 'train'"):
        module.setup("train")


@pytest.mark.parametrize("module", [RotMNIST, MNIST, CIFAR10, PatchCamelyon])
def test_without_a_download_the_error_says_what_to_put_where(tmp_path, module):
    data = module(tmp_path, download=False)
    data.prepare_data()
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError) as caught:
        data.setup("fit")
    for part in (str(tmp_path), module.files, "`folder`", "ESCNN_ATTENTION_DATA", "`download`"):
        assert part in str(caught.value)


@pytest.mark.parametrize("module", [RotMNIST, MNIST, CIFAR10, PatchCamelyon])
def test_a_folder_that_does_not_exist(tmp_path, module):
    with pytest.raises(UserError, match=r"nowhere does not exist: give one that holds .* with .*folder"):
        module(tmp_path / "nowhere").prepare_data()


@pytest.mark.parametrize("module", [RotMNIST, MNIST, CIFAR10, PatchCamelyon])
def test_offline(tmp_path, module, monkeypatch):
    def refuse(*_, **__):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr("requests.get", refuse)
    monkeypatch.setattr("pooch.core.time.sleep", lambda _: None)
    with pytest.raises(UserError, match=r"cannot download https://.*no route.*copy .* folder"):
        module(tmp_path).prepare_data()
    assert not list(tmp_path.glob("[!.]*"))


class _Recorder(pl.LightningModule):
    """Keeps the labels that it is given."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(28 * 28, 10)
        self.seen = {"train": [], "valid": [], "test": []}

    def training_step(self, batch, _):
        images, labels = batch
        self.seen["train"].append((self.current_epoch, *labels.tolist()))
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def validation_step(self, batch, _):
        self.seen["valid"] += batch[1].tolist()

    def test_step(self, batch, batch_index):
        self.seen["test"] += batch[1].tolist()

    def predict_step(self, batch, _):
        return self.layer(batch[0].flatten(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(epochs, *callbacks):
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


@pytest.mark.filterwarnings("ignore")
def test_with_a_trainer(folder):
    data = RotMNIST(folder, batch_size=6, seed=1)
    model = _Recorder()
    trainer(3).fit(model, datamodule=data)
    assert len(model.seen["train"]) == 3 * 3
    assert model.seen["valid"] == 3 * list(range(7))
    orders = [[labels for t, *labels in model.seen["train"] if t == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]

    trainer(1).test(model, datamodule=data, verbose=False)
    assert model.seen["test"] == list(range(9))
    predictions = trainer(1).predict(model, datamodule=data)
    assert [len(batch) for batch in predictions] == [6, 3]


class _StopError(Exception):
    pass


class _StopAfter(pl.Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, _):
        if trainer.current_epoch > self.epoch:
            raise _StopError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(folder, tmp_path, num_workers):
    whole, first, second = _Recorder(), _Recorder(), _Recorder()
    trainer(4).fit(whole, datamodule=RotMNIST(folder, batch_size=6, seed=1))

    def data():
        return RotMNIST(folder, batch_size=6, seed=1, num_workers=num_workers)

    save = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
    with pytest.raises(_StopError):
        trainer(4, save, _StopAfter(1)).fit(first, datamodule=data())
    trainer(4).fit(second, datamodule=data(), ckpt_path=tmp_path / "last.ckpt")
    assert [epoch for epoch, *_ in second.seen["train"]] == 3 * [2] + 3 * [3]
    assert first.seen["train"] + second.seen["train"] == whole.seen["train"]


def test_options_from_a_configuration_file(tmp_path):
    jsonargparse = pytest.importorskip("jsonargparse")
    (tmp_path / "run.yaml").write_text(
        f"""
        data:
          class_path: escnn_attention.training.data.CIFAR10
          init_args:
            folder: {tmp_path}
            batch_size: 24
            limit_test: 7
            augment: true
        """
    )
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    instantiate = parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes
    data = instantiate(parser.parse_args(["--config", str(tmp_path / "run.yaml")])).data
    assert isinstance(data, CIFAR10)
    assert (str(data.folder), data.batch_size, data.limits["test"], data.augment) == (str(tmp_path), 24, 7, True)
    assert (data.seed, data.full_train, data.limits["train"]) == (0, False, None)
    for name in ("RotMNIST", "MNIST", "PatchCamelyon"):
        arguments = [f"--data=escnn_attention.training.data.{name}", "--data.batch_size=16", "--data.folder=null"]
        data = instantiate(parser.parse_args(arguments)).data
        assert (type(data).__name__, data.batch_size, data.folder) == (name, 16, None)
