"""Messages on the agent's UNIX socket, for the container runtime of the same node."""

from pydantic import Field

from virtbus.schemas.errors import ErrorBody
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.ids import Uid
from virtbus.schemas.model import LenientModel


class LocalEnd(LenientModel):
    """A request on the agent's socket: end a guest of the node's container runtime.

    `owner` is the runtime's account. After `grace_s` the guest is destroyed; 0 destroys it now.
    """

    uid: Uid
    owner: str = Field(pattern=r"^cri-", max_length=128)
    grace_s: int = Field(0, ge=0, le=86_400)


class LocalEnded(LenientModel):
    """The agent's answer to `LocalEnd`: the guest does not run; with `error`, it may run."""

    last_exit: GuestExit | None = None
    error: ErrorBody | None = None
