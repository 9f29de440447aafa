"""Implements `virtbus version`."""

import sys

import click

from virtbus.cli import output
from virtbus.cli.invocation import Invocation, local
from virtbus.cli.lazy import examples

_PARTS = ("cli", "schemas", "bus", "controller", "nodeagent", "netd", "imaged")


def of(part: str) -> str | None:
    """Return the installed version of the package `virtbus-<part>`; None if not installed."""
    from importlib.metadata import PackageNotFoundError, version  # this import takes 20 ms

    try:
        return version(f"virtbus-{part}")
    except PackageNotFoundError:
        return None


@click.command(epilog=examples("virtbus version\nvirtbus version -o json"))
@local
def command(invocation: Invocation) -> None:
    """Show the version of this command and of the installed services."""
    versions = {part: of(part) for part in _PARTS}
    rows = [(f"virtbus-{part}", version or "not installed") for part, version in versions.items()]
    value = {"versions": versions, "python": sys.version.split(maxsplit=1)[0]}
    invocation.show(value, lambda: output.table(("PART", "VERSION"), rows))
