"""Nothing that a file describes is built that could not belong to the weights beside it."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from escnn import gspaces

from escnn_attention import models
from escnn_attention.models import CNN
from escnn_attention.models.description import DescriptionError
from escnn_attention.models.limits import check_numbers, within
from escnn_attention.models.weights_file import digest_of


def group(name, **arguments):
    return {"class_path": f"escnn.gspaces.{name}", "init_args": arguments}


# What a kilobyte of JSON can ask for.
HOSTILE = [
    {"widths": [10**9, 4]},
    {"widths": [4, -(10**9)]},
    {"widths": [[[10**9]], 4]},
    {"widths": [300, 300]},
    {"attention": [0, 10**6]},
    {"attention": [0, 900]},
    {"convolutions": [900, 1]},
    {"num_heads": 10**9},
    {"features": 10**7},
    {"num_classes": 10**7},
    {"in_channels": 10**12},
    {"kernel_size": 10**5},
    {"conv_kernel": 10**5},
    {"conv_kernel": 15, "gspace": group("rot2dOnR2", N=32)},
    {"stem": 1001},
    {"gspace": group("rot2dOnR2", N=10**5)},
    {"gspace": group("flipRot2dOnR2", N=10**5)},
    {"gspace": group("rot2dOnR2", N=-1, maximum_frequency=10**5)},
    {"gspace": group("rot3dOnR3", maximum_frequency=500)},
    {"block": {"encoding": {"class_path": "escnn_attention.PairKernel", "init_args": {"hidden": 10**9}}}},
    {"block": {"qk_norm": 10**9}},
]


def load_hostile(folder: Path) -> None:
    """Load all of them with three gibibytes more than there are, and in a minute; write what is said of each."""
    import resource

    small = {"widths": (4, 4), "convolutions": (1, 1), "attention": (0, 1), "kernel_size": 3, "num_heads": 2}
    models.HybridNet(gspaces.rot2dOnR2(4), 1, 3, **small).save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, 2 * (used + (3 << 30),))
    resource.setrlimit(resource.RLIMIT_CPU, 2 * (int(time.process_time()) + 60,))
    found = []
    for change in HOSTILE:
        changed = content | change
        path.write_text(json.dumps(changed | {"sha256": digest_of(changed, folder / "model.safetensors")}))
        try:
            models.from_pretrained(folder)
            found.append("loaded")
        except ValueError as error:
            found.append(str(error))
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of memory")
@pytest.mark.slow
def test_hostile_sizes_take_neither_memory_nor_time(fork, tmp_path):
    process = fork(load_hostile, tmp_path)
    process.join(timeout=200)
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == len(HOSTILE)
    for line in found:
        assert "cannot build its HybridNet: " in line
        assert "memory" not in line
        assert "it has more parameters than" in line or "needed at most" in line or "it has a tensor of" in line, line


def test_numbers_are_those_of_the_weights():
    description = {"network": {"class_path": "escnn_attention.models.CNN", "init_args": {"widths": [4, 2000]}}}
    with within(description, 2000, 1):
        pass
    message = r"^network\.widths: got 2000, needed at most 1999 for weights of 1999"
    with pytest.raises(DescriptionError, match=message), within(description, 1999, 1):
        raise AssertionError


@pytest.mark.parametrize(
    "description",
    [
        {"gspace": group("rot2dOnR2", N=129)},
        {"gspace": group("rot2dOnR3", n=129)},
        {"fields": [[{"bl_regular": 129}, 1]]},
        {"fields": [[{"irrep": [0, 129]}, 1]]},
        {"conv_kernel": 128},
        {"attention_dilation": 128},
        {"block": [{"kernel_size": 128}]},
    ],
)
def test_groups_and_extents_have_limits_of_their_own(description):
    with pytest.raises(DescriptionError, match=r"for (a group|an extent)"):
        check_numbers(description, 10**9)


def test_networks_that_would_not_be_loaded_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"stem_kernel: got 129"):
        CNN(1, 3, widths=(2,), convolutions=(1,), features=2, stem_kernel=129).save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(DescriptionError, match="N: got 33"):
        check_numbers({"gspace": group("flipRot2dOnR2", N=33)}, 10**9)


def test_parameters_are_counted_in_this_thread_alone():
    def build(number):
        return [torch.nn.Linear(1, 1, bias=False) for _ in range(number)]

    with within({}, 100, 2):
        build(4)
        other = threading.Thread(target=build, args=(100,))
        other.start()
        other.join()
        with pytest.raises(DescriptionError, match="more parameters than belong"):
            build(1)
    build(100)
    with within({}, 8, 100), pytest.raises(DescriptionError, match="more parameters"):
        torch.nn.Linear(4, 4)


def test_tensors_are_refused_before_they_are_made():
    most = (1 << 27) + 256
    for make in (torch.zeros, torch.empty, torch.randn, lambda *size: torch.zeros(1).repeat(size)):
        with within({}, 1, 1), pytest.raises(DescriptionError, match=f"tensor of {10**14}"):
            make(10**7, 10**7)
    with within({}, 1, 1):
        assert torch.zeros(1).expand(most).shape == (most,)
        with pytest.raises(DescriptionError):
            torch.zeros(1).expand(most + 1)
