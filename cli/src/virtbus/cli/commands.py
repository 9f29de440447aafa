"""Defines the root command and its verbs. A call of a verb imports the verb's module."""

import click

from virtbus.cli.lazy import LazyGroup, examples

_HERE = "virtbus.cli"


@click.group(
    cls=LazyGroup,
    verbs={
        "up": (f"{_HERE}.up.command", "Run a bus, the controller and this host's services."),
        "status": (f"{_HERE}.status", "Show the health of services, bus and nodes."),
        "vm": (f"{_HERE}.vm.group", "Create, list, watch, enter and delete virtual machines."),
        "volume": (f"{_HERE}.volume", "Make, list, grow and delete volumes."),
        "pool": (f"{_HERE}.pool", "List the pools that hold volumes."),
        "snapshot": (f"{_HERE}.snapshot", "Make, list and restore snapshots of disks."),
        "backup": (f"{_HERE}.backup", "Make, verify and restore backups of VMs."),
        "operation": (f"{_HERE}.operation", "List, watch and cancel long work, such as exports."),
        "export": (f"{_HERE}.export", "Download exported disks."),
        "image": (f"{_HERE}.image", "List and pull disk images."),
        "imagename": (f"{_HERE}.imagename", "Set, list and delete image names."),
        "network": (f"{_HERE}.network", "Make, list and delete networks."),
        "security-group": (
            f"{_HERE}.security_group",
            "Make, list and change rules about connections of VMs.",
        ),
        "node": (f"{_HERE}.node", "List, drain and fence the hosts that run VMs."),
        "bus": (f"{_HERE}.bus.group", "Set up, back up, restore and rebuild the bus."),
        "cri": (f"{_HERE}.cri.group", "Set up a Kubernetes node for pods that are VMs."),
        "events": (f"{_HERE}.event_history", "Show or follow the events of all VMs and nodes."),
        "doctor": (
            f"{_HERE}.doctor.command",
            "Find problems of this host, and show the repairs.",
        ),
        "config": (f"{_HERE}.config", "Check the services' settings."),
        "completion": (f"{_HERE}.completion", "Shell completion for bash, zsh and fish."),
        "version": (f"{_HERE}.version", "Show the version of this command and its services."),
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        """
        virtbus doctor                       is this host ready?
        virtbus up                           start everything here (keep it open)
        virtbus vm create web --image tiny --wait ready
        virtbus vm console web               its serial console; leave with ^]
        virtbus vm delete web
        """
    ),
)
@click.version_option(package_name="virtbus-cli", message="%(prog)s %(version)s")
@click.option("--server", metavar="URL", help="NATS URL. [env: VIRTBUS_SERVER]")
@click.option("--creds", metavar="FILE", help="Credentials file. [env: VIRTBUS_CREDS]")
def virtbus(server: str | None, creds: str | None) -> None:
    """Virtual machines over a NATS bus.

    `virtbus up` starts a bus and all services on this host; most other verbs are clients of that
    bus. Each verb's --help shows examples. Exit codes: 0 ok, 1 refused, 2 usage, 3 not found, 4
    outcome unknown (repeat the same command), 5 unavailable.
    """
    del server, creds  # each verb reads them from the root context (see `invocation.verb`)
