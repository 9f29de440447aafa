"""Results of CNI plugins for a guest, with completion of incomplete results.

A container finds its routes and addresses on its link. A guest learns them by DHCP, so netd must
know them. Each strategy in `REPAIRS` completes one kind of result, and has a name for the log.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any

from virtbus.netd.core.attachment import Nic, Route
from virtbus.netd.core.cni_verbs import objects
from virtbus.schemas.errors import Code, VirtbusError

Result = dict[str, Any]
_DEFAULTS = {4: "0.0.0.0/0", 6: "::/0"}
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
    """The IPv4 addresses, with the prefix length."""
    routes: tuple[Route, ...] = ()
    """Routes of IPv4 and IPv6, without the routes to the networks of the addresses."""
    to_host: bool = True
    """True if the other end is in the host's namespace, so that the host sees the packets."""


Repair = Callable[[Result, str, PluginLink | None], Result | None]
"""Returns the completed result for the interface of this name; None if nothing changes."""


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

    An address belongs to `eth` if it has no index of an interface, or if its interface is outside
    of the namespace. Calico, for example, lists only the host's end.
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
    """Take the addresses of the link if the result has no IPv4 address (Weave)."""
    del eth
    if link is None or not link.addresses or any(_is_ipv4(ip) for ip in objects(result, "ips")):
        return None
    return {**result, "ips": [{"address": address} for address in link.addresses]}


def _routes_of_link(result: Result, eth: str, link: PluginLink | None) -> Result | None:
    """Take the link's routes if the result has no gateway of the IP version (Calico, Weave).

    Calico's only gateway is 169.254.1.1, which is missing in its result.
    """
    del eth
    found = [route for version in _DEFAULTS for route in _ways_out(result, link, version)]
    return {**result, "routes": [*objects(result, "routes"), *found]} if found else None


def _ways_out(result: Result, link: PluginLink | None, version: int) -> Iterator[dict[str, Any]]:
    ips = _of_version(objects(result, "ips"), "address", version)
    routes = _of_version(objects(result, "routes"), "dst", version)
    has_default = any(route["dst"] == _DEFAULTS[version] for route in routes)
    if link is None or not ips or has_default or any(ip.get("gateway") for ip in ips):
        return
    for one in link.routes:
        if _version(one.destination) == version:
            yield {"dst": one.destination, "gw": one.gateway}


def _routes_by_gateway(result: Result, eth: str, link: PluginLink | None) -> Result | None:
    """Give a route without a gateway the gateway of the addresses, as plugins do (flannel)."""
    del eth, link
    gateways: dict[int, str] = {}
    for ip in objects(result, "ips"):
        if ip.get("gateway"):
            gateways.setdefault(_version(ip.get("address")), ip["gateway"])

    def filled(route: dict[str, Any]) -> dict[str, Any]:
        gateway = gateways.get(_version(route.get("dst")))
        has_own = route.get("gw") or route.get("scope") == _SCOPE_LINK
        return route if has_own or not gateway else {**route, "gw": gateway}

    routes = objects(result, "routes")
    complete = [filled(route) for route in routes]
    return {**result, "routes": complete} if complete != routes else None


REPAIRS: tuple[tuple[str, Repair], ...] = (
    ("result-0.2", _of_0_2),
    ("own-addresses", _own_addresses),
    ("addresses-of-link", _addresses_of_link),
    ("routes-of-link", _routes_of_link),
    ("routes-by-gateway", _routes_by_gateway),
)
"""The strategies in the order of their use."""


def repaired(result: Result, eth: str, link: PluginLink | None) -> tuple[Result, list[str]]:
    """Return the completed result, and the names of the strategies that changed it.

    `link` is None if the plugins made no link named `eth`.
    """
    used = []
    for name, repair in REPAIRS:
        changed = repair(result, eth, link)
        if changed is not None:
            result = changed
            used.append(name)
    return result, used


