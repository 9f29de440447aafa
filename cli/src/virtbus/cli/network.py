"""Implements `virtbus network create|list|get|update|delete`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, output
from virtbus.cli.failures import CliError, Exit, usage
from virtbus.cli.invocation import PAGE, Invocation, verb
from virtbus.cli.lazy import LazyGroup, examples
from virtbus.cli.named_deletes import delete_named
from virtbus.cli.vm import request
from virtbus.cli.vm.target import namespace_filter, namespace_option

_HERE = "virtbus.cli.network"
HEADER = ("NAMESPACE", "NAME", "KIND", "STATE", "SUBNET", "VMS", "NODES")
EVERYWHERE = "_"
KINDS = ("nat", "routed", "isolated", "overlay", "bridge", "macvtap", "cni")
MODES = ("bridge", "vepa", "private", "passthru")


@click.group(
    cls=LazyGroup,
    verbs={
        "create": (f"{_HERE}:create", "Make a network."),
        "list": (f"{_HERE}:listing", "List the networks for a VM's NICs."),
        "get": (f"{_HERE}:get", "Show one network with its routes and users."),
        "update": (f"{_HERE}:update", "Change DNS, MTU, protection or labels of a network."),
        "delete": (f"{_HERE}:delete", "Remove networks that no VM uses."),
    },
    epilog=examples(
        """
        virtbus network create blue --kind isolated --subnet 10.200.0.0/24
        virtbus vm create web --image tiny --network blue
        virtbus network list
        """
    ),
)
def command() -> None:
    """Manage networks for the NICs of VMs.

    `default` is built in: each node has it without an object. Other networks are objects on the
    bus, or CNI conflists that an operator put on a node. A VM keeps the network settings that
    applied when it was created.
    """


def _scoped(function: Any) -> Any:
    everywhere = click.option(
        "--all-namespaces",
        is_flag=True,
        help="A network of all namespaces. Only the credentials of admin change it (--creds).",
    )
    return everywhere(namespace_option(function))


def _name(function: Any) -> Any:
    return click.argument("name", shell_complete=completion_sources.networks)(function)


def _asked(name: str, namespace: str, *, everywhere: bool) -> dict[str, Any]:
    return {"name": name, "namespace": EVERYWHERE if everywhere else namespace}


@click.command(
    epilog=examples(
        """
        virtbus network create blue --subnet 10.200.0.0/24 --mtu 1400 --dns 192.0.2.53
        virtbus network create lab --kind isolated --subnet 10.9.0.0/24
        virtbus network create db --kind isolated --subnet 10.9.1.0/24 --pool fleet
        virtbus network create dmz --kind routed --on n1=10.1.0.0/24 --on n2=10.2.0.0/24
        virtbus network create mesh --kind overlay --subnet 10.210.0.0/16
        virtbus network create lan --kind bridge --link br-lan
        virtbus network create wan --kind macvtap --link eth1
        virtbus network create calico --kind cni --conflist calico
        virtbus network create vlan7 --kind cni --config ./vlan7.conflist --all-namespaces
        """
    )
)
@click.argument("name")
@click.option("--kind", type=click.Choice(KINDS), default="nat", show_default=True)
@click.option(
    "--subnet",
    metavar="CIDR",
    help="The guests' addresses. For bridge and macvtap: used instead of the segment's DHCP.",
)
@click.option(
    "--on",
    "on_nodes",
    multiple=True,
    metavar="NODE=CIDR",
    help="For routed: the subnet of a node, IPv4 or IPv6; repeatable.",
)
@click.option(
    "--gateway",
    metavar="IP",
    help="The gateway. For bridge and macvtap: the router.  [nat, overlay: the first address]",
)
@click.option(
    "--subnet6",
    metavar="CIDR",
    help="As --subnet, for IPv6. Guests get both; bridge and macvtap may have IPv6 alone.",
)
@click.option(
    "--gateway6",
    metavar="IP",
    help="As --gateway, for IPv6. For bridge and macvtap: the router's link-local address.",
)
@click.option(
    "--range",
    "ranges",
    multiple=True,
    metavar="IP[-IP]",
    help="Interfaces get addresses from this range only; repeatable.  [default: all]",
)
@click.option(
    "--exclude",
    "excluded",
    multiple=True,
    metavar="IP[-IP]",
    help="Addresses that no interface gets; repeatable.",
)
@click.option(
    "--pool",
    type=click.Choice(("host", "fleet")),
    help="For nat and isolated: addresses are unique on a host or in the fleet.  [default: host]",
)
@click.option(
    "--dns",
    multiple=True,
    metavar="IP",
    help="Name server for names that no VM has; repeatable.",
)
@click.option(
    "--share-names",
    is_flag=True,
    help="Guests resolve the names of all VMs on this network, of any namespace.",
)
@click.option(
    "--mtu",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="[default: 1500; overlay: less; bridge, macvtap, cni: that of the link or plugins]",
)
@click.option(
    "--link", metavar="NAME", help="For bridge and macvtap: a bridge or interface of hosts."
)
@click.option(
    "--vlan",
    type=click.IntRange(min=1),
    metavar="ID",
    help="For bridge: the VLAN of the guests.",
)
@click.option("--mode", type=click.Choice(MODES), help="The mode of macvtap.  [default: bridge]")
@click.option("--conflist", metavar="NAME", help="For cni: a conflist that nodes have.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For cni: a file with a conflist. Nodes must allow its plugins.",
)
@click.option(
    "--default-deny",
    is_flag=True,
    help="Guests have only the connections that a security group allows.",
)
@click.option("--protected", is_flag=True, help="Refuse deletes until this is cleared.")
@click.option("--label", "label_texts", multiple=True, metavar="K=V", help="Label; repeatable.")
@click.option(
    "--uid", metavar="UUID", help="A uid of your choice: the same command may then be repeated."
)
@_scoped
@verb
def create(
    invocation: Invocation, *, name: str, namespace: str, all_namespaces: bool, **flags: Any
) -> None:
    """Make the network NAME. A host sets it up when a VM on the host first uses it.

    With nat, guests reach each other on their host, and the outside under the host's address. With
    routed, guests reach the outside under their own addresses; `virtbus network get` shows the
    routes that routers outside need. With isolated, guests reach only each other on their host.
    With overlay, guests of all hosts reach each other, and the outside as with nat.

    With bridge, guests are on the segment of a bridge of their host. The segment's DHCP server
    gives them addresses, unless the network has a --subnet. With macvtap, guests are on the segment
    of an interface of their host, and do not reach the host itself. With cni, plugins decide.

    A host accepts only the values of --link that are in its netd's setting links_allowed.
    """
    wanted = {
        **_asked(name, namespace, everywhere=all_namespaces),
        "uid": flags["uid"] or uuid7(),
        "spec": _spec(flags),
        "labels": request.labels(flags["label_texts"]),
    }
    answer = invocation.call("network", "create", wanted)
    view = answer.get("network") or {}
    if not answer.get("created"):
        invocation.note(f"{name} was there already, unchanged")
    invocation.show(view, lambda: table([view]))


def _spec(flags: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"kind": flags["kind"]}
    words = (
        *("subnet", "gateway", "subnet6", "gateway6", "pool", "link", "vlan", "mode"),
        *("mtu", "conflist", "default_deny", "share_names", "protected"),
    )
    spec |= {word: flags[word] for word in words if flags[word]}
    spec |= {word: list(flags[word]) for word in ("dns", "ranges", "excluded") if flags[word]}
    if flags["config"]:
        spec["config"] = request.read_text(str(flags["config"]), "--config")
    subnets: dict[str, dict[str, str]] = {}
    for text in flags["on_nodes"]:
        node, equals, subnet = text.partition("=")
        if not equals:
            raise usage(f"--on {text} has no subnet", "write it as --on n1=10.1.0.0/24")
        field = "subnets6" if ":" in subnet else "subnets"
        if subnets.setdefault(field, {}).setdefault(node, subnet) != subnet:
            raise usage(f"--on {text}: {node} has {subnets[field][node]} already")
    return spec | subnets


@click.command(
    name="list",
    epilog=examples(
        """
        virtbus network list
        virtbus network list -n shop
        virtbus network list -o json | jq -r '.items[] | select(.user_count == 0) | .name'
        """
    ),
)
@namespace_filter
@click.option("--label", "label_texts", multiple=True, metavar="K=V", help="Label; repeatable.")
@verb
def listing(invocation: Invocation, *, namespace: str | None, label_texts: tuple[str, ...]) -> None:
    """List network objects. Without a filter, also list `default` and the nodes' CNI conflists."""
    query: dict[str, Any] = {"labels": request.labels(label_texts), "limit": PAGE}
    if namespace:
        query["namespace"] = namespace
    items = invocation.listed("network", query)["items"]
    every = not namespace and not label_texts
    offers = invocation.listed("network", action="offers")["items"] if every else []
    rows = [*map(_row, items), *map(_offer, offers)]
    invocation.show({"items": items, "offers": offers}, lambda: output.table(HEADER, rows))


