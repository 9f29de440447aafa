"""Sizes of values by kind: what a request, a writer and a reader may have (ADR 0027).

A value grows between its admission and its last write, so each step has a larger bound than the
one before: accepted < written < read. The largest view of a VM, a record and a status in JSON with
every byte escaped to six, still fits in one message of the bus.
"""

from typing import NamedTuple

KIB = 1024
BUS_BYTES = 1024 * KIB
"""One message of the bus, headers included (`max_payload` of the server)."""
REQUEST_BYTES = 512 * KIB
"""A request, and any other message that is not stored."""
RECORD_ACCEPTED_BYTES = 128 * KIB
"""A VM's record right after a create or an update: what users gave and what admission added."""

LOGINS_BYTES = 256 * KIB
"""A VM's pull secrets: they go to imaged in one request, beside the record."""


class Bound(NamedTuple):
    """How large values of one kind may be."""

    kind: str
    written_bytes: int
    read_bytes: int


RECORD = Bound("record", RECORD_ACCEPTED_BYTES + 8 * KIB, 512 * KIB)
"""Later writes add the node, requests, graces, a trace: less than 2 KiB of the 8."""
SECRET = Bound("secret inputs", 512 * KIB, BUS_BYTES)
"""Written once and copied as it is; a request that brings more is refused by its size."""
STATUS = Bound("status", 16 * KIB, 32 * KIB)
HEARTBEAT = Bound("heartbeat", 24 * KIB, 64 * KIB)
"""500 of them fit in the 16 MiB of their bucket."""
SMALL = Bound("small value", 20 * KIB, 32 * KIB)
"""Name claims, join records, wishes, reserved sums, leases, keys of a node's images."""
HOSTS = Bound("list of addresses", 256 * KIB, 384 * KIB)
"""Every host's addresses, in one value a node: 500 hosts of ten IPv6 addresses each."""
EVENT = Bound("event", 64 * KIB, 128 * KIB)
LETTER = Bound("dead letter", 8 * KIB, 64 * KIB)
OTHER = Bound("value", REQUEST_BYTES, BUS_BYTES)
KINDS = (RECORD, SECRET, STATUS, HEARTBEAT, SMALL, HOSTS, EVENT, LETTER, OTHER)
HEADER_BYTES = 4 * KIB
"""Room for the headers of a stored message: id, expectations, a trace."""
STORED_BYTES = {
    "KV_vm": RECORD.read_bytes + HEADER_BYTES,
    "KV_sec": SECRET.written_bytes + HEADER_BYTES,
    "KV_st": STATUS.read_bytes + HEADER_BYTES,
    "KV_node": HEARTBEAT.read_bytes + HEADER_BYTES,
    "KV_lease": SMALL.read_bytes + HEADER_BYTES,
    "EVT": EVENT.read_bytes + HEADER_BYTES,
    "DLQ": LETTER.read_bytes + HEADER_BYTES,
}
"""The largest message that the bus itself takes into a stream (`max_msg_size`), from anybody."""


_BY_PLACE = {
    "$KV.vm": RECORD,
    "$KV.sec": SECRET,
    "$KV.st": STATUS,
    "$KV.node": HEARTBEAT,
    "$KV.lease": SMALL,
    "virtbus.evt": EVENT,
    "virtbus.dlq": LETTER,
}


def bound_of(subject: str) -> Bound:
    """The bound of what is stored at a key of a bucket or under a subject of a stream."""
    tokens = subject.split(".")
    if tokens[-1] == "_hosts":
        return HOSTS
    bound = _BY_PLACE.get(".".join(tokens[:2]), OTHER)
    of_a_vm = len(tokens) == 4 and not tokens[3].startswith("_")
    return bound if of_a_vm or bound not in {RECORD, STATUS} else SMALL
