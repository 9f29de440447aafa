"""Explains a VM's network in words and a small drawing. A view is a `NetworkView` as a map."""

from collections.abc import Iterator, Mapping
from ipaddress import IPv4Interface
from typing import Any

from virtbus.cli import units

Map = Mapping[str, Any]
BUILT_IN, ROUTED, ISOLATED = "bridge", "routed", "isolated"
MASQUERADE, PASST = "masquerade", "passt"
"""Bindings (`InterfaceStatus.binding`)."""
HOST_BRIDGE, MACVTAP, OVERLAY = "host-bridge", "macvtap", "overlay"
"""Kinds of an interface's path (`NicPath.kind`), as are BUILT_IN, ROUTED and ISOLATED."""


def explained(view: Map) -> str:
    """Return the text of `vm net`."""
    parts = [_head(view)]
    parts += [_interface(view, nic) for nic in view.get("interfaces") or ()]
    if view.get("faults") is not None:
        parts.append(_faults(view["faults"]))
    return "\n\n".join(parts)


def _head(view: Map) -> str:
    name = f"{view.get('namespace')}/{view.get('name')}"
    if view.get("state") == "none":
        return f"{name} has no network on its node. It is made when the VM starts."
    runs = "runs" if view.get("guest_runs") else "does not run"
    where = f"{name} on {view.get('node')}: its guest {runs}. Its links are in {view.get('netns')}."
    return where if view.get("interfaces") else f"{where} It has no interface."


def _interface(view: Map, nic: Map) -> str:
    status = nic.get("status") or {}
    steps = enumerate(_steps(view, nic, status), start=1)
    facts = [
        status.get("mac", ""),
        ", ".join(status.get("addresses") or ()) or "no address yet",
        f"MTU {status.get('mtu')}",
        f"link {status.get('state')}",
        *([str(status["plug"])] if status.get("plug", "plugged") != "plugged" else []),
    ]
    lines = [
        f"{status.get('name')} on the network {status.get('network')}: {', '.join(facts)}",
        "",
        f"    {_drawing(view, nic, status)}",
        "",
        *(f"  {number}. {text}" for number, text in steps),
    ]
    return "\n".join(lines)


def _drawing(view: Map, nic: Map, status: Map) -> str:
    inside = ["guest", f"[{status.get('tap')}]", nic.get("bridge"), nic.get("link")]
    drawn = (" -> " if _translated(status) else " -- ").join(map(str, inside[2:]))
    drawn = f"guest -- {inside[1]} -- {drawn}"
    if nic.get("kind") == MACVTAP:
        return f"{drawn} on {nic['host_bridge']} -- segment"
    if not nic.get("host_link"):
        return f"{drawn} == network {status.get('network')}"
    by = "-- passt" if status.get("binding") == PASST else ""
    drawn = f"{drawn} {by}== {nic['host_link']} -- {nic['host_bridge']}"
    if nic.get("kind") in {ISOLATED, HOST_BRIDGE}:
        return drawn if nic.get("kind") == ISOLATED else f"{drawn} -- segment"
    return f"{drawn} ({_gateway(view, nic, status)}) -- host"


def _steps(view: Map, nic: Map, status: Map) -> Iterator[str]:
    tap, bridge, link = status.get("tap"), nic.get("bridge"), nic.get("link")
    addresses = status.get("guest_addresses") or status.get("addresses") or ()
    own = _ips(addresses)
    yield f"The guest sends a frame, and QEMU writes it to {tap}."
    yield (
        f"The rules of {tap} pass {_versions(addresses)} from {status.get('mac')} with the address "
        f"{own or '(none yet)'}. They drop and count all else (`virtbus vm get --counters`)."
    )
    yield from _groups(view, nic)
    if nic.get("kind") in {HOST_BRIDGE, MACVTAP}:
        yield from _segment(nic, link, tap)
        return
    yield _given(nic, tap)
    if _translated(status):
        yield from _nat(nic, status)
    else:
        yield f"{bridge} leads to {link}." + _limited(nic)
    if not nic.get("host_link"):
        plugins = ", ".join(nic.get("plugins") or ()) or "its plugins"
        yield f"{link} was made by the CNI plugins {plugins}; they decide about the rest."
        yield "Hosts of the fleet are closed."
        return
    if status.get("binding") == PASST:
        yield from _passt(nic, link)
        link = "Its link"
    yield (
        f"{link} is a cable to {nic['host_link']} on the host, a port of {nic['host_bridge']}. "
        f"Guests of {_subnet(view, nic, status)} on this host reach each other there."
    )
    yield from _outside(view, nic, status)


def _translated(status: Map) -> bool:
    return bool(status.get("binding") == MASQUERADE)


def _nat(nic: Map, status: Map) -> Iterator[str]:
    """Yield the steps of the gateway in the VM's namespace, which does NAT for the guest."""
    bridge, link = nic.get("bridge"), nic.get("link")
    yield (
        f"{bridge} is the guest's gateway, in a network of the guest alone. The VM's namespace "
        f"forwards to {link}, with the address {_ips(status.get('addresses'))} instead of the "
        "guest's (masquerade)." + _limited(nic)
    )
    ports = ", ".join(map(str, nic.get("ports") or ()))
    opened = f"only these ports lead to the guest: {ports}" if ports else "all ports lead to it"
    yield f"For connections to that address, {opened}."


