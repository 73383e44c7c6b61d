"""`ckn-scale train-network`: the paper's other systems, trained on a user's data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ckn_scale.cli.options import WorkerOptions
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
    drops: Annotated[int | None, typer.Option(min=0, help="How often it is divided by ten.")] = None,
    pieces: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of a batch, 8 by default: so many workers can share a step. The result depends on it.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda where workers see one.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Of each worker; the result depends on it.")] = 1,
    workers: WorkerOptions,
) -> None:
    """Train a network that describes or compares patches; its file is what `--weights` takes.

    Stopped and called again it goes on from its checkpoint (OUT.checkpoint), with the same result; so it is
    for any number of workers. Those of other hosts have to see DATA, and OUT's folder.

    \b
    ckn-scale train-network philippnet photos/ philippnet.safetensors --classes 2000 --steps 4000
    ckn-scale train-network philippnet /nfs/photos /nfs/philippnet.safetensors --ray auto --workers 8
    ckn-scale train-network deepcompare-siam patches/ siam.safetensors --workers 4
    ckn-scale train-network alexnet-landmarks landmarks/ landmarks.safetensors --start alexnet.pth
    ckn-scale index photos/ run/ --descriptor philippnet --weights philippnet.safetensors
    """
    announce("loading what trains networks", quiet=workers.quiet)
    from ckn_scale.evaluate.report import check_writable
    from ckn_scale.evaluate.train_networks import make_recipe, train

    check_writable(out)
    chosen = {"steps": steps, "batch_size": batch, "rate": rate, "num_drops": drops, "num_pieces": pieces}
    recipe = make_recipe(name, data, seed=seed, **chosen)
    with ProgressDisplay(quiet=workers.quiet) as display:
        loss = train(
            *(name, data.absolute(), out.absolute(), recipe),
            start=start,
            num_classes=classes,
            **_choose_workers(workers, device, threads),
            on_progress=display.show_count,
        )
    if loss is None:
        print(f"{out}: {name} is trained already, with this recipe and these data")
    else:
        print(f"{out}: {name} after {recipe.steps} steps, loss {loss:.3f}")


def _choose_workers(workers: WorkerOptions, device: str, threads: int) -> dict[str, Any]:
    """What `train` takes: the device, threads of each worker, and who they are."""
    from ckn_scale.core.numerics import set_compute_threads
    from ckn_scale.runners.devices import choose_device
    from ckn_scale.runners.worker_groups import open_group

    set_compute_threads(threads)
    resources = workers.resources()
    chosen = choose_device(workers.ray) if device == "auto" else device
    if resources.workers == 0 and resources.ray is None:
        return {"device": chosen, "threads": threads}
    opener = partial(open_group, resources=resources, device=chosen, threads=threads)
    return {"device": chosen, "threads": threads, "open_group": opener}
