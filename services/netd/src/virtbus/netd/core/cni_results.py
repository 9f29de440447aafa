"""Reads results of CNI plugins for a guest, and completes those that leave a part to the link.

A container finds its routes and addresses on its link. A guest learns them by DHCP, so netd has to
know them. Each strategy in `REPAIRS` completes one kind of result, and has a name for the log.
"""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from typing import Any

from virtbus.netd.core.attachment import Nic, Route
from virtbus.schemas.errors import Code, VirtbusError

Result = dict[str, Any]
_DEFAULT = "0.0.0.0/0"
_SCOPE_LINK = 253
"""The scope of a route (CNI 1.1) whose destinations are on the link itself."""


@dataclass(frozen=True, slots=True)
class PluginLink:
    """The link that plugins made in the namespace of a VM."""

    kind: str
    """The kernel's kind of link, such as `veth`."""
    mac: str
    mtu: int
    addresses: tuple[str, ...] = ()
    """IPv4, with the prefix."""
    routes: tuple[Route, ...] = ()
    """Of IPv4. Routes to the networks of the addresses are left out."""
    to_host: bool = True
    """Its other end is in the host's namespace, so the host sees its packets."""


Repair = Callable[[Result, str, PluginLink | None], Result | None]
"""Return a completed result of the interface with a name; None if the result needs no change."""


def _of_0_2(result: Result, eth: str, link: PluginLink | None) -> Result | None:
    """Bring a result of CNI 0.2 into the form of later versions (old configurations of Weave)."""
    del eth, link
    old = result.get("ip4")
    if not isinstance(old, dict) or "ips" in result:
        return None
    ip = {"address": old.get("ip"), "gateway": old.get("gateway")}
    return {**result, "ips": [ip], "routes": old.get("routes") or []}


def _own_addresses(result: Result, eth: str, link: PluginLink | None) -> Result | None:
    """Leave out addresses of other interfaces in the namespace.

    An address without an index is the interface's, as is one of an interface outside of the
    namespace (Calico lists the host's end only).
    """
    del link
    interfaces = result.get("interfaces") or []

    def is_own(ip: dict[str, Any]) -> bool:
        at = ip.get("interface")
        if not isinstance(at, int) or not 0 <= at < len(interfaces):
            return True
        of = interfaces[at]
        return not isinstance(of, dict) or not of.get("sandbox") or of.get("name") == eth

    ips = objects(result, "ips")
    own = [ip for ip in ips if is_own(ip)]
    return None if len(own) == len(ips) else {**result, "ips": own}


def _addresses_of_link(result: Result, eth: str, link: PluginLink | None) -> Result | None:
    """Take the addresses of the link if the result has none of IPv4 (Weave)."""
    del eth
    if link is None or not link.addresses or any(_is_ipv4(ip) for ip in objects(result, "ips")):
        return None
    return {**result, "ips": [{"address": address} for address in link.addresses]}


def _routes_of_link(result: Result, eth: str, link: PluginLink | None) -> Result | None:
    """Take the routes of the link if the result has no way out (Calico, Weave).

    Calico's only gateway is 169.254.1.1, which its result does not name.
    """
    del eth
    has_gateway = any(ip.get("gateway") for ip in objects(result, "ips") if _is_ipv4(ip))
    has_default = any(route.get("dst") == _DEFAULT for route in objects(result, "routes"))
    if link is None or not link.routes or has_gateway or has_default:
        return None
    found = [{"dst": one.destination, "gw": one.gateway} for one in link.routes]
    return {**result, "routes": [*objects(result, "routes"), *found]}


def _routes_by_gateway(result: Result, eth: str, link: PluginLink | None) -> Result | None:
    """Send routes without a gateway to that of the address (flannel), as plugins do."""
    del eth, link
    found = (ip.get("gateway") for ip in objects(result, "ips") if _is_ipv4(ip))
    gateway = next((each for each in found if each), "")
    routes = objects(result, "routes")

    def lacks_gateway(route: dict[str, Any]) -> bool:
        own = route.get("gw") or route.get("scope") == _SCOPE_LINK
        return not own and ":" not in str(route.get("dst"))

    if not gateway or not any(lacks_gateway(route) for route in routes):
        return None
    filled = [{**one, "gw": gateway} if lacks_gateway(one) else one for one in routes]
    return {**result, "routes": filled}


