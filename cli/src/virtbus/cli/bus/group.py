"""Defines the command group `virtbus bus` and its verbs."""

import click

from virtbus.cli.lazy import LazyGroup, examples

_HERE = "virtbus.cli.bus"


@click.group(
    cls=LazyGroup,
    verbs={
        "init": (f"{_HERE}.init", "Write a production bus: keys, accounts, TLS, servers."),
        "declare": (f"{_HERE}.check:declare", "Make the streams on a new bus."),
        "add-node": (f"{_HERE}.nodes:add_node", "Give a host its account and credentials."),
        "revoke-node": (
            f"{_HERE}.nodes:revoke_node",
            "Replace a host's credentials; the old ones end.",
        ),
        "remove-node": (f"{_HERE}.nodes:remove_node", "Remove a host's account at once."),
        "add-bridge": (
            f"{_HERE}.nodes:add_bridge",
            "Give a further cluster's bridge its credentials.",
        ),
        "add-cri": (f"{_HERE}.nodes:add_cri", "Give a node's container runtime its credentials."),
        "check": (f"{_HERE}.check:check", "Find problems in a bus's files."),
        "backup": (f"{_HERE}.files:backup", "Write the desired state of the bus to a file."),
        "restore": (f"{_HERE}.files:restore", "Write a backup into an empty bus."),
        "specs": (f"{_HERE}.specs", "Write the VMs of a backup as files for `vm create -f`."),
        "rebuild": (f"{_HERE}.rebuild", "Restore lost records from the hosts."),
    },
    epilog=examples(
        """
        virtbus bus backup /var/backups/virtbus
        virtbus bus rebuild --dry-run        after a loss: what would be written back?
        virtbus bus rebuild
        """
    ),
)
def command() -> None:
    """Set up, check, back up and restore the bus."""
