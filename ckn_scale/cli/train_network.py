"""`ckn-scale train-network`: the paper's other systems, trained on a user's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ckn_scale.cli.output import announce
from ckn_scale.cli.progress import ProgressDisplay

Name = Literal[
    "alexnet-landmarks",
    "philippnet",
    "philippnet-rome",
    "deepcompare-siam",
    "deepcompare-siam2stream",
    "deepcompare-2ch",
    "deepcompare-2ch2stream",
]


def train_network(
    name: Annotated[Name, typer.Argument(metavar="NAME", help="Which network.")],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="alexnet-landmarks: a folder for each label; philippnet: photographs; the others: a folder "
            "of patches for each point.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file of weights to write.")],
    *,
    start: Annotated[
        str | None, typer.Option(help="alexnet-landmarks: AlexNet's published weights to begin with.")
    ] = None,
    classes: Annotated[int, typer.Option(min=2, help="philippnet: surrogate classes.")] = 16_000,
    steps: Annotated[int | None, typer.Option(min=1, help="By default as the recipe says.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Examples of a step.")] = None,
    rate: Annotated[float | None, typer.Option(help="The learning rate at the beginning.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of this process; the result depends on it.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress lines.")] = False,
) -> None:
    """Train a network that describes or compares patches; its file is what `--weights` takes.

    Stopped and called again it goes on from its checkpoint (OUT.checkpoint), with the same result.

    \b
    ckn-scale train-network philippnet photos/ philippnet.safetensors --classes 2000 --steps 4000
    ckn-scale train-network deepcompare-siam patches/ siam.safetensors
    ckn-scale train-network alexnet-landmarks landmarks/ landmarks.safetensors --start alexnet.pth
    ckn-scale index photos/ run/ --descriptor philippnet --weights philippnet.safetensors
    """
    announce("loading what trains networks", quiet=quiet)
    from ckn_scale.core.numerics import set_compute_threads
    from ckn_scale.evaluate.report import check_writable
    from ckn_scale.evaluate.train_networks import make_recipe, train

    check_writable(out)
    set_compute_threads(threads)
    recipe = make_recipe(name, data, steps=steps, batch_size=batch, rate=rate, seed=seed)
    with ProgressDisplay(quiet=quiet) as display:
        loss = train(
            name, data, out, recipe, start=start, num_classes=classes, on_progress=display.show_count
        )
    print(f"{out}: {name} after {recipe.steps} steps, loss {loss:.3f}")
