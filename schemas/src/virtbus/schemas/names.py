"""Messages by which netd resolves names of VMs for its guests (`virtbus.ask.<node>.names`)."""

from pydantic import Field

from virtbus.schemas.ids import Uid
from virtbus.schemas.model import LenientModel

MAX_ADDRESSES = 16
"""Maximum number of addresses in an answer, so that they fit into a DNS message of 512 bytes."""


class NameAsk(LenientModel):
    """Ask for the VM `namespace`/`name`, or for the VM with `address`.

    `uid` is the VM of the asking guest. The controller refuses a node that does not have this VM.
    The controller answers only with VMs of this VM's namespace, and of namespaces open to this VM.
    """

    uid: Uid
    namespace: str = Field("", max_length=63)
    name: str = Field("", max_length=63)
    address: str = Field("", max_length=64)


class NameAnswer(LenientModel):
    """The VM that has a name or an address; `found` is False if the guest may see no such VM.

    `addresses` have no prefix length. Some are valid only on `node`, for example those of the
    network `default`.
    """

    found: bool = False
    node: str = ""
    namespace: str = ""
    name: str = ""
    addresses: tuple[str, ...] = ()
