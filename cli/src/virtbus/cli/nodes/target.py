"""The argument NAME of a node, completed from the bus."""

from collections.abc import Callable
from typing import Any

import click

from virtbus.cli import completion_sources


def node_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument NAME of a node."""
    return click.argument("name", shell_complete=completion_sources.nodes)(function)
