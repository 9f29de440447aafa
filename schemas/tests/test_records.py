"""A record counts only under its own VM's key."""

import pytest

from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.records import read_record
from virtbus.schemas.vm import Tombstone, VmRecord, VmSpec
from virtbus.schemas.wire import encode

A, B = "0192f0c1-2d3e-7abc-8def-0123456789ab", "0192f0c1-2d3e-7abc-8def-0123456789ac"
RECORD = VmRecord(
    uid=A, namespace="default", name="web", spec=VmSpec(), spec_hash="", node="n1", created_ns=0
)


def test_a_record_at_its_own_key_is_read() -> None:
    assert read_record(subjects.vm_record("n1", A), encode(RECORD)) == RECORD


def test_a_tombstone_is_distinguished_from_a_record() -> None:
    key = subjects.vm_record("_", A)
    assert read_record(key, encode(Tombstone(uid=A))) == Tombstone(uid=A)


@pytest.mark.parametrize(("node", "uid"), [("n1", B), ("n2", A), ("_", A)])
def test_a_record_at_another_key_is_refused(node: str, uid: str) -> None:
    with pytest.raises(VirtbusError) as refused:
        read_record(subjects.vm_record(node, uid), encode(RECORD))
    assert refused.value.reason == "foreign_record"
