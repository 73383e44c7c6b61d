"""The command line: one verb per thing a user does."""

from ckn_scale.cli.main import main

__all__ = ["main"]
