"""Draw what equivariance looks like: the two pictures of the documentation.

    python examples/equivariance_figure.py --output figures

A handwritten digit of scikit-learn's goes through a lifting layer and a group self-attention layer, both with random
weights: equivariance holds before training as it does after. ``equivariance.png`` shows the digit rotated by every
element of the group above its feature maps, ``attention.png`` where two queries of a wider layer look. Needs
scikit-learn and matplotlib: the extra "train".
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from escnn import gspaces, nn
from scipy.ndimage import zoom
from sklearn.datasets import load_digits

from escnn_attention import FieldLayerNorm, GroupSelfAttention, LiftingSelfAttention, SiLU, assert_equivariant
from escnn_attention.plotting import plot_attention_maps, plot_feature_maps

SIZE = 32


def digit(index: int = 4) -> torch.Tensor:
    """A digit of 8×8 pixels, enlarged to 28×28 with a margin of 2: (1, 1, 32, 32)."""
    enlarged = zoom(load_digits().images[index] / 16, 28 / 8, order=3).clip(0, 1)
    return torch.tensor(np.pad(enlarged, 2), dtype=torch.float32)[None, None]


def main() -> None:
    """Draw and save both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the pictures (default: this one)")
    parser.add_argument("--dpi", type=int, default=110, help="resolution (default: %(default)s)")
    arguments = parser.parse_args()

    gspace = gspaces.rot2dOnR2(4)
    image = nn.FieldType(gspace, [gspace.trivial_repr])
    hidden = nn.FieldType(gspace, 8 * [gspace.regular_repr])

    torch.manual_seed(5)  # of the first sixty, the seed whose maps differ most from pose to pose
    lifting = nn.SequentialModule(
        LiftingSelfAttention(image, hidden, num_heads=4, kernel_size=7),
        FieldLayerNorm(hidden, "sample"),
        SiLU(hidden),
    )
    attention = GroupSelfAttention(hidden, hidden, num_heads=4, kernel_size=7)
    network = nn.SequentialModule(lifting, attention, FieldLayerNorm(hidden, "sample"), SiLU(hidden))
    assert_equivariant(network, (1, 1, SIZE, SIZE), tolerance=1e-12)

    torch.manual_seed(1)
    wide = GroupSelfAttention(hidden, hidden, num_heads=4, kernel_size=15)
    looking = nn.SequentialModule(lifting, wide)

    x = image(digit())
    arguments.output.mkdir(parents=True, exist_ok=True)
    figures = {
        "equivariance.png": plot_feature_maps(
            x,
            {"after lifting": lifting, "after group attention": network},
            title="The image rotates: maps rotate, poses permute",
        ),
        "attention.png": plot_attention_maps(
            x, looking, wide, positions=[(9, 17), (20, 9)], title="The image rotates, and so does where queries look"
        ),
    }
    for name, figure in figures.items():
        figure.savefig(arguments.output / name, dpi=arguments.dpi)
        print(f"wrote {arguments.output / name}")


if __name__ == "__main__":
    main()
