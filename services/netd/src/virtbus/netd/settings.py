"""Defines netd's settings."""

from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Interface, IPv6Network
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from virtbus.bus.runtime.settings import ServiceSettings
from virtbus.netd.core.dhcp_offer import DhcpSettings
from virtbus.netd.core.gateways import Gateways
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.host_servers import RESOLV_CONF, host_dns
from virtbus.schemas.address_pool import pool_of
from virtbus.schemas.dns import is_domain

GIVES_UP_S = 60
"""Seconds that are added to a DHCP lease. udhcpc gives up a DHCP lease half a minute before its
end, after three last attempts to renew it.
"""


class Settings(ServiceSettings):
    """Settings of `virtbus-netd`."""

    service: ClassVar[str] = "netd"

    subnet: IPv4Interface = Field(
        IPv4Interface("10.127.0.1/16"),
        description="gateway address and prefix of the built-in network `default`",
    )
    subnet6: IPv6Interface | None = Field(
        None,
        description="as subnet, for IPv6, such as fd00:127::1/64; empty: its guests have no IPv6",
    )
    bridge: str = Field(
        "virtbus0",
        pattern="^[a-z][a-z0-9_-]{0,14}$",
        description="the host's bridge of the built-in network; only netd may change it",
    )
    bridge_linger_s: float = Field(
        2.0,
        ge=0,
        description=("seconds that the bridge outlives its last VM, because another may follow"),
    )
    netns_dir: Path = Field(
        Path("/run/netns"), description=("folder of named namespaces, as of `ip netns`")
    )
    cni_conf_dir: Path = Field(Path("/etc/cni/net.d"), description="conflists, by network name")
    cni_bin_dirs: tuple[Path, ...] = Field(
        (Path("/usr/lib/cni"), Path("/opt/cni/bin")), description="CNI plugins, first match is used"
    )
    cni_plugins_allowed: tuple[str, ...] = Field(
        (),
        max_length=64,
        description=(
            "CNI plugins, also those for addresses, that the conflist in a network object may run "
            "on this node; the node's own conflists may run any"
        ),
    )
    links_allowed: tuple[str, ...] = Field(
        (),
        max_length=64,
        description=(
            "bridges and interfaces of the host to which network objects may connect guests; they "
            "must exist, and netd never changes them"
        ),
    )
    overlay_address: IPv4Address | None = Field(
        None,
        description=(
            "address of this host to which other hosts send the frames of overlays; empty: that "
            "of its default route, or the first"
        ),
    )
    cni_timeout_s: float = Field(
        30.0, gt=0, description="seconds after which a CNI plugin and its children are killed"
    )
    zone: str = Field(
        "vm.internal",
        max_length=120,
        description=(
            "domain of VMs' names: guests of `default` ask their gateway, which knows "
            "`<vm>.<namespace>.<zone>`; empty: they ask the servers of `dns` themselves"
        ),
    )
    dns: tuple[IPv4Address, ...] = Field(
        (),
        description=(
            "DNS servers for all other names; empty: those of /etc/resolv.conf; only the gateway "
            "asks those on loopback"
        ),
    )
    domain: str = Field(
        "",
        pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.|$))*$",
        max_length=200,
        description="DNS domain of guests; empty: `<namespace>.<zone>`, or none without a zone",
    )
    search: tuple[str, ...] = Field(
        (),
        max_length=6,
        description="DNS search list of guests, after `<namespace>.<zone>`; empty: `domain`",
    )
    ntp: tuple[IPv4Address, ...] = Field((), max_length=8, description="NTP servers of guests")
    guests_may_reach: tuple[IPv4Network | IPv6Network, ...] = Field(
        (),
        description="networks that guests may reach, even if hosts are in them",
    )
    guests_may_not_reach: tuple[IPv4Network | IPv6Network, ...] = Field(
        (),
        description=(
            "networks closed to guests in addition to the fleet's hosts and the bus' servers,"
            " such as that of an API server"
        ),
    )
    network_namespaces: dict[str, tuple[str, ...]] = Field(
        {},
        description=(
            "by CNI network: the namespaces whose VMs may use it, or `*` for all; a "
            "network without an entry is closed to everybody"
        ),
    )
    lease_s: int = Field(
        3600,
        ge=120,
        description=(
            "for at least so many seconds, guests keep their addresses while netd is stopped; "
            "DHCP leases are twice as long and a minute more, and renewed at half"
        ),
    )
    emulator: Path = Field(
        Path("/usr/bin/qemu-system-x86_64"), description="the QEMU that vmwrapper becomes"
    )
    passt: Path = Field(
        Path("/usr/bin/passt"),
        description="the program of the binding passt; without it, the node takes no such VM",
    )
    wrapper_dir: Path = Field(
        Path("/usr/local/libexec/virtbus"),
        description="install folder of vmwrapper; QEMU's user must reach it",
    )

    @field_validator("subnet6")
    @classmethod
    def _gateway6(cls, value: IPv6Interface | None) -> IPv6Interface | None:
        if value is not None and not pool_of(value.network, None).has(value.ip):
            msg = f"must name the gateway's own address, such as {value.network[1]}/64"
            raise ValueError(msg)
        return value

    @field_validator("subnet")
    @classmethod
    def _gateway(cls, value: IPv4Interface) -> IPv4Interface:
        network = value.network
        if network.prefixlen > 29:
            msg = "must be /29 or larger"
            raise ValueError(msg)
        if value.ip in {network.network_address, network.broadcast_address}:
            msg = f"must name the gateway's own address, such as {network[1]}/{network.prefixlen}"
            raise ValueError(msg)
        return value

    @field_validator("zone")
    @classmethod
    def _zone(cls, value: str) -> str:
        if value and (not is_domain(value) or value != value.lower()):
            msg = f"{value!r} is no domain name in lower case; write one such as vm.internal"
            raise ValueError(msg)
        return value

    @field_validator("search")
    @classmethod
    def _domains(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not is_domain(name.removesuffix(".")):
                msg = f"{name!r} is no domain name; write one such as example.com"
                raise ValueError(msg)
        return value

    @property
    def gateways(self) -> Gateways:
        return Gateways(self.subnet, self.subnet6)

    def reach(self, resolver: tuple[IPv4Address, ...] = ()) -> ReachRules:
        """Return the reach rules of the settings, without addresses of hosts and bus servers.

        `resolver` has the addresses at which the resolver answers.
        """
        return ReachRules(
            closed=self.guests_may_not_reach,
            opened=self.guests_may_reach,
            dns=(*resolver, *self.site().dns),
        )

    def site(self) -> DhcpSettings:
        return DhcpSettings(
            dns=self.dns or host_dns(RESOLV_CONF),
            ntp=self.ntp,
            domain=self.domain,
            search=self.search,
            lease_s=2 * self.lease_s + GIVES_UP_S,
        )
