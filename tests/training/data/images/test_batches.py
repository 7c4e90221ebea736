import numpy as np
import torch

from escnn_attention.training.data.images.batches import Batches, FlipAndCrop, ImagesInMemory, flip_and_crop
from escnn_attention.training.data.sampling import Draw


def images(count=6, channels=3, size=8):
    return torch.randint(1, 256, (count, channels, size, size), dtype=torch.uint8)


def test_batches_are_normalised_channel_by_channel():
    pixels = images()
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    batches = Batches(ImagesInMemory(pixels, torch.arange(6)), mean, std)
    chosen, labels = batches[Draw(range(4, 0, -2))]
    assert labels.tolist() == [4, 2]
    assert chosen.dtype == torch.float32
    expected = (pixels[[4, 2]].double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(chosen.double(), expected, rtol=0, atol=1e-6)
    assert pixels.dtype == torch.uint8  # and unchanged
    torch.testing.assert_close(batches[Draw([4])][0], chosen[:1])


def test_windows_of_framed_images():
    pixels = images(count=5)
    flips = torch.tensor([False, True, False, True, False])
    corners = torch.tensor([[2, 2], [2, 2], [0, 4], [3, 1], [2, 2]])
    found = flip_and_crop(pixels, 2, flips, corners)
    for image, flip, (row, column), result in zip(pixels, flips, corners.tolist(), found, strict=True):
        framed = np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)))
        window = framed[:, row : row + 8, column : column + 8]
        np.testing.assert_array_equal(result, window[..., ::-1] if flip else window)
    assert torch.equal(found[0], pixels[0])
    assert not torch.equal(found[1], pixels[1])


def test_what_happens_to_an_image_depends_on_its_index_seed_and_epoch_only():
    pixels = images(count=40)

    def augmented(indices, epoch=0, seed=0):
        return FlipAndCrop(40, 4, seed)(pixels[indices], Draw(indices, epoch))

    everything = list(range(40))
    whole = augmented(everything)
    shuffled = [7, 30, 2]
    assert torch.equal(augmented(shuffled), whole[shuffled])
    assert not torch.equal(augmented(everything, epoch=1), whole)
    assert not torch.equal(augmented(everything, seed=1), whole)
    # One object that goes through the epochs does what new ones do.
    one = FlipAndCrop(40, 4, 0)
    for epoch in (0, 1, 0):
        assert torch.equal(one(pixels, Draw(everything, epoch)), augmented(everything, epoch))


def test_all_moves_and_both_sides_come_about_equally_often():
    augment = FlipAndCrop(20_000, 4, 0)
    augment(images(count=1), Draw([0], 3))
    assert abs(augment._flips.mean() - 0.5) < 0.02
    for axis in (0, 1):
        counts = np.bincount(augment._moves[:, axis], minlength=9)
        assert len(counts) == 9
        assert abs(counts / 20_000 - 1 / 9).max() < 0.02
