"""The figures that the paper prints (arXiv 1603.00438), by the names that this project gives to descriptors.

Points of mAP, UKBench's score of 4, or for Liberty the false-positive rate at 95 % recall in per cent. "Best
AlexNet" of Liberty is its third layer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """One column of one of its tables."""

    title: str
    data: str  # what it was measured on
    figures: dict[str, float]  # by descriptor


NAMES = {
    "sift": "SIFT",
    "rootsift": "RootSIFT",  # which it does not have
    "alexnet-conv1": "AlexNet-conv1",
    "alexnet-conv2": "AlexNet-conv2",
    "alexnet-conv3": "AlexNet-conv3",
    "alexnet-conv4": "AlexNet-conv4",
    "alexnet-conv5": "AlexNet-conv5",
    "landmarks-conv1": "AlexNet-Landmarks conv1",
    "landmarks-conv2": "AlexNet-Landmarks conv2",
    "landmarks-conv3": "AlexNet-Landmarks conv3",
    "landmarks-conv4": "AlexNet-Landmarks conv4",
    "landmarks-conv5": "AlexNet-Landmarks conv5",
    "philippnet": "PhilippNet 64 × 64",
    "philippnet-91": "PhilippNet 91 × 91",
    "philippnet-rome": "PhilippNet-Rome 100K",
    "deepcompare-siam": "DeepCompare siam",
    "deepcompare-siam2stream": "DeepCompare siam2stream",
    "deepcompare-2ch": "DeepCompare 2ch",
    "deepcompare-2ch2stream": "DeepCompare 2ch2stream",
    "ckn-grad": "CKN-grad",
    "ckn-raw": "CKN-raw",
    "ckn-white": "CKN-white",
    "ckn-mix": "CKN-mix",
}

ROME_TRAIN = Printed(
    "RomePatches-Train",
    "1,000 points of 44 bundles of Rome16K, 10 views each",
    {
        "sift": 91.6,
        "alexnet-conv1": 66.4,
        "alexnet-conv2": 73.8,
        "alexnet-conv3": 81.6,
        "alexnet-conv4": 78.4,
        "alexnet-conv5": 53.9,
        "philippnet": 86.1,
        "philippnet-91": 88.0,
        "philippnet-rome": 89.9,
        "deepcompare-siam": 84.8,  # of DeepCompare the best of three training sets each
        "deepcompare-siam2stream": 84.2,
        "deepcompare-2ch": 86.6,
        "deepcompare-2ch2stream": 90.2,
        "ckn-grad": 92.5,
        "ckn-raw": 79.3,
        "ckn-white": 91.9,
    },
)
ROME_TEST = Printed(
    "RomePatches-Test",
    "1,000 points of 22 other bundles, 10 views each",
    {
        "sift": 87.9,
        "alexnet-conv1": 65.0,
        "alexnet-conv2": 69.9,
        "alexnet-conv3": 79.2,
        "alexnet-conv4": 75.7,
        "alexnet-conv5": 49.6,
        "philippnet": 81.4,
        "philippnet-91": 83.7,
        "philippnet-rome": 85.6,
        "deepcompare-siam": 81.0,
        "deepcompare-siam2stream": 80.6,
        "deepcompare-2ch": 83.5,
        "deepcompare-2ch2stream": 86.6,
        "ckn-grad": 88.1,
        "ckn-raw": 76.3,
        "ckn-white": 87.7,
    },
)
MIKOLAJCZYK = Printed(
    "Mikolajczyk",
    "8 scenes, 40 pairs, Hessian-Affine regions",
    {
        "sift": 57.8,
        "alexnet-conv1": 40.9,
        "alexnet-conv2": 46.4,
        "alexnet-conv3": 53.7,
        "alexnet-conv4": 43.4,
        "alexnet-conv5": 24.4,
        "philippnet": 59.7,
        "philippnet-91": 61.3,
        "ckn-grad": 59.5,
        "ckn-raw": 50.9,
        "ckn-white": 62.5,
    },
)
LIBERTY = Printed(
    "Liberty",
    "pairs of a split of its own, unpublished; lower is better",
    {
        "sift": 19.9,
        "alexnet-conv3": 13.5,
        "deepcompare-siam": 14.7,
        "deepcompare-2ch2stream": 1.24,
        "ckn-grad": 27.7,
        "ckn-white": 30.4,
        "ckn-raw": 41.7,
    },
)
HOLIDAYS = Printed(
    "Holidays",
    "1,491 images, 500 queries; VLAD of 256 words of 5,000 Flickr images",
    {
        "sift": 64.0,
        "alexnet-conv1": 59.0,
        "alexnet-conv2": 62.7,
        "alexnet-conv3": 79.3,
        "alexnet-conv4": 77.1,
        "alexnet-conv5": 75.3,
        "landmarks-conv1": 57.7,
        "landmarks-conv2": 72.4,
        "landmarks-conv3": 76.1,
        "landmarks-conv4": 73.9,
        "landmarks-conv5": 66.1,
        "philippnet": 74.1,
        "philippnet-91": 74.7,
        "ckn-grad": 66.5,
        "ckn-raw": 69.9,
        "ckn-white": 78.7,
        "ckn-mix": 79.3,
    },
)
UKBENCH = Printed(
    "UKBench",
    "10,200 images, each a query; VLAD of 256 words of 5,000 Flickr images",
    {
        "sift": 3.44,
        "alexnet-conv1": 3.33,
        "alexnet-conv2": 3.19,
        "alexnet-conv3": 3.74,
        "alexnet-conv4": 3.73,
        "alexnet-conv5": 3.69,
        "philippnet": 3.66,
        "philippnet-91": 3.67,
        "ckn-grad": 3.42,
        "ckn-raw": 3.54,
        "ckn-white": 3.74,
        "ckn-mix": 3.76,
    },
)
OXFORD = Printed(
    "Oxford",
    "Oxford5k, 55 cropped queries; VLAD of 256 words of Paris6k",
    {
        "sift": 43.7,
        "alexnet-conv1": 18.8,
        "alexnet-conv2": 12.5,
        "alexnet-conv3": 33.3,
        "alexnet-conv4": 34.3,
        "alexnet-conv5": 33.4,
        "landmarks-conv1": 20.7,
        "landmarks-conv2": 23.8,
        "landmarks-conv3": 38.6,
        "landmarks-conv4": 38.3,
        "landmarks-conv5": 32.5,
        "philippnet": 38.3,
        "philippnet-91": 43.6,
        "ckn-grad": 49.8,
        "ckn-raw": 23.0,
        "ckn-white": 41.8,
        "ckn-mix": 43.4,
    },
)
PRINTED: dict[str, tuple[Printed, ...]] = {  # by protocol of `evaluate`
    "mikolajczyk": (MIKOLAJCZYK,),
    "rome": (ROME_TRAIN, ROME_TEST),
    "fpr95": (LIBERTY,),
    "holidays": (HOLIDAYS,),
    "ukbench": (UKBENCH,),
    "oxford": (OXFORD,),
}


def printed_name(descriptor: str) -> str | None:
    """The paper's name of a descriptor of ours, `paper:ckn-grad` and the like included."""
    return NAMES.get(descriptor.rpartition(":")[2])


