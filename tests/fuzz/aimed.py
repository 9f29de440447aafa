"""Targeted attacks: what a person would try first, drawn with the rest of the schedule.

Each yields a user, a subject and a message. The schedule drops subjects that a user may not
publish, so a removed right needs no change here.
"""

import gzip
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
from tests.e2e.platform import NODE
from tests.fuzz.ground import EVIL, NETWORK
from tests.fuzz.mutations import NATS_STATUSES, Message, own_vm
from tests.fuzz.pool import NAMESPACE, Pool
from tests.fuzz.texts import aliases, merges

from virtbus.bus.client.message_format import CONTENT_TYPE, JSON
from virtbus.documents.examples import SSH_KEY, full
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import MAX_MESSAGE_BYTES, encode

API = "virtbus.api.v1"

Aimed = tuple[str, str, Message]


def _said(what: str, data: Any, **more: Any) -> Message:
    return Message(what, msgpack.packb(data), **more)


def _to_the_limit(vm: dict[str, Any], below: int) -> dict[str, Any]:
    """Add so many ssh keys that the request is `below` bytes under the limit."""
    room = MAX_MESSAGE_BYTES - below - len(msgpack.packb(vm)) - 300
    keys = [f"{SSH_KEY} {'x' * (room // 64 - len(SSH_KEY) - 6)}"] * 64
    vm = vm | {"ssh_keys": keys}
    rest = MAX_MESSAGE_BYTES - below - len(msgpack.packb(vm))
    longer = [key + "y" * max(0, rest // 64) for key in keys]
    return vm | {"ssh_keys": longer}


def full_records(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """A create just below the limit, and requests that make its record longer."""
    uid = pool.uid(rng)
    vm = own_vm(rng, pool) | {"uid": uid, "image": "tiny"}
    vm.pop("user_data", None)
    vm.pop("network", None)
    vm = _to_the_limit(vm, rng.choice((0, 40, 60, 200, 2000)))
    ref = {"uid": uid, "namespace": NAMESPACE}
    user = rng.choice(("client", "bridge"))
    yield user, f"{API}.vm.create", _said("a record at the limit", vm)
    for verb in rng.sample(("stop", "delete", "restart", "pause"), 2):
        yield user, f"{API}.vm.{verb}", _said(f"{verb} of it", ref)


def annotated(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """Three VMs with the maximum of annotations: pages of lists grow with them."""
    for _ in range(3):
        notes = {f"example.org/n{n}": "x" * 8000 for n in range(rng.choice((20, 31, 62)))}
        vm = own_vm(rng, pool) | {"annotations": notes, "image": "tiny"}
        yield "client", f"{API}.vm.create", _said("many annotations", vm)
    for user in ("observer", "client"):
        yield user, f"{API}.vm.list", _said("a list of them", {"namespace": NAMESPACE})
        yield user, f"{API}.vm.watch", _said("a watch of them", {})


def seeds(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """User data whose parsing grows faster than its length."""
    for text in (merges(rng.choice((22, 26, 400))), aliases(20)):
        vm = own_vm(rng, pool) | {"image": "tiny", "user_data": text}
        vm["spec"] = {"node_selector": {"kubernetes.io/hostname": NODE}}
        vm.pop("network", None)
        yield rng.choice(("client", "bridge")), f"{API}.vm.create", _said("hostile YAML", vm)


def machines(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """VMs that are admitted, with hostile images, networks and user data."""
    for _ in range(3):
        vm = own_vm(rng, pool)
        vm["spec"] = {"node_selector": {"kubernetes.io/hostname": NODE}}
        yield rng.choice(("client", "bridge")), f"{API}.vm.create", _said("a VM", vm)
    vm = own_vm(rng, pool) | {"image": "tiny", "network": rng.choice(("default", NETWORK))}
    vm["spec"] = {"node_selector": {"kubernetes.io/hostname": NODE}}
    vm.pop("user_data", None)
    yield "client", f"{API}.vm.create", _said("a VM that runs", vm)


def wide_refusals(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """Requests whose refusal is longer than they are."""
    user = rng.choice(("observer", "client", "bridge"))
    many = {f"unknown_field_{n:05}": 0 for n in range(19_900)}
    verb = rng.choice(("vm.list", "vm.get", "node.list", "bus.status", "vm.watch"))
    yield user, f"{API}.{verb}", _said("19,900 unknown fields", many)
    uid = {"uid": "\x01" * 400_000}
    headers = {CONTENT_TYPE: JSON}
    for node in (NODE, EVIL):
        for opened in rng.sample(("console", "logs", "guest", "vnc", "port"), 2):
            subject = f"virtbus.node.{node}.rpc.agent.{opened}"
            said = _said("a long uid", uid | {"port": 1}, headers=headers)
            yield rng.choice(("client", "bridge")), subject, said


def watches(rng: random.Random, _pool: Pool) -> Iterator[Aimed]:
    """Streams that are opened and never read; observers open more than the limit of watches."""
    user = rng.choice(("observer", "client"))
    times = rng.choice((20, 300, 1100) if user == "observer" else (20, 300))
    said = _said("abandoned watches", {"namespace": NAMESPACE}, times=times)
    yield user, f"{API}.vm.watch", said
    yield user, f"{API}.vm.events", _said("much history", {"limit": 1000}, times=8)


def consoles(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """Consoles, logs and ports of the attackers' VMs, opened and abandoned."""
    for verb in ("console", "logs", "port", "vnc", "screenshot"):
        data = {"uid": pool.uid(rng), "window": 2**20}
        if verb == "port":
            data["port"] = 22
        subject = f"virtbus.node.{NODE}.rpc.agent.{verb}"
        yield "client", subject, _said("abandoned", data, times=rng.choice((1, 16)))


def uploads(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """Uploads that lie about their digest or size, leave gaps, or never end."""
    bodies = (
        b"QFI\xfb" + b"\xff" * 5000,
        gzip.compress(bytes(10**7), mtime=0),
        rng.randbytes(70_000),
    )
    data = rng.choice(bodies)
    digest = hashlib.sha256(rng.choice((data, b""))).hexdigest()
    size = rng.choice((len(data), 2 * len(data), 2**40, 1))
    whole = {"name": pool.name(rng), "digest": f"sha256:{digest}", "size_bytes": size}
    subject = f"virtbus.node.{NODE}.rpc.imaged.upload"
    for at in (0, rng.choice((0, 1, 2**30))):
        piece = whole | {"at": at, "data": data}
        yield "client", subject, _said("a piece", piece, times=rng.choice((1, 16, 200)))
    yield "client", subject, _said("the end of an upload", whole | {"at": size})


def statuses(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """A node that reports too much about its VMs, and about VMs of other nodes."""
    size = rng.choice((1000, 400_000, 1_000_000))
    for uid in rng.sample(pool.uids, 3):
        status = msgpack.unpackb(encode(full(VmStatus))) | {"uid": uid, "message": "m" * size}
        yield f"node-{EVIL}", f"$KV.st.{EVIL}.{uid}", _said("a long status", status)


def filled_buckets(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """Statuses and events until a shared bucket is full."""
    body = b"\x00" * 1_000_000
    for number in range(rng.choice((2, 12))):
        subject = f"$KV.st.{EVIL}.fill{rng.randrange(10_000)}x{number}"
        yield f"node-{EVIL}", subject, Message("a full bucket", body)
    for _ in range(4):
        uid = pool.uid(rng)
        yield f"imaged-{EVIL}", f"virtbus.evt.{EVIL}.{uid}.vm.x", Message("long facts", body)


def heartbeats(rng: random.Random, _pool: Pool) -> Iterator[Aimed]:
    """A node that poses as all nodes, claims endless room, or sends an unreadable heartbeat."""
    record = msgpack.unpackb(encode(full(NodeRecord)))
    record |= {"node": EVIL, "state": "ready", "cpus": 2**20, "memory_bytes": 2**50}
    record |= {"labels": {"kubernetes.io/hostname": NODE, "zone": "a"}, "services": {}}
    names = [f"http://x/{number:0110d}" for number in range(rng.choice((10, 4293, 7000)))]
    subject = f"$KV.node.{EVIL}"
    yield f"node-{EVIL}", subject, _said("endless room", record)
    yield f"node-{EVIL}", subject, _said("many images", record | {"image_names": names})
    yield f"node-{EVIL}", subject, _said("in another's name", record | {"node": NODE})


def forged_statuses(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """A node whose stored messages look like a server's heartbeats, ends and errors."""
    headers = {"Status": rng.choice(NATS_STATUSES)}
    uid, user = pool.uid(rng), f"node-{EVIL}"
    status = msgpack.unpackb(encode(full(VmStatus))) | {"uid": uid}
    record = msgpack.unpackb(encode(full(NodeRecord))) | {"node": EVIL}
    for subject, data in (
        (f"$KV.st.{EVIL}.{uid}", status),
        (f"$KV.node.{EVIL}", record),
        (f"virtbus.evt.{EVIL}.{uid}.vm.x", status),
    ):
        yield user, subject, _said("a status of NATS", data, headers=headers)


def ready_events(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """Malformed events of imaged and netd, or events about unknown VMs."""
    for user, part, node in (
        (f"imaged-{EVIL}", "image", EVIL),
        (f"netd-{EVIL}", "net", EVIL),
        (f"imaged-{NODE}", "image", NODE),
        (f"netd-{NODE}", "net", NODE),
    ):
        body = rng.choice((b"\xc1", b"{", b"", b"\x91" * 50_000, rng.randbytes(9)))
        subject = f"virtbus.node.{node}.ready.{pool.uid(rng)}.{part}"
        yield user, subject, Message("a malformed ready event", body)


def rebuilds(rng: random.Random, _pool: Pool) -> Iterator[Aimed]:
    """Requests that only operators should make."""
    user = rng.choice(("client", "bridge"))
    verb = rng.choice(("bus.rebuild", "node.forget", "node.fence", "node.drain", "node.audit"))
    data = {} if verb == "bus.rebuild" else {"node": EVIL}
    yield user, f"{API}.{verb}", _said("an operator's verb", data)


def tidied(rng: random.Random, pool: Pool) -> Iterator[Aimed]:
    """Deletes that free the attackers' names for more."""
    for uid in rng.sample(pool.uids, 6):
        ref = {"uid": uid, "namespace": NAMESPACE, "grace_s": 0}
        yield "client", f"{API}.vm.delete", _said("own VM deleted", ref)


AIMED: tuple[Callable[[random.Random, Pool], Iterator[Aimed]], ...] = (
    *(
        machines,
        machines,
        full_records,
        annotated,
        seeds,
        wide_refusals,
        watches,
        consoles,
        uploads,
        statuses,
    ),
    *(filled_buckets, heartbeats, forged_statuses, ready_events, rebuilds, tidied, tidied),
)
