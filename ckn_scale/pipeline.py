"""The pipeline, from top to bottom: plan → sample → train → encode → build → certify → publish.

`index_images` is all of it in one resumable call. Below it stand its parts in order; the verbs of the
command line call the same ones. A step that is done is skipped, so each may be called at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckn_scale.config import DEFAULT_PRESET, Resources, Settings, load_settings, parse_settings
from ckn_scale.errors import CorruptData, InputError, RunFailed
from ckn_scale.runners.devices import find_device
from ckn_scale.runners.driver import Driver, ProgressHook, StepReport, open_driver
from ckn_scale.step import Step, allow_mix
from ckn_scale.steps.augment_index import AugmentIndex, list_augmented_shards, number_searched
from ckn_scale.steps.build_index import BuildIndex, list_index_shards, write_build_manifest
from ckn_scale.steps.certify_index import CertifyIndex, make_certificate
from ckn_scale.steps.compress_index import (
    MakeCodes,
    MeasureShortlist,
    describe_choice,
    write_coded_manifest,
)
from ckn_scale.steps.draw_queries import draw_queries, write_draw
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.find_copies import DrawReferences, FindCopies
from ckn_scale.steps.learn_quantiser import LearnQuantiser, choose_kind, count_lists
from ckn_scale.steps.plan_images import OnChanges, Source, draw_background, plan_images, record_background
from ckn_scale.steps.plant_queries import PlantQueries
from ckn_scale.steps.publish import (
    Candidate,
    find_published,
    is_current,
    only_deletes,
    publish_version,
    read_candidate,
    remove_samples,
    require_few_failures,
)
from ckn_scale.steps.publish_deletions import publish_deletions
from ckn_scale.steps.record_models import adopt_models, record_generation, repair_models, settings_for_models
from ckn_scale.steps.sample_patches import SamplePatches
from ckn_scale.steps.take_networks import TakeNetworks, keep_networks, read_networks
from ckn_scale.steps.train_descriptors import DescribePatches, TrainCodebook, TrainPointWords, TrainProjection
from ckn_scale.steps.train_layers import DrawSubpatches, SearchRates, TrainLayer
from ckn_scale.steps.train_reduction import SampleVlads, TrainReduction
from ckn_scale.storage.index_files import IndexShard, read_manifest
from ckn_scale.storage.plan_changes import ChangeCounts
from ckn_scale.storage.run_folder import RunFolder, is_run
from ckn_scale.storage.run_records import Certificate
from ckn_scale.storage.stored_files import StoredFile

log = logging.getLogger(__name__)

MAX_STARTS = 20  # of publishing, while others change the run


@dataclass(frozen=True)
class IndexReport:
    """What a call did, step by step, and the images by state of the version that is current now."""

    run: str
    version: int  # that is current now
    states: dict[str, int]  # images of the run by state: "ok", "corrupt", …
    steps: list[StepReport]
    changes: ChangeCounts | None = None  # what an append or a sync found

    def __repr__(self) -> str:
        done = {step.step: step.done for step in self.steps if step.done}
        return (
            f"IndexReport(run={self.run!r}, version={self.version}, states={self.states}, shards_done={done})"
        )


def index_images(
    source: Source,
    run_url: str,
    settings: Settings,
    resources: Resources | None = None,
    *,
    keep: Sequence[str] = (),
    append: bool = False,
    sync: bool = False,
    undelete: bool = False,
    models: str | None = None,
    background: Source = (),
    accept: bool = False,
    mix: bool = False,
    check_all: bool = False,
    keep_samples: bool = False,
    on_progress: ProgressHook = lambda progress: None,
) -> IndexReport:
    """Index `source` into `run_url`; called again, it goes on where it stopped.

    Damage that a step meets is repaired on the way; `check_all` looks for it in every file. `mix` lets
    workers on several kinds of CPU share the run, on record.
    """
    resources = resources or Resources()
    found: list[ChangeCounts] = []
    run = plan(
        *(source, run_url, settings),
        keep=keep,
        append=append,
        sync=sync,
        undelete=undelete,
        accept=accept,
        models=models,
        background=background,
        on_changes=found.append,
    )
    if mix:
        allow_mix(run)
    with open_driver(run, resources, on_progress) as driver:
        driver.check_all = check_all
        while True:
            try:
                train(driver)
                version = publish(driver, accept=accept, encode=True, keep_samples=keep_samples)
                return replace(summarise(driver, version), changes=found[-1] if found else None)
            except CorruptData as damage:
                if driver.check_all:
                    raise
                log.warning("%s: every file is checked now, and rebuilt where it is damaged", damage)
                driver.check_all = True


def resolve_settings(
    run_url: str,
    preset: str | None = None,
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    descriptor: str | None = None,
    weights: Sequence[str] = (),
    device: str = "auto",
    ray: str | None = None,
    models: str | None = None,
) -> Settings:
    """The settings a run is planned with: as named, with what `models` were made with, on a resolved device.

    Without a `preset` (and a `descriptor`, which is made of one) a run that was begun goes on with its own
    settings, also when presets are others in this release; a new one gets `fast`. The device `auto` is
    what a preset, file or override names; else the device of the run, where it was begun; else cuda where
    torch sees a GPU: in a task of the cluster with `ray="auto"`, here otherwise.
    """
    named: dict[str, Any] = {"descriptor": descriptor, "weights": weights}
    if preset is None and descriptor is None and is_run(run_url):
        named["recorded"] = RunFolder.open(run_url).settings
    preset = preset or DEFAULT_PRESET
    if device == "auto":
        settings = load_settings(
            preset, config, overrides, choose_device=lambda: find_device(run_url, ray), **named
        )
    else:
        settings = load_settings(preset, config, [*overrides, f"numerics.device={device}"], **named)
    resolved = settings_for_models(settings, models)
    if device not in ("auto", resolved.numerics.device):
        raise InputError(
            f"--device {device}, but the models of {models} were learned on {resolved.numerics.device}: "
            "descriptors are compared within one kind of device; leave --device out, or learn models there"
        )
    return resolved


def plan(
    source: Source,
    run_url: str,
    settings: Settings,
    *,
    keep: Sequence[str] = (),
    append: bool = False,
    sync: bool = False,
    undelete: bool = False,
    accept: bool = False,
    models: str | None = None,
    background: Source = (),
    on_changes: OnChanges = lambda counts: None,
) -> RunFolder:
    """List the images once, freeze the list, cut it into shards; with `models`, take over another run's.

    InputError, before anything is written, when there are too few images to learn the reduction from.
    """
    settings, networks = read_networks(settings, run_url)
    if background and models is not None:
        raise InputError("--background is of no use with --models: what is learned from it is taken over")
    drawn = draw_background(settings, background) if background and not is_run(run_url) else None
    run = plan_images(
        *(run_url, settings, source, keep),
        append=append,
        sync=sync,
        undelete=undelete,
        accept=accept,
        at_least=0 if background or models is not None else settings.reduction.needed_images,
        on_changes=on_changes,
    )
    keep_networks(run, networks)
    if background:
        record_background(run, settings, background, drawn)
    if models is not None:
        adopt_models(run, models)
    return run


def sample(driver: Driver) -> None:
    """Draw the training patches, unless the run has models already."""
    if needs_training(driver):
        driver.run_step(SamplePatches(driver.run))


def train(driver: Driver) -> None:
    """Learn everything, unless the run has a generation of models already."""
    if needs_training(driver):
        for step in list_training_steps(driver.run):
            driver.run_step(step)
        record_generation(driver.run, parse_settings(driver.run.settings))


def list_training_steps(run: RunFolder) -> list[Step]:
    """From planned images to the last model. Layers are learned one on top of the other."""
    channels = parse_settings(run.settings).channels
    layers = range(max(channel.num_layers for channel in channels))
    return [
        SamplePatches(run),
        *(kind(run, layer) for layer in layers for kind in (DrawSubpatches, SearchRates, TrainLayer)),
        TakeNetworks(run),
        DescribePatches(run, "raw"),
        TrainProjection(run),
        DescribePatches(run, "projected"),
        TrainCodebook(run),
        TrainPointWords(run),
        SampleVlads(run),
        TrainReduction(run),
    ]


def needs_training(driver: Driver) -> bool:
    """Whether the run has no models, or some that have to be learned again because they are damaged."""
    if driver.run.models.latest() is None:
        return True
    return driver.check_all and repair_models(driver.run, parse_settings(driver.run.settings))


def encode(driver: Driver) -> None:
    """Every planned image once: state, vector, strongest points, thumbnail."""
    driver.run_step(EncodeImages(driver.run))


def build(driver: Driver, candidate: Candidate | None = None) -> BuildIndex:
    """The index shards of what is encoded."""
    candidate = candidate or read_candidate(driver.run)
    return driver.run_step(BuildIndex(driver.run, candidate.build))


def augment(driver: Driver, built: BuildIndex) -> list[IndexShard]:
    """The index shards of a build; with `index.augment` their rows are joined with their neighbours."""
    if not built.settings.index.augment:
        return list_index_shards(built)
    return list_augmented_shards(driver.run_step(AugmentIndex(driver.run, built.build)))


def publish(driver: Driver, *, accept: bool, encode: bool = False, keep_samples: bool = False) -> int:
    """Build, certify and publish what is encoded; the version that is current afterwards.

    When another process appends, retries or publishes meanwhile, this starts over with what is committed
    then. `encode` does so from the start; without it images that are not encoded yet are refused.
    """
    for _ in range(MAX_STARTS):
        if encode:
            driver.run_step(EncodeImages(driver.run))
        candidate = None
        try:
            candidate = read_candidate(driver.run)
            version = _publish_candidate(driver, candidate, accept=accept)
            if not keep_samples:
                remove_samples(driver.run)
            return version
        except RunFailed as failure:
            if is_current(driver.run, candidate) if candidate else not encode:
                raise
            log.warning("%s; starting over with what the run holds now", failure)
            encode = True
    raise RunFailed(
        f"{driver.run.url}: others changed it {MAX_STARTS} times before it was published; try again"
    )


def _publish_candidate(driver: Driver, candidate: Candidate, *, accept: bool) -> int:
    run = driver.run
    if not accept:
        require_few_failures(run, candidate)
    built = build(driver, candidate)
    shards = augment(driver, built)
    current = find_published(run, candidate, shards)
    if current is not None:
        return current
    if only_deletes(run, candidate, shards) and (version := publish_deletions(run)) is not None:
        return version.number
    manifest = write_build_manifest(built, candidate.dead.ids, shards)
    numbers = number_searched(built, shards)
    drawn = draw_queries(run, candidate.segments, numbers, candidate.current, candidate.dead.ids)
    draw = write_draw(run, drawn)
    driver.run_step(PlantQueries(run, manifest, draw))
    certified = driver.run_step(CertifyIndex(run, manifest, draw))
    certificate = make_certificate(certified)
    manifest, certificate = compress(driver, manifest, draw, certificate)
    return publish_version(run, candidate, manifest, certificate, accept=accept)


def compress(
    driver: Driver, manifest: StoredFile, draw: str, certificate: Certificate
) -> tuple[StoredFile, Certificate]:
    """Short codes where there are too many rows to compare them all, if planted queries confirm them."""
    run, wanted = driver.run, parse_settings(driver.run.settings).index.kind
    content = read_manifest(run.store, manifest)
    kind = choose_kind(wanted, content)
    if kind is None:
        return manifest, certificate
    learned = driver.run_step(LearnQuantiser(run, content.generation, count_lists(kind, content.rows)))
    made = driver.run_step(MakeCodes(run, manifest, learned.file, learned.file.sha256[:16]))
    coded = write_coded_manifest(made, kind)
    measured = driver.run_step(MeasureShortlist(run, coded, draw, made.quantiser_name))
    choice = measured.choose()
    used = choice.is_good or wanted != "auto"
    if not choice.is_good:
        log.warning("%s", choice.explain(kind, used=used))
    certificate = replace(certificate, shortlist=describe_choice(measured, choice, kind, used=used))
    return (write_coded_manifest(made, kind, choice) if used else manifest), certificate


def find_copies(driver: Driver, manifest: StoredFile, min_score: float | None = None) -> FindCopies:
    """Compare all images of a published version with each other; not part of `index_images`."""
    if min_score is None:
        driver.run_step(DrawReferences(driver.run, manifest))
    return driver.run_step(FindCopies(driver.run, manifest, min_score))


def summarise(driver: Driver, version: int) -> IndexReport:
    states = dict(driver.run.versions.read(version).states)
    return IndexReport(driver.run.url, version, states, driver.reports)
