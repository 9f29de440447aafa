"""Implements `virtbus vm nic add` and `virtbus vm nic remove`."""

import itertools
from typing import Any

import click

from virtbus.cli import completion_sources
from virtbus.cli.failures import usage
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.vm import view as views
from virtbus.cli.vm.get import fetch
from virtbus.cli.vm.target import name_argument, namespace_option
from virtbus.schemas.nic import NicModel

_HERE = "virtbus.cli.vm.nic"


@click.group(
    cls=LazyGroup,
    verbs={
        "add": (f"{_HERE}:add", "Add an interface to a VM, also while it runs."),
        "remove": (f"{_HERE}:remove", "Remove an interface of a VM, also while it runs."),
    },
    epilog=examples(
        """
        virtbus vm nic add web --network lan
        virtbus vm get web
        virtbus vm nic remove web lan
        """
    ),
)
def command() -> None:
    """Change the network interfaces of a VM.

    A running guest gets the device at once, and its address by DHCP. A device is removed after the
    running guest has released it.
    """


@click.command(
    epilog=examples(
        """
        virtbus vm nic add web --network lan
        virtbus vm nic add web --network default --name backup --mac 02:00:5e:10:00:01
        virtbus vm nic add web --network lan --model e1000e --mtu 1400
        """
    )
)
@name_argument
@click.option(
    "--network",
    default="default",
    show_default=True,
    shell_complete=completion_sources.networks,
    metavar="NETWORK",
)
@click.option(
    "--name", "nic", metavar="NIC", help="The interface's name.  [default: the network's]"
)
@click.option("--mac", metavar="MAC", help="[default: made from the VM's uid]")
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="IP",
    help="A static IPv4 or IPv6 address of the network; repeatable.",
)
@click.option(
    "--model", type=click.Choice([str(one) for one in NicModel]), help="[default: virtio]"
)
@click.option("--mtu", type=int, metavar="BYTES", help="[default: the network's]")
@click.option("--queues", type=int, metavar="N", help="Queues of a virtio device.  [default: 1]")
@namespace_option
@verb
def add(invocation: Invocation, *, name: str, namespace: str, **flags: Any) -> None:
    """Add an interface on NETWORK to the VM NAME.

    A running guest gets the interface by hot-plug. Until then the VM shows NicChangePending or,
    without a free PCI slot, RestartRequired.
    """
    view = fetch(invocation, name, namespace)
    spec = _spec(view)
    nics = spec["domain"]["devices"]["interfaces"]
    taken = [nic["name"] for nic in nics]
    nic = flags["nic"] or _free_name(flags["network"], taken)
    if nic in taken:
        raise usage(f"{view['name']} has an interface {nic!r} already", "give another --name")
    given = {"model": flags["model"], "mtu": flags["mtu"], "queues": flags["queues"]}
    given["addresses"] = list(flags["addresses"]) or None
    wanted = {"name": nic, "mac_address": flags["mac"], **given}
    nics.append({key: value for key, value in wanted.items() if value is not None})
    spec["networks"].append({"name": nic, "network": flags["network"]})
    _update(invocation, view, spec)


@click.command(
    epilog=examples(
        """
        virtbus vm nic remove web lan
        virtbus vm get web                   NicChangePending: the guest has not released it
        """
    )
)
@name_argument
@click.argument("nic")
@namespace_option
@verb
def remove(invocation: Invocation, *, name: str, nic: str, namespace: str) -> None:
    """Remove the interface NIC of the VM NAME.

    A running guest is asked to release the device. Until the guest has released it, the VM shows
    NicChangePending.
    """
    view = fetch(invocation, name, namespace)
    spec = _spec(view)
    devices = spec["domain"]["devices"]
    known = [one["name"] for one in devices["interfaces"]]
    if nic not in known:
        shown = ", ".join(known) or "none"
        raise usage(f"{view['name']} has no interface {nic!r}", f"its interfaces: {shown}")
    devices["interfaces"] = [one for one in devices["interfaces"] if one["name"] != nic]
    spec["networks"] = [one for one in spec["networks"] if one["name"] != nic]
    _update(invocation, view, spec)


def _spec(view: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = view["spec"]
    return spec


def _free_name(network: str, taken: list[str]) -> str:
    """Return the network's name, with a number appended if an interface has that name already."""
    names = itertools.chain([network], (f"{network}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _update(invocation: Invocation, view: dict[str, Any], spec: dict[str, Any]) -> None:
    query = {"uid": view["uid"], "revision": view["revision"], "spec": spec}
    after = invocation.call("vm", "update", query)
    invocation.show(after, lambda: views.table([after]))
