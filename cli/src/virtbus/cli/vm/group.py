"""Defines the command group `virtbus vm` and its verbs."""

import click

from virtbus.cli.lazy import LazyGroup, examples

_HERE = "virtbus.cli.vm"


@click.group(
    cls=LazyGroup,
    verbs={
        "create": (f"{_HERE}.create", "Create a VM; optionally wait for it."),
        "list": (f"{_HERE}.listing", "List VMs, or watch them change."),
        "get": (f"{_HERE}.get", "Show one VM."),
        "update": (f"{_HERE}.update", "Change a VM: CPUs, memory, labels, protection."),
        "clone": (
            "virtbus.cli.clone:command",
            "Make a VM whose disks begin as those of another VM.",
        ),
        "delete": (f"{_HERE}.delete", "Delete VMs with their disks."),
        "start": (f"{_HERE}.power:start", "Start a stopped VM."),
        "stop": (f"{_HERE}.power:stop", "Stop a VM; it keeps its disks and node."),
        "restart": (f"{_HERE}.power:restart", "End a VM's guest and start it again."),
        "pause": (f"{_HERE}.power:pause", "Stop a VM's CPUs."),
        "unpause": (f"{_HERE}.power:unpause", "Resume a paused VM."),
        "reset": (f"{_HERE}.power:reset", "Press a VM's reset button."),
        "soft-reboot": (f"{_HERE}.power:soft_reboot", "Ask a VM's guest to reboot."),
        "freeze": (f"{_HERE}.freeze:freeze", "Freeze a guest's file systems for a time."),
        "thaw": (f"{_HERE}.freeze:thaw", "Thaw a guest's file systems."),
        "eject": (f"{_HERE}.media:eject", "Eject the medium of a VM's CD-ROM drive."),
        "insert": (f"{_HERE}.media:insert", "Insert the medium of a VM's CD-ROM drive again."),
        "nic": (f"{_HERE}.nic", "Add a network interface to a VM, or remove one."),
        "net": (f"{_HERE}.net", "Explain a VM's network, and check it."),
        "adopt": (f"{_HERE}.adopt", "Take an orphaned VM from its Kubernetes cluster."),
        "flatten": ("virtbus.cli.flatten:of_vm", "Copy the layers below a VM's disks into them."),
        "export": ("virtbus.cli.export:of_vm", "Write a disk of a VM that is off to a file."),
        "move": (f"{_HERE}.move", "Stop a VM and start it on another host."),
        "console": (f"{_HERE}.console", "Enter a VM's serial console."),
        "ssh": (f"{_HERE}.ssh", "Log in to a VM's guest over the bus."),
        "port-forward": (f"{_HERE}.port_forward", "Reach ports of a VM's guest from here."),
        "vnc": (f"{_HERE}.vnc", "Show a VM's display to a VNC viewer here."),
        "screenshot": (f"{_HERE}.screenshot", "Take a picture of a VM's display."),
        "guest": (f"{_HERE}.guest", "Show data of a VM's guest agent."),
        "logs": (f"{_HERE}.logs", "Print the log of a VM's serial console."),
        "events": (f"{_HERE}.events", "Show a VM's events."),
        "trace": (f"{_HERE}.trace", "Show the time of each step of a create."),
    },
    epilog=examples(
        """
        virtbus vm create web --image tiny --wait ready
        virtbus vm list -w
        virtbus vm trace web
        """
    ),
)
def command() -> None:
    """Create, list, watch, enter and delete virtual machines.

    A VM is named by NAME in a namespace (-n), or by its uid.
    """