@click.command(epilog=examples("virtbus network get blue -o yaml"))
@_name
@_scoped
@verb
def get(invocation: Invocation, *, name: str, namespace: str, all_namespaces: bool) -> None:
    """Show the network NAME, with the routes that it needs and the VMs that use it."""
    view = invocation.call_and_show(
        "network", "get", _asked(name, namespace, everywhere=all_namespaces), table
    )
    for route in view.get("routes") or ():
        via = " or ".join(route.get("via") or ()) or f"the address of {route.get('node')}"
        invocation.note(f"needed outside: route {route.get('destination')} via {via}")
    if view.get("given"):
        invocation.note(f"{view['given']} addresses are claimed on the bus")
    if view.get("message"):
        invocation.note(str(view["message"]))


@click.command(
    epilog=examples(
        """
        virtbus network update blue --mtu 1400
        virtbus network update blue --no-dns
        virtbus network update blue --no-protected
        """
    )
)
@_name
@click.option("--dns", multiple=True, metavar="IP", help="Replaces all name servers; repeatable.")
@click.option("--no-dns", is_flag=True, help="Remove all name servers.")
@click.option("--mtu", type=int, metavar="BYTES")
@click.option("--protected/--no-protected", default=None, help="Refuse deletes, or permit them.")
@click.option(
    "--label", "label_texts", multiple=True, metavar="K=V", help="Replaces all labels; repeatable."
)
@_scoped
@verb
def update(
    invocation: Invocation, *, name: str, namespace: str, all_namespaces: bool, **flags: Any
) -> None:
    """Change the network NAME. DNS and MTU concern VMs that are created later."""
    given = {
        "dns": [] if flags["no_dns"] else list(flags["dns"]) or None,
        "mtu": flags["mtu"],
        "protected": flags["protected"],
        "labels": request.labels(flags["label_texts"]) or None,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    if flags["dns"] and flags["no_dns"]:
        raise usage("--dns and --no-dns exclude each other", "give one of them")
    if not changes:
        raise usage("nothing to change", "give --dns, --no-dns, --mtu, --protected or --label")
    asked = _asked(name, namespace, everywhere=all_namespaces)
    invocation.call_and_show("network", "update", asked | changes, table)


@click.command(epilog=examples("virtbus network delete blue\nvirtbus network delete a b --no-wait"))
@click.argument("names", nargs=-1, required=True, shell_complete=completion_sources.networks)
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until the network is gone."
)
@click.option("--timeout", default=60.0, show_default=True, metavar="S", help="Time limit.")
@_scoped
@verb
def delete(
    invocation: Invocation,
    *,
    names: tuple[str, ...],
    wait: bool,
    timeout: float,
    namespace: str,
    all_namespaces: bool,
) -> None:
    """Remove networks. The command refuses a network that VMs use, or that is protected.

    A network is removed some seconds later, so that creates of VMs in progress can end first.
    """
    asked = [_asked(name, namespace, everywhere=all_namespaces) for name in dict.fromkeys(names)]
    wait_s = timeout if wait else None
    delete_named(invocation, "network", asked, wait_s=wait_s, check=_refuse_kept)


