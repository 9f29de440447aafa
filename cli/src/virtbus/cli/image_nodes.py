"""Selects the nodes that get an image."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from virtbus.cli import completion_sources
from virtbus.cli.failures import CliError, Exit, usage
from virtbus.cli.invocation import Invocation
from virtbus.cli.vm.request import labels


def nodes_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --node and --label to a verb."""
    for option in (_LABEL, _NODE):
        function = option(function)
    return function


def chosen(invocation: Invocation, names: Sequence[str], label_texts: Sequence[str]) -> list[str]:
    """Return the named nodes, or the ready nodes with the labels. No label means all ready nodes.

    Raises:
        CliError: both names and labels are given, a named node is unknown, or no node is found.
    """
    if names and label_texts:
        raise usage("--node and --label exclude each other", "name nodes, or select them by label")
    items = {str(item["node"]): item for item in invocation.listed("node")["items"]}
    unknown = [name for name in names if name not in items]
    if unknown:
        message = f"there is no node {', '.join(unknown)}"
        raise CliError(Exit.NOT_FOUND, "node_not_found", message, hint="`virtbus node list`")
    wanted = labels(label_texts).items()
    ready = [
        name
        for name, item in sorted(items.items())
        if item.get("state") == "ready" and wanted <= (item.get("labels") or {}).items()
    ]
    found = list(dict.fromkeys(names)) or ready
    if not found:
        with_labels = f" with {', '.join(label_texts)}" if label_texts else ""
        message = f"no node{with_labels} is ready"
        raise CliError(Exit.REFUSED, "no_node", message, hint="`virtbus node list` shows them")
    return found


_NODE = click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NODE",
    shell_complete=completion_sources.nodes,
    help="Only onto this node; repeatable.  [default: every ready node]",
)
_LABEL = click.option(
    "-l",
    "--label",
    "label_texts",
    multiple=True,
    metavar="K=V",
    help="Only onto ready nodes with this label; repeatable.",
)
