"""Defines the command group `virtbus cri` and its verbs."""

import click

from virtbus.cli.lazy import LazyGroup, examples

_HERE = "virtbus.cli.cri"


@click.group(
    cls=LazyGroup,
    verbs={
        "install": (f"{_HERE}.node_setup:install", "Serve VM pods on this Kubernetes node."),
        "uninstall": (f"{_HERE}.node_setup:uninstall", "Remove what `cri install` set up."),
        "gen": (f"{_HERE}.diagnosis:gen", "Print the objects that a cluster needs."),
        "diag": (f"{_HERE}.diagnosis:diag", "Collect the state and the logs of this node."),
        "dump-metadata": (f"{_HERE}.diagnosis:dump_metadata", "Print the stored pods."),
    },
    epilog=examples(
        """
        virtbus cri install
        virtbus cri diag /tmp/node1
        virtbus cri uninstall
        """
    ),
)
def command() -> None:
    """Set up this Kubernetes node for pods that are VMs (docs/howto/vm-pods.md)."""
