"""Draw the pictures of the documentation: encodings, attention, feature maps, equivariance against the angle.

    python examples/pictures.py --out figures

Small networks are trained on scikit-learn's upright digits, in a few minutes; pictures that show equivariance only use
random weights. Attentive maps are those of a published network for rotated MNIST if the folder ESCNN_ATTENTION_DATA
contains it (authors/alpha_f_p4cnn.npz), otherwise of a network trained here. The molecule is one of QM9, with a network
trained on dipole moments, if that folder contains qm9.npz; otherwise methanol, with random weights.
``--quick`` trains nothing, ``--only`` draws some of the pictures. Needs scikit-learn and matplotlib: the extra "train".
"""

import argparse
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import escnn_attention  # noqa: F401  # isort: skip  # before escnn
import numpy as np
import numpy.typing as npt
import torch
from escnn import gspaces, nn
from escnn.gspaces import GSpace
from matplotlib.animation import Animation
from matplotlib.figure import Figure
from scipy.ndimage import zoom
from sklearn.datasets import load_digits
from torch.nn import functional

from escnn_attention import (
    FieldLayerNorm,
    FourierEncoding,
    GroupCrossAttention,
    GroupSelfAttention,
    LiftingSelfAttention,
    SiLU,
    assert_equivariant,
    sequence_space,
)
from escnn_attention.models import CNN, GroupCNN, GSANet, HybridNet, PointTransformer, from_published
from escnn_attention.plotting import (
    CloudStyle,
    animate_feature_maps,
    plot_attended_images,
    plot_attention_maps,
    plot_attentive_layers,
    plot_attentive_maps,
    plot_cloud_attention,
    plot_encoding,
    plot_equivariance_error,
    plot_feature_maps,
)
from escnn_attention.training.data.clouds.constellations import PATTERNS, make_constellations

STEPS = 500  # of training on clouds
MOLECULE = 74  # of QM9: N-methylacetamide, the bond between two amino acids
METHANOL = (
    [6, 8, 1, 1, 1, 1],
    [[0, 0, 0], [1.43, 0, 0], [1.73, 0.91, 0], [-0.36, -1.03, 0], [-0.36, 0.51, 0.89], [-0.36, 0.51, -0.89]],
)
ATOMS = {1: ("H", 0.31), 6: ("C", 0.76), 7: ("N", 0.71), 8: ("O", 0.66), 9: ("F", 0.57)}  # and their covalent radii, Å
DIGIT = 4  # of scikit-learn's digits, the image that is shown: a 4, which no rotation maps onto itself
TESTED = 300


