"""Verbs about an existing run: how far it is, what failed, whether it is whole, its digests, its garbage."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ckn_scale.cli.options import AsJson, Run, WorkerOptions
from ckn_scale.cli.output import announce, format_states, print_json
from ckn_scale.errors import InputError


def status(run: Run, as_json: AsJson = False) -> None:
    """How far a run is: shards per step, images by state, rate, what is left, the current version.

    \b
    ckn-scale status run/
    ckn-scale status s3://bucket/run --json
    """
    from ckn_scale.cli.progress import format_title
    from ckn_scale.evaluate.report import format_table
    from ckn_scale.runs.status import summarise_run
    from ckn_scale.storage.run_folder import RunFolder

    summary = summarise_run(RunFolder.open(run))
    if as_json:
        print_json(summary)
        return
    rows = [
        [
            format_title(step["step"]),
            f"{step['done']}/{step['total']}",
            f"{step['seconds']:.1f} s",
            f"{step['bytes'] / 1e6:.1f} MB",
            f"{step['images_per_s']:.1f}" if step["images_per_s"] else "",
            f"about {step['remaining_s']:.0f} s" if step["remaining_s"] else "",
        ]
        for step in summary["steps"]
        if step["total"]
    ]
    if rows:
        print(format_table(["step", "shards", "work", "written", "images/s", "left"], rows))
    for what in summary["damaged"]:
        print(f"damaged: {what}")
    images = summary["images"]
    print(f"{images['planned']} images planned: {format_states(images['states'])}")
    for line in _compare_estimate(summary):
        print(line)
    if summary["version"] is None:
        print("no version published yet")
        return
    certificate = summary["certificate"]
    behind = certificate.get("behind_copies")
    restores = f", which restores version {summary['restores']}" if summary["restores"] else ""
    print(
        f"version {summary['version']}{restores}: {certificate['first']} of {certificate['queries']} planted "
        f"queries came back first{f', {behind} of them behind copies only' if behind else ''} "
        f"(at least {certificate['lower']:.3f}, target {certificate['target']:g}); "
        f"{certificate['asked']} asked for this version, {certificate['taken_over']} taken over"
    )
    if certificate.get("evidence"):
        print(_describe_evidence(certificate["evidence"]))
    if carried := certificate.get("carried_from"):
        print(f"asked of version {carried}; images were deleted since, without which others only rank better")
    if certificate.get("everywhere", certificate["queries"]) < certificate["queries"]:
        print(_describe_coverage(certificate))


def _describe_evidence(evidence: dict[str, Any]) -> str:
    """From how many inliers on it is a match, and how that held."""
    inliers = ", ".join(
        f"{count} (1 in {1 / float(rate):,.0f})" for rate, count in evidence["thresholds"].items()
    )
    others = sum(evidence["other_pairs"].values())
    words = f"points have {evidence['words']:,} words; " if evidence.get("words") else ""
    return (
        f"{words}inliers of a match by false-alarm rate: {inliers}; of {others} other random pairs "
        f"{evidence['false_alarms']} reach the first, of {evidence['planted']} other planted views "
        f"{evidence['matched']} the last"
    )


def _describe_coverage(certificate: dict[str, Any]) -> str:
    """That some queries were asked of part of the index only, as those of appended images are."""
    others = certificate["queries"] - certificate["everywhere"]
    return (
        f"{certificate['everywhere']} of the queries were asked of all {certificate['rows']} rows of the "
        f"index ({certificate['everywhere_first']} came back first), {others} of a part, at least "
        f"{certificate['fewest_rows']} rows: an image of the rest may rank before their originals"
    )


def _compare_estimate(summary: dict[str, Any]) -> list[str]:
    """What encoding took, beside what `plan` predicted where it was asked."""
    encode = next((step for step in summary["steps"] if step["step"] == "encode_images"), None)
    done = sum(summary["images"]["states"].values())
    if encode is None or not done:
        return []
    each_ms = 1000 * encode["seconds"] / done
    lines = [f"encoding: {each_ms:.0f} ms of a worker per image, peak memory {summary['peak_memory_mb']} MB"]
    guess = summary["estimate"]
    if guess is not None:
        guess_ms = 1000 * guess["steps"]["encode_images"]["seconds"] / guess["num_images"]
        lines.append(f"predicted: {guess_ms:.0f} ms, {guess['worker_memory_mb']:.0f} MB")
    return lines


def digest(run: Run, as_json: AsJson = False) -> None:
    """One digest per stage over the committed rows: equal runs have equal digests.

    \b
    ckn-scale digest run/ --json
    """
    from ckn_scale.runs.digest import digest_run
    from ckn_scale.storage.run_folder import RunFolder

    digests = digest_run(RunFolder.open(run))
    if as_json:
        print_json(digests)
        return
    for stage, value in digests.items():
        print(f"{stage:<12} {value}")


def verify(
    run: Run,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress lines.")] = False,
) -> None:
    """Read every record and file of a run: checksums, ids, states, the index. Changes nothing.

    Each problem is a line with the path and what to do; the exit code is 1 when there is one.

    \b
    ckn-scale verify run/
    ckn-scale verify s3://bucket/run --json
    """
    announce(f"verifying {run}", quiet=quiet)
    from dataclasses import asdict

    from ckn_scale.cli.progress import ProgressDisplay
    from ckn_scale.runs.verify import verify_run
    from ckn_scale.storage.run_folder import RunFolder

    opened = RunFolder.open(run)
    with ProgressDisplay(quiet=quiet) as display:
        found = verify_run(opened, lambda done, total: display.show_count("verify", done, total))
    if as_json:
        print_json({"run": opened.url, **asdict(found)})
    else:
        for note in found.notes:
            print(f"note: {note}")
        for problem in found.problems:
            print(problem)
        version = "no version" if found.version is None else f"version {found.version}"
        problems = f"{len(found.problems)} problem{'s' if len(found.problems) != 1 else ''}"
        print(
            f"{version}, {found.images} images, {found.records} records, {found.files} files "
            f"({found.size_bytes / 1e6:.1f} MB): {problems if found.problems else 'all is well'}"
        )
    if found.problems:
        raise typer.Exit(1)


def failures(
    run: Run,
    *,
    reason: Annotated[
        str | None, typer.Option(help="Only this state: corrupt, truncated, missing, …")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Encode their shards once more.")] = False,
    as_json: AsJson = False,
    workers: WorkerOptions,
) -> None:
    """Every image that could not be used, with its state and reason; or try them again.

    \b
    ckn-scale failures run/ --reason missing
    ckn-scale failures run/ --reason missing --retry && ckn-scale publish run/
    """
    from ckn_scale.runs.status import list_failures, shards_with_failures
    from ckn_scale.schemas import IMAGE_STATES
    from ckn_scale.storage.run_folder import RunFolder

    if reason is not None and reason not in IMAGE_STATES:
        raise InputError(f"no state named {reason!r}; there are: {', '.join(IMAGE_STATES)}")
    shards = shards_with_failures(RunFolder.open(run), reason) if retry else []
    if shards:
        with workers.open_driver(run) as driver:
            from ckn_scale.steps.encode_images import EncodeImages

            driver.rerun_shards(EncodeImages(driver.run), shards, f"retry of {reason or 'failures'}")
    for row in list_failures(RunFolder.open(run), reason):
        print(json.dumps(row) if as_json else f"{row['state']:<12} {row['uri']}  ({row['reason']})")


def gc(
    run: Run,
    grace_h: Annotated[float, typer.Option(min=0, help="Younger files are left alone.")] = 24.0,
    samples: Annotated[
        bool, typer.Option("--samples", help="The training sample too, once the models are learned.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go.")] = False,
) -> None:
    """Remove data files that no record needs: of lost attempts and superseded generations.

    \b
    ckn-scale gc run/ --dry-run
    ckn-scale gc run/ --samples
    """
    from ckn_scale.runs.collect_garbage import find_garbage
    from ckn_scale.steps.publish import remove_files
    from ckn_scale.storage.run_folder import RunFolder

    opened = RunFolder.open(run)
    garbage = find_garbage(opened, grace_s=grace_h * 3600, samples=samples)
    for path in garbage if dry_run else []:
        print(path)
    if not dry_run:
        remove_files(opened, garbage)
    print(f"{len(garbage)} files {'would be' if dry_run else 'were'} removed")
