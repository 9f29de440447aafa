"""Results and links of the plugins of Calico, flannel and Weave, as these leave them after ADD."""

from typing import Any

from virtbus.netd.core.attachment import Route
from virtbus.netd.core.cni_results import PluginLink

NETNS = "/run/netns/vb-1"
CALICO: dict[str, Any] = {
    "cniVersion": "0.3.1",
    "interfaces": [{"name": "cali0a1b2c3d4e5"}],
    "ips": [{"version": "4", "address": "192.168.39.65/32"}],
    "dns": {},
}
"""Calico names the host's end only, and no route: the gateway is in the link's routes."""
CALICO_LINK = PluginLink(
    kind="veth",
    mac="02:00:00:00:39:65",
    mtu=1480,
    addresses=("192.168.39.65/32",),
    routes=(Route(destination="0.0.0.0/0", gateway="169.254.1.1"),),
)
CALICO_ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0101FEA9\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0101FEA9\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0
"""
CALICO_ROUTES_6 = "\n".join(
    f"{to} {bits} {'0' * 32} 00 {by} {metric} 00000001 00000000 {flags}     eth0"
    for to, bits, by, metric, flags in (
        ("fd000039000000000000000000000041", "80", "0" * 32, "00000100", "00000001"),
        ("fe800000000000000000000000000000", "40", "0" * 32, "00000100", "00000001"),
        ("0" * 32, "00", "fe80000000000000eceeeefffeeeeeee", "00000400", "00000003"),
        ("fd000039000000000000000000000041", "80", "0" * 32, "00000000", "80200001"),
        ("ff000000000000000000000000000000", "08", "0" * 32, "00000100", "00000001"),
    )
)
FLANNEL: dict[str, Any] = {
    "cniVersion": "0.3.1",
    "interfaces": [
        {"name": "cni0", "mac": "7a:00:00:00:00:01"},
        {"name": "veth01", "mac": "7a:00:00:00:00:02"},
        {"name": "eth0", "mac": "7a:00:00:00:00:03", "sandbox": NETNS},
    ],
    "ips": [
        {
            "version": "4",
            "interface": 2,
            "address": "10.244.1.5/24",
            "gateway": "10.244.1.1",
        }
    ],
    "routes": [{"dst": "10.244.0.0/16"}, {"dst": "0.0.0.0/0", "gw": "10.244.1.1"}],
    "dns": {},
}
"""flannel lets `bridge` do the work. The route to all pods has no gateway."""
WEAVE: dict[str, Any] = {
    "cniVersion": "0.3.0",
    "ips": [{"version": "4", "address": "10.32.0.2/12"}],
    "dns": {},
}
"""Weave names no interface. Its gateway may only be in the link's routes."""
WEAVE_0_2: dict[str, Any] = {
    "cniVersion": "0.2.0",
    "ip4": {"ip": "10.32.0.2/12", "gateway": "10.32.0.1"},
    "dns": {},
}
WEAVE_LINK = PluginLink(
    kind="veth",
    mac="02:00:00:00:32:02",
    mtu=1376,
    addresses=("10.32.0.2/12",),
    routes=(Route(destination="0.0.0.0/0", gateway="10.32.0.1"),),
)
WEAVE_ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100200A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000200A\t00000000\t0001\t0\t0\t0\t0000F0FF\t0\t0\t0
eth0\t000000E0\t00000000\t0001\t0\t0\t0\t000000F0\t0\t0\t0
eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""
TWO_INTERFACES: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "interfaces": [
        {"name": "net1", "mac": "7a:00:00:00:00:04", "sandbox": NETNS},
        {"name": "eth0", "mac": "7a:00:00:00:00:05", "sandbox": NETNS},
    ],
    "ips": [
        {"interface": 0, "address": "10.9.9.9/24", "gateway": "10.9.9.1"},
        {"interface": 1, "address": "10.8.0.5/24"},
        {"interface": 1, "address": "fd00:8::5/64"},
    ],
    "routes": [{"dst": "10.7.0.0/16", "scope": 253}, {"dst": "fd00:7::/64"}],
}
"""A chain that made a second interface; its address and gateway are not the first one's."""