@dataclass(frozen=True)
class PrintedStudy:
    """One of its tables of what was varied, by descriptor and by what it was set to."""

    data: str
    figures: dict[str, dict[str, float]]


PRINTED_STUDIES: dict[tuple[str, str], PrintedStudy] = {  # by study and protocol
    ("dense", "holidays"): PrintedStudy(
        HOLIDAYS.data,
        {
            "sift": {"Hessian-Affine": 64.0, "dense, same pooling": 70.3},
            "ckn-grad": {
                "Hessian-Affine": 66.5,
                "dense, same pooling": 68.5,
                "dense, changed pooling": 71.3,
            },
            "ckn-raw": {"Hessian-Affine": 69.9, "dense, same pooling": 72.3, "dense, changed pooling": 72.3},
            "ckn-white": {
                "Hessian-Affine": 78.7,
                "dense, same pooling": 76.8,
                "dense, changed pooling": 80.8,
            },
        },
    ),
    ("crop", "oxford"): PrintedStudy(
        "Oxford5k, 55 queries; VLAD of 256 words of Paris6k; changed pooling for dense points",
        {
            "sift": {
                "Hessian-Affine, no crop": 45.7,
                "Hessian-Affine, crop": 43.7,
                "dense, no crop": 51.1,
                "dense, crop": 47.6,
            },
            "ckn-grad": {
                "Hessian-Affine, no crop": 49.0,
                "Hessian-Affine, crop": 49.8,
                "dense, no crop": 55.4,
                "dense, crop": 50.9,
            },
        },
    ),
    ("gravity", "oxford"): PrintedStudy(OXFORD.data, {"ckn-grad": {"dominant": 49.8, "gravity": 56.5}}),
    ("supervision", "rome"): PrintedStudy(f"RomePatches-Test, {ROME_TEST.data}", {"all": ROME_TEST.figures}),
}

FINDINGS = {  # what its text says, by study
    "network": "10 and 12 orientations are slightly better than the 16 that were kept; the best others "
    "are sub-patches of 4, pooling of 3 and 2, 1,024 filters, and a quantile of 0.001 (RomePatches-Train).",
    "projection": "Semi-whitening is best for CKN-grad and CKN-white, full whitening slightly better for "
    "CKN-raw; 1,024 dimensions were kept (RomePatches-Train, where SIFT has 91.6).",
    "dense": "Descriptors of dense points need more invariance: with the same pooling CKN-white loses, with "
    "pooling larger by one in each layer every channel is better than on Hessian-Affine points.",
    "crop": "Whole queries favour dense points; only cropped ones are held to be valid.",
    "gravity": "Points that are upright by assumption alone give 7 % on Oxford.",
    "context": "All descriptors are compared on one region of 51 × 51 pixels, AlexNet's layers on their own; "
    "regions are not varied.",
    "training": "CKNs learn from 100,000 patches; fewer were not tried. A supervised network needs 100,000 "
    "classes to be better than one of surrogate classes: 10,000 are too few.",
    "supervision": "Labels help if there are enough of them; networks that learned from labels stay below "
    "SIFT and the CKNs, which learned without.",
    "robustness": "Distances of descriptors, not retrieval: they grow steadily with turn, zoom and shift of "
    "the patch.",
}
