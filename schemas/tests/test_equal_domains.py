"""Kept records share equal hardware."""

import gc

from virtbus.schemas.equal_domains import EqualDomains
from virtbus.schemas.vm import VmRecord

UIDS = [f"01980000-0000-7000-8000-00000000000{n}" for n in range(3)]


def _record(uid: str, memory: str = "64MiB") -> VmRecord:
    spec = {"domain": {"memory": {"guest": memory}}}
    return VmRecord.model_validate(
        {"uid": uid, "name": "web", "node": "host1", "spec_hash": "0", "created_ns": 1}
        | {"namespace": "default", "powered": True, "spec": spec}
    )


def test_records_with_equal_hardware_share_it_and_stay_equal() -> None:
    domains = EqualDomains()
    first, second = (domains.shared(_record(uid)) for uid in UIDS[:2])
    assert second.spec.domain is first.spec.domain
    assert second == _record(UIDS[1])
    assert domains.shared(second) is second


def test_records_with_other_hardware_keep_their_own() -> None:
    domains = EqualDomains()
    domains.shared(_record(UIDS[0]))
    other = _record(UIDS[1], "128MiB")
    assert domains.shared(other) is other


def test_hardware_is_kept_only_as_long_as_a_record_has_it() -> None:
    domains = EqualDomains()
    domains.shared(_record(UIDS[0]))
    gc.collect()
    later = _record(UIDS[2])
    assert domains.shared(later) is later
