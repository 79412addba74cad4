"""The `visionpos` command."""

from visionpos.cli.commands import app, main

__all__ = ["app", "main"]
