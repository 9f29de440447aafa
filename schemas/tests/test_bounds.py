"""Bounds of stored values grow from step to step, and cut values keep their identity."""

import pytest

from virtbus.schemas import bounds, subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.fitting import MARK, cut_text, fitted_bytes
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.node import NodeRecord, NodeState, ServiceState
from virtbus.schemas.records import read_stored
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import NameClaim
from virtbus.schemas.vm_status import Condition, VmStatus
from virtbus.schemas.wire import encode, read

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
KEYS = {
    subjects.vm_record("n1", UID): bounds.RECORD,
    subjects.vm_record("_", UID): bounds.RECORD,
    subjects.name_claim("default", "web"): bounds.SMALL,
    subjects.volume_record("default", "data"): bounds.VOLUME,
    subjects.image_name("default", "debian/12"): bounds.SMALL,
    subjects.network_record("_", "blue"): bounds.SMALL,
    subjects.backup_schedule_record("default", "nightly"): bounds.SMALL,
    subjects.address_claim(UID, "10.0.0.5"): bounds.SMALL,
    subjects.security_group("default", "web"): bounds.GROUP,
    subjects.node_group("n1", "default", "web"): bounds.NODE_GROUP,
    subjects.operation_record("n1", UID): bounds.SMALL,
    subjects.operation_status("n1", UID): bounds.SMALL,
    subjects.join_nonce("n1"): bounds.SMALL,
    subjects.node_spec("n1"): bounds.SMALL,
    subjects.node_reserved("n1"): bounds.SMALL,
    subjects.node_hosts("n1"): bounds.HOSTS,
    subjects.vm_secret("n1", UID): bounds.SECRET,
    subjects.vm_status("n1", UID): bounds.STATUS,
    subjects.node_record("n1"): bounds.HEARTBEAT,
    subjects.lease("fleet"): bounds.SMALL,
    subjects.event("n1", UID, "vm.accepted"): bounds.EVENT,
    subjects.node_event("n1", "node.down"): bounds.EVENT,
    subjects.dead_letter("controller"): bounds.LETTER,
}


@pytest.mark.parametrize("subject", KEYS)
def test_each_kind_of_key_has_its_bound(subject: str) -> None:
    assert bounds.bound_of(subject) is KEYS[subject]


@pytest.mark.parametrize("bound", bounds.KINDS, ids=lambda bound: bound.kind)
def test_a_value_within_the_smallest_bound_fits_every_kind(bound: bounds.Bound) -> None:
    assert bound.written_bytes >= bounds.LEAST_WRITTEN_BYTES
    assert bound.read_bytes >= bounds.LEAST_READ_BYTES


@pytest.mark.parametrize("bound", bounds.KINDS, ids=lambda bound: bound.kind)
def test_reading_accepts_more_than_writing(bound: bounds.Bound) -> None:
    assert bound.written_bytes < bound.read_bytes <= bounds.BUS_BYTES


def test_the_largest_view_of_a_vm_fits_in_one_message_with_any_content() -> None:
    largest = bounds.RECORD.written_bytes + bounds.STATUS.read_bytes
    assert 6 * largest < bounds.BUS_BYTES  # JSON makes six bytes of a control character
    assert bounds.RECORD.written_bytes + bounds.LOGINS_BYTES < bounds.REQUEST_BYTES
    assert bounds.RECORD.written_bytes > bounds.RECORD_ACCEPTED_BYTES + 2048


def test_the_largest_accepted_volume_leaves_space_for_what_controllers_add() -> None:
    request = "0192f0c1-2d3e-7abc-8def-0123456789ab"
    added = {"node": "n" * 63, "holder": request, "requests": (request,) * 8, "deleting": True}
    assert len(encode(added)) + 1024 < bounds.VOLUME.written_bytes - bounds.VOLUME_ACCEPTED_BYTES


def test_a_text_is_cut_between_characters() -> None:
    assert cut_text("short", 16) == "short"
    assert cut_text("ä" * 100, 16) == "ä" * 6 + MARK
    assert len(cut_text("x" * 100, 16).encode()) == 16


def _status(**more: object) -> VmStatus:
    values = {"uid": UID, "node": "n1", "epoch": 3, "generation": 2, "state": VmState.RUNNING}
    return VmStatus.model_validate(values | more)


def test_a_status_that_fits_is_unchanged() -> None:
    status = _status(message="x" * 12_000)
    assert fitted_bytes(status) == encode(status)


@pytest.mark.parametrize(
    "more",
    [
        {"message": "x" * 500_000},
        {
            "conditions": tuple(
                Condition(type="T", status=True, message="x" * 900) for _ in range(64)
            )
        },
        {"conditions": tuple(Condition(type=f"T{n}", status=True) for n in range(9000))},
        {
            "interfaces": tuple(
                InterfaceStatus(name=f"i{n}", mac="02:00:5e:10:00:01", addresses=("a" * 99,) * 200)
                for n in range(8)
            )
        },
    ],
    ids=["message", "texts", "conditions", "addresses"],
)
def test_a_status_that_is_too_large_loses_texts_and_stays_of_its_vm(
    more: dict[str, object],
) -> None:
    body = fitted_bytes(_status(**more))
    assert len(body) <= bounds.STATUS.written_bytes
    status = read(VmStatus, body)
    assert (status.uid, status.node, status.epoch, status.state) == (UID, "n1", 3, VmState.RUNNING)


def test_a_heartbeat_that_is_too_large_loses_texts_and_keeps_its_networks() -> None:
    record = NodeRecord(
        node="n1",
        hostname="n1",
        instance="i",
        state=NodeState.READY,
        cpus=8,
        memory_bytes=1,
        networks=("blue", "default"),
        services={"imaged": ServiceState(message="x" * 90_000)},
    )
    body = fitted_bytes(record)
    assert len(body) <= bounds.HEARTBEAT.written_bytes
    told = read(NodeRecord, body)
    assert (told.networks, told.state, told.cpus) == (record.networks, NodeState.READY, 8)
    assert told.services["imaged"].message.startswith("xxx")


def test_a_value_of_an_older_schema_is_refused_with_the_next_step() -> None:
    key = subjects.name_claim("default", "web")
    with pytest.raises(VirtbusError, match=r"upgrade-from-0\.1") as refused:
        read_stored(NameClaim, key, encode({"schema_version": 1, "uid": UID}))
    assert (refused.value.code, refused.value.reason) == (Code.UNSUPPORTED, "older_schema")


def test_a_value_of_a_newer_schema_is_refused_with_that_reason() -> None:
    key = subjects.name_claim("default", "web")
    with pytest.raises(VirtbusError, match="version 9") as refused:
        read_stored(NameClaim, key, encode({"schema_version": 9, "uid": UID}))
    assert (refused.value.code, refused.value.reason) == (Code.UNSUPPORTED, "newer_schema")


def test_a_value_is_read_with_the_bound_of_its_kind() -> None:
    claim = {"schema_version": SCHEMA_VERSION, "uid": UID, "more": "x" * bounds.SMALL.written_bytes}
    key = subjects.name_claim("default", "web")
    assert read_stored(NameClaim, key, encode(claim)).uid == UID
    with pytest.raises(VirtbusError) as refused:
        read_stored(NameClaim, key, encode(claim | {"more": "x" * bounds.SMALL.read_bytes}))
    assert refused.value.code == Code.TOO_LARGE
