"""The pipeline as a plain list: every step that is done in shards, in order."""

from __future__ import annotations

from ckn_scale.steps.base import Step
from ckn_scale.steps.build_index import BuildIndex
from ckn_scale.steps.certify_index import CertifyIndex
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.steps.sample_patches import SamplePatches
from ckn_scale.steps.sample_vlads import SampleVlads
from ckn_scale.steps.train_ckn import TrainCkn
from ckn_scale.steps.train_codebook import TrainCodebook
from ckn_scale.steps.train_projection import TrainProjection
from ckn_scale.steps.train_reduction import TrainReduction

SAMPLING: tuple[type[Step], ...] = (SamplePatches,)
TRAINING: tuple[type[Step], ...] = (TrainCkn, TrainProjection, TrainCodebook, SampleVlads, TrainReduction)
ALL_STEPS: tuple[type[Step], ...] = (*SAMPLING, *TRAINING, EncodeImages, BuildIndex, CertifyIndex)

STEPS: dict[str, type[Step]] = {step.name: step for step in ALL_STEPS}