def digits(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Enlarged digits of 8×8 pixels with a margin of 1, (N, 1, S, S) from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    padded = np.pad(images.reshape(-1, 8, 8) / 16, ((0, 0), (1, 1), (1, 1)))
    enlarged = zoom(padded, (1, scale, scale), order=3).clip(0, 1)
    return torch.tensor(enlarged, dtype=torch.float32)[:, None], torch.tensor(labels)


def hybrid(gspace: GSpace, width: int) -> HybridNet:
    """A network: convolutions, halving of the grid, a convolution, and a block of attention."""
    return HybridNet(
        *(gspace, 1, 10),
        widths=(width // 2, width),
        convolutions=(1, 1),
        attention=(0, 1),
        num_heads=2,
        block={"keys": "all", "encoding": "mlp"},
    )


def liftings(orders: tuple[int, ...]) -> dict[str, torch.nn.Module]:
    """Lifting layers of cyclic groups with the same random weights."""
    layers: dict[str, torch.nn.Module] = {}
    weights = None
    for order in orders:
        gspace = gspaces.rot2dOnR2(order)
        image, fields = nn.FieldType(gspace, [gspace.trivial_repr]), nn.FieldType(gspace, 8 * [gspace.regular_repr])
        layer = LiftingSelfAttention(image, fields, 2, 7, projection="pointwise", window="disc")
        if weights is None:
            weights = layer.state_dict()
        layer.load_state_dict(weights)
        layers[f"C{order}" if order > 1 else "no group"] = layer
    return layers


def learn(
    network: torch.nn.Module,
    batches: Iterable[Sequence[torch.Tensor | None]],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rate: float,
    steps: int,
) -> None:
    """Train on batches of inputs with the targets last."""
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(1, steps))
    network.train()
    for *inputs, answers in itertools.islice(batches, steps):
        optimizer.zero_grad()
        loss(network(*inputs), answers).backward()
        optimizer.step()
        schedule.step()
    network.eval()


def train(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> float:
    """Train on all images except the last ones, and return the accuracy on those."""
    data = torch.utils.data.TensorDataset(images[:-TESTED], labels[:-TESTED])
    batches = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    again = itertools.chain.from_iterable(itertools.repeat(batches))
    learn(network, again, functional.cross_entropy, 3e-3, epochs * len(batches))
    with torch.no_grad():
        return float((network(images[-TESTED:]).argmax(dim=1) == labels[-TESTED:]).float().mean())


def draw_equivariance(save: Callable[[str, Figure | Animation], None], quick: bool) -> None:
    """Draw feature maps and attention of random layers, for a digit and the rotated digit."""
    gspace = gspaces.rot2dOnR2(4)
    image, hidden = nn.FieldType(gspace, [gspace.trivial_repr]), nn.FieldType(gspace, 8 * [gspace.regular_repr])

    def sequence(layer: nn.EquivariantModule) -> nn.SequentialModule:
        return nn.SequentialModule(layer, FieldLayerNorm(hidden, "sample"), SiLU(hidden))

    torch.manual_seed(5)  # of the first sixty, the seed whose maps differ most from pose to pose
    lifting = sequence(LiftingSelfAttention(image, hidden, num_heads=4, kernel_size=7))
    network = nn.SequentialModule(lifting, *sequence(GroupSelfAttention(hidden, hidden, num_heads=4, kernel_size=7)))
    assert_equivariant(network, (1, 1, 32, 32), tolerance=1e-12)
    torch.manual_seed(1)
    wide = GroupSelfAttention(hidden, hidden, num_heads=4, kernel_size=15)

    enlarged = np.pad(zoom(load_digits().images[DIGIT] / 16, 28 / 8, order=3).clip(0, 1), 2)
    x = image(torch.tensor(enlarged, dtype=torch.float32)[None, None])
    shown = {"after lifting": lifting, "after group attention": network}
    save("equivariance.png", plot_feature_maps(x, shown, title="The image rotates: maps rotate, poses permute"))
    title = "The image rotates, and so does where queries look"
    looking = nn.SequentialModule(lifting, wide)
    save("attention.png", plot_attention_maps(x, looking, wide, positions=[(9, 17), (20, 9)], title=title))


def draw_attention(save: Callable[[str, Figure | Animation], None], quick: bool) -> None:
    """Draw encodings, attention maps and equivariance errors."""
    c4, c8, d4 = gspaces.rot2dOnR2(4), gspaces.rot2dOnR2(8), gspaces.flipRot2dOnR2(4)

    torch.manual_seed(0)
    gsa_net = GSANet(c8, 1, 10, channels=16, blocks=(1,), num_heads=2, block={"encoding": "mlp"})
    save("encoding.png", plot_encoding(gsa_net, "stages.attention_1_1", title="The encoding of a window, for C8"))
    torch.manual_seed(2)
    fields = nn.FieldType(d4, 4 * [d4.regular_repr])
    everywhere = GroupSelfAttention(fields, fields, encoding=FourierEncoding(scale=2.0), kernel_size=None)
    title = "The encoding of global attention on 8×8 positions, for D4"
    save("encoding_global.png", plot_encoding(everywhere, size=8, title=title))

    torch.manual_seed(5)
    gsa_net = GSANet(c4, 1, 10, channels=16, blocks=(1,), num_heads=4, kernel_size=7, block={"encoding": "mlp"})
    large = digits(2.8)[0][DIGIT : DIGIT + 1]
    layers = ["stages.lifting", "stages.attention_1_1"]
    save("feature_maps.png", plot_feature_maps(large, gsa_net, layers))
    angles = np.arange(0, 360, 90 if quick else 7.5)
    animation = animate_feature_maps(large, gsa_net, "stages.lifting", angles=angles)
    save("feature_maps.gif", animation)

    torch.manual_seed(0)
    angles = np.arange(0, 360.5, 45 if quick else 5)
    save(
        "equivariance_error_maps.png",
        plot_equivariance_error(
            liftings((1, 2, 4, 8, 16)), angles=angles, title="One lifting layer with the poses of several groups"
        ),
    )

    images, labels = digits(1.6)
    networks: dict[str, torch.nn.Module] = {}
    makers: dict[str, Callable[[], torch.nn.Module]] = {
        "convolutions only": lambda: CNN(1, 10, widths=(24, 24), convolutions=(1, 2), features=24),
        "with attention, C4": lambda: hybrid(c4, 16),
        "with attention, C8": lambda: hybrid(c8, 12),
    }
    for name, make in makers.items():
        torch.manual_seed(0)
        networks[name] = make()
        accuracy = train(networks[name], images, labels, 0 if quick else 8)
        print(f"{name}: {accuracy:.1%} of the upright digits are recognised", flush=True)
    save(
        "attention_maps.png",
        plot_attention_maps(images[DIGIT : DIGIT + 1], networks["with attention, C4"], positions=[(2, 4), (5, 2)]),
    )
    title = "How much the logits of a digit change when it is rotated"
    save("equivariance_error.png", plot_equivariance_error(networks, images[-TESTED:][:20], angles=angles, title=title))


def draw_attentive(save: Callable[[str, Figure | Animation], None], quick: bool) -> None:
    """Draw the maps of attentive layers."""
    folder = os.environ.get("ESCNN_ATTENTION_DATA")
    file = None if folder is None else Path(folder) / "authors" / "alpha_f_p4cnn.npz"
    images, labels = digits(1.6)
    if file is not None and file.is_file():
        with np.load(file) as arrays:
            published = from_published({name: arrays[name] for name in arrays}, kind="att_gconvs")
            shown = torch.tensor(arrays["input"])
        one, several = shown[5:6], shown[[0, 4, 7, 8]]
    else:
        torch.manual_seed(0)
        published = GroupCNN(
            gspaces.rot2dOnR2(4), 1, 10, width=6, attention="features", convolutions=(1, 2), last_kernel=3, dropout=0
        )
        accuracy = train(published, images, labels, 0 if quick else 8)
        print(f"attention on features: {accuracy:.1%} of the upright digits are recognised", flush=True)
        shown = images
        one, several = shown[DIGIT : DIGIT + 1], shown[[0, 2, 3, 5]]
    background = float(shown.min())
    layer = "stages.convolution_2.attention"
    save("attentive_maps.png", plot_attentive_maps(one, published, layer, background=background))
    save("attentive_layers.png", plot_attentive_layers(several[2:3], published, background=background))
    save("attentive_images.png", plot_attended_images(several, published, layer, background=background))

    torch.manual_seed(0)
    d4 = gspaces.flipRot2dOnR2(4)
    network = GroupCNN(d4, 1, 10, width=3, attention="full", convolutions=(1, 1), last_kernel=5, dropout=0)
    accuracy = train(network, images, labels, 0 if quick else 4)
    print(f"attention on responses, D4: {accuracy:.1%} of the upright digits are recognised", flush=True)
    title = "An attentive convolution with the poses of D4"
    large = digits(2.8)[0][DIGIT : DIGIT + 1]
    figure = plot_attentive_maps(large, network, "stages.convolution_1.convolution", field=0, back=False, title=title)
    save("attentive_maps_d4.png", figure)


def draw_points(save: Callable[[str, Figure | Animation], None], quick: bool) -> None:
    """Draw the attention of a point of a constellation and of an atom of a molecule."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    steps = 1 if quick else STEPS
    draw_constellation(save, generator, steps)
    draw_molecule(save, generator, steps)


def draw_constellation(
    save: Callable[[str, Figure | Animation], None], generator: np.random.Generator, steps: int
) -> None:
    """Train a network to classify the pattern of every point, and draw the attention of a corner."""
    g = gspaces.flipRot2dOnR2(3)
    network = PointTransformer(
        g, 4, len(PATTERNS), fields=6, num_blocks=2, num_heads=2, attention={"length_scale": 3.0}, pool=None
    )
    made = make_constellations(4000, generator)

    def constellations(chosen: npt.NDArray[np.int64]) -> list[torch.Tensor | None]:
        """Features, points, no edges, clouds, and the target: the pattern of each point."""
        clouds = [torch.tensor(12 * made.points[i][made.present[i]], dtype=torch.float32) for i in chosen]
        owners = torch.tensor(np.concatenate([made.owners[i][made.present[i]] for i in chosen]) % len(PATTERNS))
        features = torch.cat([nearest(p) for p in clouds])
        return [features, torch.cat(clouds), None, numbered(map(len, clouds)), owners]

    batches = (constellations(generator.integers(3700, size=16)) for _ in itertools.count())
    learn(network, batches, functional.cross_entropy, 1e-2, steps)
    *tested, owners = constellations(np.arange(3700, 4000))
    with torch.no_grad():
        right = (network(*tested).argmax(dim=1) == owners).float().mean()
    print(f"constellations: {float(right):.1%} of the points are told which pattern they are of", flush=True)
    points, lines = constellation(generator)
    cloud = nn.GeometricTensor(nearest(points), network.in_type, points)
    title = "Where a corner of the L looks, and how that follows the constellation"
    rotations = [g.fibergroup.elements[i] for i in (0, 1, 2, 4)]
    style = CloudStyle(bonds=lines)
    figure = plot_cloud_attention(cloud, network, point=14, poses=[0, 1], elements=rotations, style=style, title=title)
    save("cloud_attention.png", figure)


def draw_molecule(save: Callable[[str, Figure | Animation], None], generator: np.random.Generator, steps: int) -> None:
    """Train a network on dipole moments, if QM9 is on this machine, and draw the attention of an atom."""
    g = gspaces.dihedralOnR3(4)
    network = PointTransformer(g, len(ATOMS), 1, fields=6, num_blocks=2, num_heads=2, attention={"length_scale": 2.0})
    folder = os.environ.get("ESCNN_ATTENTION_DATA")
    file = None if folder is None else Path(folder) / "qm9.npz"
    if file is not None and file.is_file():
        with np.load(file) as arrays:
            sizes, numbers = arrays["num_atoms"].astype(int), arrays["index"]
            charges, positions = arrays["charges"], arrays["positions"]
            dipoles = arrays["targets"][:, list(arrays["target_names"]).index("Dipole_debye")]
        ends = sizes.cumsum()
        shown = int(np.flatnonzero(numbers == MOLECULE)[0])
        order = generator.permutation(np.delete(np.arange(len(sizes)), shown))
        train_on, test_on = order[:4000], order[4000:4300]
        mean, spread = dipoles[train_on].mean(), dipoles[train_on].std()

        def molecules(chosen: npt.NDArray[np.int64]) -> list[torch.Tensor | None]:
            atoms = np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in chosen])
            target = torch.tensor((dipoles[chosen, None] - mean) / spread, dtype=torch.float32)
            return [kinds(charges[atoms]), torch.tensor(positions[atoms]), None, numbered(sizes[chosen]), target]

        batches = (molecules(generator.choice(train_on, 16)) for _ in itertools.count())
        learn(network, batches, functional.l1_loss, 3e-3, steps)
        *tested, target = molecules(test_on)
        with torch.no_grad():
            missed = (network(*tested) - target).abs().mean() * spread
        print(f"QM9: dipole moments are predicted to {float(missed):.2f} D", flush=True)
        atoms = slice(ends[shown] - sizes[shown], ends[shown])
        elements, coords = charges[atoms].tolist(), torch.tensor(positions[atoms])
    else:
        elements, coords = METHANOL[0], torch.tensor(METHANOL[1])
    radii = torch.tensor([ATOMS[z][1] for z in elements])
    bonded = (torch.cdist(coords, coords) < 1.25 * (radii[:, None] + radii)).triu(1).nonzero().tolist()
    figure = plot_cloud_attention(
        nn.GeometricTensor(kinds(elements), network.in_type, coords),
        network,
        point=1,
        elements=[g.fibergroup.elements[i] for i in (0, 1, 3, 5)],
        style=CloudStyle(labels=[ATOMS[z][0] for z in elements], bonds=bonded),
        title="Where an atom looks, and how that follows the molecule",
    )
    save("molecule_attention.png", figure)


def draw_cutoff(save: Callable[[str, Figure | Animation], None], quick: bool) -> None:
    """Draw the energy and the force of an atom that crosses the radius of a network with random weights."""
    radius, options = 3.0, {"fields": 4, "num_blocks": 2, "num_heads": 2, "pool": "sum"}
    others = torch.tensor([[0.0, 0.0], [0.9, 1.1]], dtype=torch.float64)
    path = torch.linspace(2.0, 4.0, 101 if quick else 1001, dtype=torch.float64)
    crossings = sorted(x + (radius**2 - y**2) ** 0.5 for x, y in others.tolist())
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for cutoff, color, label in ((False, "tab:gray", "radius=3.0"), (True, "tab:blue", "radius=3.0, cutoff=True")):
        torch.manual_seed(2)
        attention = {"radius": radius, "cutoff": cutoff}
        network = PointTransformer(gspaces.rot2dOnR2(4), 3, 1, attention=attention, **options).double()
        moving = torch.stack([path, torch.zeros_like(path)], dim=1).unsqueeze(1).requires_grad_()
        coords = torch.cat([others.expand(len(path), -1, -1), moving], dim=1).flatten(0, 1)
        atoms = torch.eye(3, dtype=torch.float64).repeat(len(path), 1)
        energy = network(atoms, coords, batch=numbered([3] * len(path)))[:, 0]
        force = -torch.autograd.grad(energy.sum(), moving)[0][:, 0, 0]
        # No line is drawn through a jump.
        stops = [0, *(int((path <= crossing).sum()) for crossing in crossings), len(path)]
        for axes, values in zip(panels, (energy.detach(), force), strict=True):
            for first, last in itertools.pairwise(stops):
                axes.plot(path[first:last], values[first:last], color=color, label=None if first else label)
    for axes, name in zip(panels, ("energy", "force along the path"), strict=True):
        axes.set(xlabel="distance from the first atom", ylabel=name)
        for crossing in crossings:
            axes.axvline(crossing, color="lightgray", linestyle=":", zorder=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    save("points_cutoff.png", figure)


def draw_tokens(save: Callable[[str, Figure | Animation], None], quick: bool) -> None:
    """Draw what the first token of a sequence sees of a digit and of the rotated digit, with random weights."""
    gspace = gspaces.rot2dOnR2(4)
    sequence = sequence_space(gspace.fibergroup)
    image, hidden = nn.FieldType(gspace, [gspace.trivial_repr]), nn.FieldType(gspace, 8 * [gspace.regular_repr])
    command = nn.FieldType(sequence, [sequence.irrep(1)])
    torch.manual_seed(5)
    lifting = LiftingSelfAttention(image, hidden, num_heads=4, kernel_size=7)
    looking = GroupCrossAttention(command, hidden, command, head_fields=16, encoding="mlp")
    x = image(digits(2.4)[0][DIGIT : DIGIT + 1])
    token = command(torch.tensor([[[4.0], [0.0]]]))
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(2, 5)
    for row, element in zip(panels, gspace.fibergroup.elements[:2], strict=True):
        turned, asking = x.transform(element), token.transform(element)
        maps = looking.attention_maps(asking, lifting(turned), [(0,)]).detach()[0, 0, :, 0].sum((1, 2))
        row[0].imshow(turned.tensor[0, 0], cmap="gray")
        arrow = {"arrowstyle": "-|>", "color": "tab:orange", "linewidth": 3}
        middle, (along, up) = turned.shape[-1] / 2, asking.tensor[0, :, 0].tolist()
        row[0].annotate("", (middle + along, middle - up), (middle, middle), arrowprops=arrow)
        for pose, (axes, seen) in enumerate(zip(row[1:], maps, strict=True)):
            axes.imshow(seen, cmap="magma")
            axes.set_title(f"pose {pose}", fontsize=9)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
    panels[0, 0].set_title("image and token", fontsize=9)
    panels[1, 0].set_title("rotated by 90°", fontsize=9)
    save("token_attention.png", figure)


def draw_torus(save: Callable[[str, Figure | Animation], None], quick: bool) -> None:
    """Draw how much a roll of the input changes the rolled output, on a torus and on a grid that ends."""
    gspace = gspaces.rot2dOnR2(4)
    image = nn.FieldType(gspace, [gspace.trivial_repr])
    x, shifts = digits(2.4)[0][DIGIT : DIGIT + 1], {"shifts": (7, 11), "dims": (2, 3)}
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    panels = figure.subplots(1, 4)
    changes = []
    for padding_mode in ("none", "circular"):
        torch.manual_seed(0)
        layer = GroupSelfAttention(image, image, head_fields=4, kernel_size=7, padding_mode=padding_mode)
        with torch.no_grad():
            rolled, output = layer(image(x.roll(**shifts))).tensor, layer(image(x)).tensor.roll(**shifts)
        changes.append((rolled - output).abs()[0, 0])
    panels[0].imshow(x[0, 0], cmap="gray")
    panels[1].imshow(x.roll(**shifts)[0, 0], cmap="gray")
    for axes, change in zip(panels[2:], changes, strict=True):
        drawn = axes.imshow(change, cmap="magma", vmin=0, vmax=float(changes[0].max()))
        axes.set_xlabel(f"at most {float(change.max()):.0e}", fontsize=9)
    figure.colorbar(drawn, ax=panels[3])
    names = ("input", "rolled input", 'change, "none"', 'change, "circular"')
    for axes, name in zip(panels, names, strict=True):
        axes.set(xticks=[], yticks=[])
        axes.set_title(name, fontsize=9)
    save("torus_roll.png", figure)


def nearest(points: torch.Tensor) -> torch.Tensor:
    """The distances of each point to the four nearest others, at most 4 each: (N, 4)."""
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").sort(dim=1).values
    return functional.pad(distances[:, 1:5].clamp(max=4), (0, 5 - min(5, len(points))), value=4.0)


def kinds(charges: Iterable[int]) -> torch.Tensor:
    """Atoms as unit vectors, (N, 5)."""
    return torch.eye(len(ATOMS))[[list(ATOMS).index(z) for z in charges]]


def numbered(sizes: Iterable[int]) -> torch.Tensor:
    """The index of each point's cloud, for clouds of these sizes."""
    counts = torch.tensor(list(sizes))
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def constellation(generator: np.random.Generator) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """One of each pattern, close together, (17, 2), and the lines between their points."""
    places = {
        "square": (0.2, 3.2, 0.3),
        "triangle": (3.4, 3.6, 1.0),
        "pentagon": (-2.4, 0.6, 0.2),
        "L": (1.6, 0.0, 0.5),
    }
    points: list[npt.NDArray[np.float64]] = []
    lines: list[tuple[int, int]] = []
    for name, (x, y, angle) in places.items():
        corners = PATTERNS[name] - PATTERNS[name].mean(axis=0)
        rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        first, count = sum(map(len, points)), len(corners)
        lines += [(first + i, first + (i + 1) % count) for i in range(count - (name == "L"))]
        points.append(corners @ rotation.T + (x, y) + 0.05 * generator.standard_normal((count, 2)))
    return torch.tensor(np.concatenate(points), dtype=torch.float32), lines


PICTURES = {
    "equivariance": draw_equivariance,
    "attention": draw_attention,
    "attentive": draw_attentive,
    "points": draw_points,
    "cutoff": draw_cutoff,
    "tokens": draw_tokens,
    "torus": draw_torus,
}


def main() -> None:
    """Train the networks, draw and save the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the pictures (default: this one)")
    parser.add_argument("--dpi", type=int, default=110, help="resolution (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="no training, fewer angles")
    parser.add_argument("--only", choices=list(PICTURES), help="some of the pictures (default: all)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    def save(name: str, picture: Figure | Animation) -> None:
        if isinstance(picture, Animation):
            picture.save(arguments.out / name, writer="pillow", dpi=0.6 * arguments.dpi)
        else:
            picture.savefig(arguments.out / name, dpi=arguments.dpi)
        print(f"wrote {arguments.out / name}", flush=True)

    for name, draw in PICTURES.items():
        if arguments.only in (None, name):
            draw(save, arguments.quick)


if __name__ == "__main__":
    main()
