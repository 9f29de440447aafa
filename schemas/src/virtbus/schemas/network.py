"""A VM's network as services tell each other of it."""

from pydantic import Field

from virtbus.schemas.model import Fact


class InterfaceStatus(Fact):
    """One attached interface. `addresses` are CIDR strings; `queues` tap queues handed over."""

    name: str
    network: str = "default"
    mac: str
    addresses: tuple[str, ...] = ()
    gateway: str = ""
    mtu: int = 1500
    tap: str = ""
    netns: str = ""


class NetworkInfo(Fact):
    """A network that a node offers."""

    name: str
    kind: str
    subnet: str = ""
    detail: dict[str, str] = Field(default_factory=dict)
