"""Size limits of stored values by kind, for requests, writers and readers (ADR 0027).

A value grows between its admission and its last write. So each step has a larger limit than the
step before: accepted < written < read. The largest written record and status of a VM fit in one
message together, even if JSON escapes each byte in six characters.
"""

from typing import NamedTuple

KIB = 1024
BUS_BYTES = 1024 * KIB
"""Size limit of a message, headers included (`max_payload` of the NATS server)."""
REQUEST_BYTES = 512 * KIB
"""Size limit of a request, or of any other message that is not stored."""
RECORD_ACCEPTED_BYTES = 128 * KIB
"""Size limit of a VM's record at a create or update: the user's fields and filled defaults."""

LOGINS_BYTES = 256 * KIB
"""Size limit of a VM's pull secrets. imaged gets them in one request together with the record."""


VOLUME_ACCEPTED_BYTES = 24 * KIB
"""Size limit of a volume's record at a create or update."""


class Bound(NamedTuple):
    """Size limits of one kind of value."""

    kind: str
    written_bytes: int
    read_bytes: int


RECORD = Bound("record", RECORD_ACCEPTED_BYTES + 8 * KIB, 512 * KIB)
"""Writes after admission add node, request ids, graces and a trace: less than 2 of the 8 KiB."""
SECRET = Bound("secret inputs", 512 * KIB, BUS_BYTES)
"""Secrets are written once and then only copied. Larger secrets do not fit in REQUEST_BYTES."""
STATUS = Bound("status", 16 * KIB, 32 * KIB)
HEARTBEAT = Bound("heartbeat", 24 * KIB, 64 * KIB)
"""500 heartbeats fit in the 16 MiB of the bucket `node`."""
SMALL = Bound("small value", 20 * KIB, 32 * KIB)
"""The values of this kind are name claims, join records, desired states of nodes, the sums of
resources that VMs reserve on a node, leases, image keys of a node, and operations.
"""
VOLUME = Bound("volume", VOLUME_ACCEPTED_BYTES + 4 * KIB, 64 * KIB)
"""Writes after admission add the node, 16 holders and request ids: less than 3 of the 4 KiB."""
HOSTS = Bound("list of addresses", 256 * KIB, 384 * KIB)
"""Enough for a list of all addresses of 500 hosts, with ten IPv6 addresses each. The limit also
holds for the list of an overlay's guests on one host."""
GROUP = Bound("security group", 128 * KIB, 192 * KIB)
"""Enough for the record of a group whose request has up to 64 KiB."""
NODE_GROUP = Bound("security group of a node", 384 * KIB, 448 * KIB)
"""A group with the addresses of its peers. Controllers limit these addresses to some 5,000."""
EVENT = Bound("event", 64 * KIB, 128 * KIB)
LETTER = Bound("dead letter", 8 * KIB, 64 * KIB)
OTHER = Bound("value", REQUEST_BYTES, BUS_BYTES)
KINDS = (
    RECORD,
    SECRET,
    STATUS,
    HEARTBEAT,
    SMALL,
    VOLUME,
    HOSTS,
    GROUP,
    NODE_GROUP,
    EVENT,
    LETTER,
    OTHER,
)
LEAST_WRITTEN_BYTES = min(one.written_bytes for one in KINDS)
LEAST_READ_BYTES = min(one.read_bytes for one in KINDS)
"""A value of up to this size is within the read limit of every kind."""
HEADER_BYTES = 4 * KIB
"""Space for the headers of a stored message: id, expectations, a trace."""
STORED_BYTES = {
    "KV_vm": RECORD.read_bytes + HEADER_BYTES,
    "KV_sec": SECRET.written_bytes + HEADER_BYTES,
    "KV_st": STATUS.read_bytes + HEADER_BYTES,
    "KV_node": HEARTBEAT.read_bytes + HEADER_BYTES,
    "KV_lease": SMALL.read_bytes + HEADER_BYTES,
    "EVT": EVENT.read_bytes + HEADER_BYTES,
    "DLQ": LETTER.read_bytes + HEADER_BYTES,
}
"""The largest message that the server accepts into a stream from any sender (`max_msg_size`)."""


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
    """Return the limits of the values at `subject`, a bucket's key or a stream's subject."""
    tokens = subject.split(".")
    if tokens[-1] in {"_hosts", "_peer"}:
        return HOSTS
    if tokens[1:3] == ["vm", "_vol"]:
        return VOLUME
    if tokens[1:3] == ["vm", "_sg"]:
        return GROUP
    if tokens[3:4] == ["_sg"]:
        return NODE_GROUP
    if tokens[3:4] == ["_op"]:
        return SMALL
    bound = _BY_PLACE.get(".".join(tokens[:2]), OTHER)
    of_a_vm = len(tokens) == 4 and not tokens[3].startswith("_")
    return bound if of_a_vm or bound not in {RECORD, STATUS} else SMALL