def _refuse_kept(view: Mapping[str, Any]) -> None:
    """Raise CliError if the controller has reverted the delete."""
    if view.get("state") != "Deleting":
        message = f"{view.get('name')} stays: {view.get('message')}"
        hint = "delete those VMs, then repeat"
        raise CliError(Exit.REFUSED, "network_in_use", message, hint=hint)


def table(views: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of network objects."""
    return output.table(HEADER, [_row(view) for view in views])


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    spec = view.get("spec") or {}
    by_node = [*(spec.get("subnets") or {}).items(), *(spec.get("subnets6") or {}).items()]
    subnets = [spec.get("subnet"), spec.get("subnet6"), *(subnet for _, subnet in by_node)]
    state = str(view.get("state") or "-")
    namespace = str(view.get("namespace", ""))
    return (
        "(all)" if namespace == EVERYWHERE else namespace,
        str(view.get("name", "")),
        str(spec.get("kind") or ""),
        f"{state},protected" if spec.get("protected") else state,
        ", ".join(str(one) for one in subnets if one) or _elsewhere(spec),
        str(view.get("user_count") or 0),
        ", ".join(dict.fromkeys(node for node, _ in by_node)) or "-",
    )


def _elsewhere(spec: Mapping[str, Any]) -> str:
    """Return the source of addresses in a network without a subnet."""
    return f"DHCP on {spec['link']}" if spec.get("link") else "set by its plugins"


def _offer(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of a network that nodes offer without an object on the bus."""
    nodes = str((item.get("detail") or {}).get("nodes") or "-")
    subnet = str(item.get("subnet") or "set per node")
    name, kind = str(item.get("name", "")), str(item.get("kind", ""))
    return ("(node)", name, kind, "-", subnet, "-", nodes)
