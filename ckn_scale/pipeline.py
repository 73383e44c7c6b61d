"""The pipeline as a plain list: every step that is done in shards, in order, with its parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckn_scale.config import Resources, Settings
from ckn_scale.errors import CorruptData, RunFailed
from ckn_scale.runners.driver import (
    Executor,
    Progress,
    ProgressHook,
    ShardTask,
    StepReport,
    require_done,
    run_shards,
)
from ckn_scale.runners.step import Step, allow_mix, check_fingerprint
from ckn_scale.runners.worker import Handshake, offer_handshake
from ckn_scale.runs.collect_garbage import remove_samples
from ckn_scale.steps.build_index import BuildIndex, write_build_manifest
from ckn_scale.steps.certify_index import CertifyIndex, make_certificate
from ckn_scale.steps.draw_queries import draw_queries, write_draw
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.plan_images import Source, plan_with_background
from ckn_scale.steps.plant_queries import PlantQueries
from ckn_scale.steps.publish import (
    Candidate,
    find_published,
    is_current,
    publish_version,
    read_candidate,
    require_few_failures,
)
from ckn_scale.steps.record_models import adopt_models, record_generation, repair_models
from ckn_scale.steps.sample_patches import SamplePatches
from ckn_scale.steps.train_descriptors import DescribePatches, TrainCodebook, TrainProjection
from ckn_scale.steps.train_layers import DrawSubpatches, SearchRates, TrainLayer
from ckn_scale.steps.train_reduction import SampleVlads, TrainReduction
from ckn_scale.storage.run_folder import RunFolder
from ckn_scale.storage.shards import Commit, find_size_mismatches

StepUse = tuple[type[Step], Mapping[str, str]]


LAYER_STEPS: tuple[type[Step], ...] = (DrawSubpatches, SearchRates, TrainLayer)


def list_training(settings: Settings) -> list[StepUse]:
    """From sampled patches to the last model."""
    num_layers = max(len(channel.ckn.layers) for channel in settings.channels)
    layers = [(kind, {"layer": str(layer)}) for layer in range(num_layers) for kind in LAYER_STEPS]
    return [
        *layers,
        (DescribePatches, {"form": "raw"}),
        (TrainProjection, {}),
        (DescribePatches, {"form": "projected"}),
        (TrainCodebook, {}),
        (SampleVlads, {}),
        (TrainReduction, {}),
    ]


def list_learning(settings: Settings) -> list[StepUse]:
    """Everything before the models stand."""
    return [(SamplePatches, {}), *list_training(settings)]


ALL_STEPS: tuple[type[Step], ...] = (
    SamplePatches,
    *LAYER_STEPS,
    DescribePatches,
    TrainProjection,
    TrainCodebook,
    SampleVlads,
    TrainReduction,
    EncodeImages,
    BuildIndex,
    PlantQueries,
    CertifyIndex,
)
STEPS: dict[str, type[Step]] = {kind.name: kind for kind in ALL_STEPS}


log = logging.getLogger(__name__)

MAX_STARTS = 20  # of publishing, while others change the run


@dataclass(frozen=True)
class IndexReport:
    """What a call did, step by step, and the images by state of the version that is current now."""

    run: str
    version: int  # that is current now
    states: dict[str, int]  # images of the run by state: "ok", "corrupt", …
    steps: list[StepReport]

    def __repr__(self) -> str:
        done = {step.step: step.done for step in self.steps if step.done}
        return (
            f"IndexReport(run={self.run!r}, version={self.version}, states={self.states}, shards_done={done})"
        )


class Driver:
    """One run folder, one executor: does steps and remembers what they came to.

    What is committed is looked at by the sizes of its files; with `check_all` every byte is read. What
    is damaged is made again, as the next generation.
    """

    def __init__(
        self,
        run: RunFolder,
        executor: Executor,
        resources: Resources,
        on_progress: ProgressHook,
        *,
        check_all: bool = False,
    ) -> None:
        self.run, self.executor, self.resources, self.on_progress = run, executor, resources, on_progress
        self.check_all = check_all
        self.reports: list[StepReport] = []

    def run_step(self, kind: type[Step], params: Mapping[str, str] | None = None) -> Step:
        """Do what is not done yet of a step; RunFailed when some of it stays undone."""
        step = kind(self.run, params)
        fingerprint = step.fingerprint  # an input that is missing is refused here, not in every worker
        shard_ids = step.shard_ids()
        standing = step.log.committed()
        committed = {one: standing[one] for one in shard_ids if one in standing}
        for commit in committed.values():
            check_fingerprint(step, commit)
        log.info(
            "%s: %d of %d shards are done (%s)", step.label, len(committed), len(shard_ids), fingerprint[:12]
        )
        suspects = self._find_suspects(committed)
        tasks = [
            ShardTask(step.name, one, dict(step.params), check=one in suspects)
            for one in shard_ids
            if one not in committed or one in suspects
        ]
        self._do_tasks(step, tasks, len(shard_ids))
        return step

    def _find_suspects(self, committed: Mapping[int, Commit]) -> set[int]:
        if self.check_all:
            return set(committed)
        mismatches = find_size_mismatches(self.run.store, committed.values())
        if mismatches:
            log.warning("shards %s have files that are gone or cut: they are made again", mismatches[:10])
        return set(mismatches)

    def rerun_shards(self, step: Step, shard_ids: Sequence[int], reason: str) -> None:
        """The next generation of committed shards."""
        tasks = [ShardTask(step.name, one, dict(step.params), redo=reason) for one in shard_ids]
        self._do_tasks(step, tasks, len(step.shard_ids()))

    def _do_tasks(self, step: Step, tasks: Sequence[ShardTask], total: int) -> None:
        self.run.events.write("step_begins", step=step.label, shards=total, undone=len(tasks))
        sizes = {task.shard_id: step.num_images(task.shard_id) for task in tasks}
        total_images = sum(map(step.num_images, step.shard_ids()))
        before = total_images - sum(sizes.values())
        self.on_progress(Progress(step.label, total - len(tasks), total, before, total_images, 0.0))
        report = run_shards(
            self.executor,
            tasks,
            label=step.label,
            total=total,
            resources=self.resources,
            on_progress=self.on_progress,
            write_event=self.run.events.write,
            sizes=sizes,
            images_before=before,
        )
        self.reports.append(report)
        self.run.events.write("step_ends", step=step.label, done=report.done, failed=len(report.failed))
        self.run.events.flush()
        require_done(report)


def index_images(
    source: Source,
    run_url: str,
    settings: Settings,
    resources: Resources | None = None,
    *,
    keep: Sequence[str] = (),
    append: bool = False,
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
    run = plan_with_background(
        run_url, settings, source, keep, append=append, background=background, models=models
    )
    if models is not None:
        adopt_models(run, models)
    if mix:
        allow_mix(run)
    with open_driver(run, resources, on_progress) as driver:
        driver.check_all = check_all
        try:
            version = _do_all(driver, settings, accept=accept, keep_samples=keep_samples)
        except CorruptData as damage:
            if check_all:
                raise
            log.warning("%s: every file is checked now, and made again where it is damaged", damage)
            driver.check_all = True
            version = _do_all(driver, settings, accept=accept, keep_samples=keep_samples)
    return summarise(driver, version)


def _do_all(driver: Driver, settings: Settings, *, accept: bool, keep_samples: bool) -> int:
    sample(driver, settings)
    train(driver, settings)
    return publish(driver, accept=accept, encode=True, keep_samples=keep_samples)


@contextmanager
def open_driver(run: RunFolder, resources: Resources, on_progress: ProgressHook) -> Iterator[Driver]:
    """A driver with the workers that `resources` asks for, each having shown that it sees run and images."""
    with (
        offer_handshake(run) as handshake,
        choose_executor(resources)(run.url, resources, handshake) as executor,
    ):
        yield Driver(run, executor, resources, on_progress)


def choose_executor(resources: Resources) -> Callable[[str, Resources, Handshake], Executor]:
    if resources.ray is not None:
        from ckn_scale.runners.ray_actors import RayExecutor

        return RayExecutor
    from ckn_scale.runners.local import InlineExecutor, PoolExecutor

    return InlineExecutor if resources.workers == 0 else PoolExecutor


def sample(driver: Driver, settings: Settings) -> None:
    """Draw the training patches, unless the run has models already."""
    if needs_training(driver, settings):
        driver.run_step(SamplePatches)


def train(driver: Driver, settings: Settings) -> None:
    """Learn everything, unless the run has a generation of models already."""
    if needs_training(driver, settings):
        for kind, params in list_training(settings):
            driver.run_step(kind, params)
        record_generation(driver.run, settings)


def needs_training(driver: Driver, settings: Settings) -> bool:
    """Whether the run has no models, or some that have to be learned again because they are damaged."""
    if driver.run.models.latest() is None:
        return True
    return driver.check_all and repair_models(driver.run, settings)


def build(driver: Driver, candidate: Candidate | None = None) -> BuildIndex:
    """The index shards of what is encoded."""
    candidate = candidate or read_candidate(driver.run)
    step = driver.run_step(BuildIndex, {"build": candidate.build})
    assert isinstance(step, BuildIndex)
    return step


def publish(driver: Driver, *, accept: bool, encode: bool = False, keep_samples: bool = False) -> int:
    """Build, certify and publish what is encoded; the version that is current afterwards.

    When another process appends, retries or publishes meanwhile, this starts over with what stands then.
    `encode` does so from the start; without it images that are not encoded yet are refused.
    """
    for _ in range(MAX_STARTS):
        if encode:
            driver.run_step(EncodeImages)
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
    if not accept:
        require_few_failures(driver.run, candidate)
    built = build(driver, candidate)
    current = find_published(candidate, built)
    if current is not None:
        return current
    manifest = write_build_manifest(built)
    draw = write_draw(driver.run, draw_queries(driver.run, candidate.segments, candidate.current))
    params = {**built.params, "manifest": manifest.path, "manifest_sha256": manifest.sha256, "draw": draw}
    driver.run_step(PlantQueries, params)
    certified = driver.run_step(CertifyIndex, params)
    assert isinstance(certified, CertifyIndex)
    certificate = make_certificate(certified)
    return publish_version(driver.run, candidate, manifest, certificate, accept=accept)


def summarise(driver: Driver, version: int) -> IndexReport:
    states = driver.run.versions.read(version)["states"]
    return IndexReport(driver.run.url, version, states, driver.reports)
