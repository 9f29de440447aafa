"""Defines the command group `virtbus cri` and its verbs."""

import click

from virtbus.cli.lazy import LazyGroup, examples

_HERE = "virtbus.cli.cri"


@click.group(
    cls=LazyGroup,
    verbs={
        "install": (f"{_HERE}.node_setup:install", "Serve VM pods on this Kubernetes node."),
        "uninstall": (f"{_HERE}.node_setup:uninstall", "Remove what `cri install` set up."),
    },
    epilog=examples(
        """
        virtbus cri install
        virtbus cri uninstall
        """
    ),
)
def command() -> None:
    """Set up this Kubernetes node for pods that are VMs (docs/howto/vm-pods.md)."""