def host_ends(nics: Iterable[Nic]) -> set[str]:
    """Return the links outside of namespaces that the results of interfaces name."""
    results = [nic.cni.result for nic in nics if nic.cni is not None and nic.cni.result is not None]
    found = [one for result in results for one in objects(result, "interfaces")]
    return {str(one.get("name")) for one in found if not one.get("sandbox")}


def remains(nics: Iterable[Nic]) -> str:
    """Return the links and addresses that plugins may leave behind if they fail on DEL."""
    ours = [nic for nic in nics if nic.cni is not None]
    addresses = [f"{address} of {nic.network}" for nic in ours for address in nic.addresses]
    return ", ".join((*sorted(host_ends(ours)), *addresses)) or "unknown parts"


def given_mac(result: Result, nic: Nic) -> str | None:
    """Return the MAC of the interface `eth<index>` in the result; None if the result lacks it."""
    for interface in objects(result, "interfaces"):
        if interface.get("sandbox") and interface.get("name") == nic.eth:
            mac = interface.get("mac")
            return mac.lower() if isinstance(mac, str) and mac else None
    return None


def settled(nic: Nic, result: Result) -> Nic:
    """Return the interface with the addresses, routes and DNS of a completed result.

    If a DHCP server gives the guest its address, the interface has no address yet.

    Raises:
        VirtbusError: 500 `cni_result` if addresses or routes are unreadable, if there is no
            address, or if an address of the record is missing.
    """
    try:
        ips = objects(result, "ips")
        addresses = sorted((_address(ip["address"]) for ip in ips), key=_version)
        routes = [_route(route) for route in objects(result, "routes")]
        dns = result.get("dns") or {}
        servers = [_host(server) for server in dns.get("nameservers") or ()]
        search = tuple(str(each) for each in dns.get("search") or ())
        gateways = {version: _gateway(ips, routes, version) for version in _DEFAULTS}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(nic, str(error)) from None
    if not addresses and not nic.asks_segment:
        raise _unreadable(nic, "it has no address")
    given = {ip_interface(address).ip for address in addresses}
    if missing := [asked for asked in nic.asked if ip_address(asked) not in given]:
        raise _unreadable(nic, f"it lacks {', '.join(missing)}, which was asked")
    return nic.model_copy(
        update={
            "addresses": tuple(addresses),
            "gateway": gateways[4],
            "gateway6": gateways[6],
            "routes": tuple(r for r in routes if r.destination not in _DEFAULTS.values()),
            "dns": tuple(servers) or nic.network_dns,
            "domain": str(dns.get("domain") or ""),
            "search": search,
        }
    )


def _gateway(ips: list[dict[str, Any]], routes: list[Route], version: int) -> str:
    ways = [route.gateway for route in routes if route.destination == _DEFAULTS[version]]
    own = _of_version(ips, "address", version)
    gateways = [_host(ip["gateway"]) for ip in own if ip.get("gateway")]
    return next((each for each in (*ways, *gateways) if each), "")


def _is_ipv4(ip: dict[str, Any]) -> bool:
    return ":" not in str(ip.get("address", ":"))


def _version(text: Any) -> int:
    return 6 if ":" in str(text) else 4


def _of_version(found: list[dict[str, Any]], key: str, version: int) -> list[dict[str, Any]]:
    return [one for one in found if key in one and _version(one[key]) == version]


def _address(text: str) -> str:
    return str(ip_interface(_without_zone(text)))


def _host(text: str) -> str:
    return str(ip_address(_without_zone(text)))


def _without_zone(text: str) -> str:
    """Raise ValueError for an address with the name of an interface, such as `fe80::1%eth0`."""
    if "%" in text:
        msg = f"{text} is of one interface"
        raise ValueError(msg)
    return text


def _route(route: dict[str, Any]) -> Route:
    destination = str(ip_network(route["dst"], strict=False))
    return Route(destination=destination, gateway=_host(route["gw"]) if route.get("gw") else "")


def _unreadable(nic: Nic, why: str) -> VirtbusError:
    return VirtbusError(
        Code.INTERNAL,
        "cni_result",
        f"the CNI result of network '{nic.network}' cannot be used: {why}; virtbus needs "
        "addresses in CIDR form",
    )