def _ips(addresses: Any) -> str:
    return ", ".join(str(one).partition("/")[0] for one in addresses or ())


def _passt(nic: Map, link: object) -> Iterator[str]:
    """Yield the step of the process passt, which is between the guest and its network."""
    ports = ", ".join(map(str, nic.get("ports") or ())) or "all ports"
    yield (
        f"The process passt reads {link}. It is in a namespace of its own, with the guest's "
        f"address, and has a socket for each connection. It accepts {ports} for the guest; pings "
        "go past it, by the process beside it."
    )


def _groups(view: Map, nic: Map) -> Iterator[str]:
    """Yield the step of the rules that isolate the interface: of its groups or its network."""
    isolated = nic.get("isolated") or ()
    if isolated:
        groups = ", ".join(map(str, view.get("groups") or ()))
        who = f"the security groups {groups}" if groups else "its network, which denies by default"
        words = {"ingress": "accepts", "egress": "opens"}
        what = " and ".join(words.get(str(one), str(one)) for one in isolated)
        yield f"The rules of {who} decide which connections it {what} (`virtbus security-group`)."


def _segment(nic: Map, link: object, tap: object) -> Iterator[str]:
    """Yield the steps after the rules of the tap, if the guest is on a LAN segment of the host."""
    outer = nic.get("host_bridge")
    yield "They drop what goes to hosts of the fleet and servers of the bus, too (`reach`)."
    yield f"{nic.get('bridge')} leads to {link}." + _limited(nic)
    if nic.get("kind") == MACVTAP:
        yield f"{link} is on {outer} of the host, which sends its frames to the segment."
    else:
        yield (
            f"{link} is a cable to {nic.get('host_link')} on the host, a port of {outer}. That "
            "bridge belongs to the host, and leads to the segment."
        )
    yield _given(nic, tap)


def _given(nic: Map, tap: object) -> str:
    """Return the sentence about the source of the guest's addresses."""
    if nic.get("leased"):
        return f"The DHCP server of the segment gives the address. netd reads it on {tap}."
    return f"netd answers DHCP on {tap}, and no such request goes further."


def _versions(addresses: Any) -> str:
    """Return the protocols that the tap's rules pass.

    A guest without an address may use IPv4, to request an address.
    """
    six = [":" in str(one) for one in addresses]
    if six and all(six):
        return "IPv6"
    return "IPv4, ARP and IPv6" if any(six) else "IPv4 and ARP"


def _outside(view: Map, nic: Map, status: Map) -> Iterator[str]:
    """Yield the steps after the host bridge, by the kind of the network."""
    if nic.get("kind") == ISOLATED:
        yield "Nothing leads further: the network is isolated, and the host has no address in it."
        return
    routed = nic.get("kind") == ROUTED
    address = "the guest's address" if routed else "its own address (masquerade)"
    yield (
        f"Other packets go to the gateway {_gateway(view, nic, status)}. The host forwards them "
        f"with {address}, and not to hosts of the fleet or servers of the bus."
    )
    if routed:
        subnet = _subnet(view, nic, status)
        yield f"The outside reaches the guest at its address, and needs a route to {subnet}."
        yield from _ports(status)
        return
    if nic.get("kind") == OVERLAY:
        yield (
            "Frames to guests on other hosts go through a tunnel of the bridge, to the host that "
            "the bus names. It answers ARP for them, and carries nothing else."
        )
    if nic.get("kind") in {BUILT_IN, OVERLAY} and view.get("zone"):
        yield f"The gateway answers DNS: VMs are <name>.<namespace>.{view['zone']}."
    yield from _ports(status)


def _ports(status: Map) -> Iterator[str]:
    if published := status.get("published"):
        yield f"From outside, these ports of the host lead to the guest: {', '.join(published)}."
    else:
        yield "From outside, no port of the host leads to the guest (`--publish`)."


def _gateway(view: Map, nic: Map, status: Map) -> str:
    own = view.get("gateway") if nic.get("kind") == BUILT_IN else ""
    return str(status.get("gateway") or own or "of the network")


def _subnet(view: Map, nic: Map, status: Map) -> str:
    if nic.get("kind") == BUILT_IN:
        return str(view.get("subnet"))
    addresses = status.get("addresses")
    return str(IPv4Interface(addresses[0]).network) if addresses else "the network"


def _limited(nic: Map) -> str:
    limits = nic.get("limits") or {}
    if not limits:
        return ""
    shown = ", ".join(f"{units.size(rate)}/s {way}" for way, rate in limits.items())
    return f" Its traffic is limited: {shown}."


def _faults(faults: list[Map]) -> str:
    if not faults:
        return "Check: each part is as it should be."
    lines = [f"Check: {len(faults)} broken."]
    for fault in faults:
        where = f"{fault['interface']}: " if fault.get("interface") else ""
        lines += [f"  {where}{fault.get('what')}", f"    next step: {fault.get('next_step')}"]
    return "\n".join(lines)
