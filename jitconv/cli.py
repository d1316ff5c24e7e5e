"""The ``jitconv`` command: parses, calls the library, prints.

Nothing here computes. torch and rich are imported by the commands that need them, so that ``--help`` and
``--version`` answer at once.
"""

from __future__ import annotations

from typing import Any

import click

from jitconv._version import __version__
from jitconv.errors import JitconvError


class _Group(click.Group):
    """A group whose commands end with one message and exit status 1 where jitconv raises an error of its own."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except JitconvError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jitconv", message="%(prog)s %(version)s")
def main() -> None:
    """Fused convolution kernels for PyTorch: generate, compile, cache, look inside."""
