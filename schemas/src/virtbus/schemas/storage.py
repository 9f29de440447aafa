"""Reports about the disk of a bus server, sent by the process that runs the server."""

from virtbus.schemas.model import LenientModel


class BusStorage(LenientModel):
    """`virtbus.report.bus.storage`: sent every few seconds and on change; may be lost.

    `low` is True if the disk has too little space for creates; deletes still fit. `stalled` names
    the streams in which the server stores nothing. `message` is the cause and the next step, empty
    if all is well.
    """

    free_bytes: int = 0
    total_bytes: int = 0
    low: bool = False
    stalled: tuple[str, ...] = ()
    message: str = ""
