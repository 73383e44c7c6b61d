"""What the tests of faults share: a run to be finished, and drivers that are killed with the test."""

from __future__ import annotations

import subprocess

import pytest
from photo_runs import copy_trained


@pytest.fixture
def run(reference, tmp_path):
    """A run whose models are learned, and nothing more."""
    return copy_trained(reference, tmp_path / "run")


@pytest.fixture
def spawn():
    """`subprocess.Popen` whose output is caught; what is left of the processes is killed."""
    drivers = []

    def start(command, **options):
        pipe = subprocess.PIPE
        drivers.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()
        driver.communicate()
