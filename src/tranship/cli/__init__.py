"""The command line. Answers `--help` without torch or ray: commands import what they need when they run."""

from tranship.cli.app import main

__all__ = ["main"]
