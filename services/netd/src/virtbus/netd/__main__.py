"""Entry point of `virtbus-netd`: connects settings, bus and service."""

import virtbus.bus.quick_start  # noqa: F401  before all other imports

import sys

from virtbus.bus.client import tracing
from virtbus.bus.client.local_agent import serve_with_agent, word_in
from virtbus.bus.runtime import process
from virtbus.bus.runtime.settings import load
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.node_groups import NodeGroupBook
from virtbus.netd.core.resolver_messages import ResolverSite
from virtbus.netd.edge.attachers import Attachers
from virtbus.netd.edge.attachment_store import AttachmentStore
from virtbus.netd.edge.cni import Cni
from virtbus.netd.edge.cni_cache import CniCache
from virtbus.netd.edge.dhcp_server import DhcpServer
from virtbus.netd.edge.host_bridge import HostBridge
from virtbus.netd.edge.host_bridges import HostBridges
from virtbus.netd.edge.namespaces import Namespaces
from virtbus.netd.edge.published_ports import PublishedPorts
from virtbus.netd.edge.qemu_processes import QemuProcesses
from virtbus.netd.edge.resolver_launch import RESOLVER
from virtbus.netd.edge.segments import Segments
from virtbus.netd.edge.source_digest import source_digest
from virtbus.netd.edge.tunnels import Tunnels
from virtbus.netd.host_networks import HostNetworks
from virtbus.netd.names_keeper import NamesKeeper
from virtbus.netd.service import Netd, teardown
from virtbus.netd.settings import Settings
from virtbus.schemas.version import VERSION


def host_ports(settings: Settings) -> HostPorts:
    """Return the objects through which netd acts on this host."""
    state = settings.state_dir / "netd"
    bridge = HostBridge(
        settings.bridge,
        settings.gateways,
        state / "host.json",
        settings.state_dir,
        settings.reach(),
    )
    cni = Cni(
        settings.cni_conf_dir,
        settings.cni_bin_dirs,
        CniCache(state / "cni" / "results"),
        plugin_timeout_s=settings.cni_timeout_s,
        openings=settings.network_namespaces,
        allowed=settings.cni_plugins_allowed,
    )
    bridges = HostBridges(bridge, settings.node)
    return HostPorts(
        attachers=Attachers(
            bridges,
            cni,
            Segments(settings.links_allowed),
            Tunnels(bridges, settings.overlay_address),
            settings.passt,
        ),
        namespaces=Namespaces(settings.netns_dir),
        groups=NodeGroupBook(),
        bridge=bridge,
        ports=PublishedPorts(bridges),
        files=AttachmentStore(state / "vms"),
        cni=cni,
        dhcp=DhcpServer(),
        emulators=QemuProcesses(settings.emulator),
        resolver=NamesKeeper(resolver_site(settings)),
    )


def resolver_site(settings: Settings) -> ResolverSite:
    """Return the settings of the resolver's process."""
    return ResolverSite(
        version=VERSION,
        code=source_digest(f"{RESOLVER}.__main__"),
        node=settings.node,
        domain=settings.zone,
        gateway=str(settings.subnet),
        gateway6=str(settings.subnet6 or ""),
        servers=tuple(map(str, settings.dns)),
        socket=str(settings.run_dir / "netd" / "names.sock"),
    )


async def serve(settings: Settings) -> None:
    """Serve until cancelled. The networks of this host's guests do not wait for the bus."""
    networks = HostNetworks(settings, host_ports(settings), word_in(settings.run_dir))
    async with networks.running():
        await serve_with_agent(
            settings,
            lambda bus, gate: Netd(bus, networks, tracing.span, gate).run(),
            stays=lambda: networks.needed,
        )


def main() -> None:
    """Run the service; `--teardown` removes all networks of this host and exits."""
    arguments = sys.argv[1:]
    if "--teardown" in arguments:
        arguments.remove("--teardown")
        settings = load(Settings, arguments)
        raise SystemExit(process.run(settings, lambda: teardown(settings, host_ports(settings))))
    settings = load(Settings, arguments)
    raise SystemExit(process.run(settings, lambda: serve(settings)))


if __name__ == "__main__":
    main()