REPAIRS: tuple[tuple[str, Repair], ...] = (
    ("result-0.2", _of_0_2),
    ("own-addresses", _own_addresses),
    ("addresses-of-link", _addresses_of_link),
    ("routes-of-link", _routes_of_link),
    ("routes-by-gateway", _routes_by_gateway),
)
"""The strategies in the order of their use."""


def repaired(result: Result, eth: str, link: PluginLink | None) -> tuple[Result, list[str]]:
    """Return a result that names all that a guest needs, and the strategies that changed it.

    `link` is None if the plugins made no link of that name.
    """
    used = []
    for name, repair in REPAIRS:
        changed = repair(result, eth, link)
        if changed is not None:
            result = changed
            used.append(name)
    return result, used


def given_mac(result: Result, nic: Nic) -> str | None:
    """Return the MAC of the interface `eth<index>` in the result; None if it has none."""
    for interface in objects(result, "interfaces"):
        if interface.get("sandbox") and interface.get("name") == nic.eth:
            mac = interface.get("mac")
            return mac.lower() if isinstance(mac, str) and mac else None
    return None


def settled(nic: Nic, result: Result) -> Nic:
    """Return the interface with the IPv4 addresses, routes and DNS of a completed result.

    An interface whose guest asks a DHCP server has no address yet.

    Raises:
        VirtbusError: 500 `cni_result` if addresses or routes are unreadable or missing.
    """
    try:
        found = [ip for ip in objects(result, "ips") if _is_ipv4(ip)]
        addresses = [str(IPv4Interface(ip["address"])) for ip in found]
        gateways = [str(IPv4Address(ip["gateway"])) for ip in found if ip.get("gateway")]
        routes = [
            _route(route)
            for route in objects(result, "routes")
            if ":" not in str(route.get("dst", ":"))
        ]
        dns = result.get("dns") or {}
        servers = [str(IPv4Address(s)) for s in dns.get("nameservers") or () if ":" not in s]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(nic, str(error)) from None
    if not addresses and not nic.asks_segment:
        raise _unreadable(nic, "it has no IPv4 address")
    if missing := set(nic.asked).difference(address.partition("/")[0] for address in addresses):
        raise _unreadable(nic, f"it lacks {', '.join(sorted(missing))}, which was asked")
    default = next((r.gateway for r in routes if r.destination == _DEFAULT and r.gateway), "")
    return nic.model_copy(
        update={
            "addresses": tuple(addresses),
            "gateway": default or next(iter(gateways), ""),
            "routes": tuple(r for r in routes if r.destination != _DEFAULT),
            "dns": tuple(servers) or nic.network_dns,
            "domain": str(dns.get("domain") or ""),
            "search": tuple(str(each) for each in dns.get("search") or ()),
        }
    )


def objects(result: Result, key: str) -> list[dict[str, Any]]:
    """Return the objects of a list in a result; anything else in it is left out."""
    return [item for item in result.get(key) or () if isinstance(item, dict)]


def _is_ipv4(ip: dict[str, Any]) -> bool:
    return ":" not in str(ip.get("address", ":"))


def _route(route: dict[str, Any]) -> Route:
    destination = str(IPv4Network(route["dst"], strict=False))
    gateway = str(IPv4Address(route["gw"])) if route.get("gw") else ""
    return Route(destination=destination, gateway=gateway)


def _unreadable(nic: Nic, why: str) -> VirtbusError:
    return VirtbusError(
        Code.INTERNAL,
        "cni_result",
        f"the CNI result of network '{nic.network}' cannot be used: {why}; virtbus needs IPv4 "
        "addresses in CIDR form",
    )
