"""Descriptors of patches: `PatchNetwork` is what each of them is, `catalogue.py` has them by name."""
