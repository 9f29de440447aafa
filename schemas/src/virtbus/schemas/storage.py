"""What the keeper of a bus server says of the disk that the bus is stored on."""

from virtbus.schemas.model import Fact


class BusStorage(Fact):
    """`virtbus.tele.bus.storage`: said each few seconds and at changes; droppable.

    `low`: too little is free for creates; deletes still fit. `stalled`: the server stores nothing
    in these streams. `message` is the cause and the next step, empty when all is well.
    """

    free_bytes: int = 0
    total_bytes: int = 0
    low: bool = False
    stalled: tuple[str, ...] = ()
    message: str = ""
