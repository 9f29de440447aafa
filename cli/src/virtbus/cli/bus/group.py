"""The group `virtbus bus`: its verbs by name."""

import click

from virtbus.cli.lazy import LazyGroup, examples

_HERE = "virtbus.cli.bus"


@click.group(
    cls=LazyGroup,
    verbs={
        "backup": (f"{_HERE}.files:backup", "Write the records of VMs and hosts to a file."),
        "restore": (f"{_HERE}.files:restore", "Write a backup into an empty bus."),
        "rebuild": (f"{_HERE}.rebuild", "Give the bus what the hosts know and it has lost."),
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
    """The bus itself: what it keeps, and how it is got back."""
