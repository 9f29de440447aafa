"""Counters of a VM's interfaces, which its node reads from the kernel on request."""

from pydantic import Field

from virtbus.schemas.model import LenientModel, StrictModel


class CountersAsk(StrictModel):
    """`rpc.agent.counters`, `rpc.netd.traffic`: read the counters of a VM's interfaces."""

    uid: str


class Traffic(LenientModel):
    """The traffic in one direction since the tap was made. A tap outlives the guest's restarts."""

    bytes: int = 0
    packets: int = 0
    dropped: int = 0
    """Packets dropped without a rule: the receiver was too slow, or a limit was reached."""


class NicCounters(LenientModel):
    """The counters of one interface."""

    name: str
    to_guest: Traffic = Traffic.model_construct()
    from_guest: Traffic = Traffic.model_construct()
    refused: dict[str, int] = Field(default_factory=dict)
    """Packets that a rule dropped, by rule. `mac`, `arp`, `address`, `dhcp` and `protocol` count
    packets of the guest. `ingress` and `egress` count packets, from either end, of connections that
    no security group allows. `state` counts packets that belong to no connection. `dhcp_flood`
    counts lost DHCP requests."""


class Counters(LenientModel):
    """The counters of a VM's interfaces."""

    uid: str
    interfaces: tuple[NicCounters, ...] = ()
