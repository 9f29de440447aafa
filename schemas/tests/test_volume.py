"""A volume counts only under its own name's key, and its spec holds nothing secret."""

import pytest
from pydantic import ValidationError

from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.records import read_volume
from virtbus.schemas.vm import DISK_MAX, DISK_MIN
from virtbus.schemas.volume import VolumeRecord, VolumeSpec
from virtbus.schemas.wire import encode

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
SPEC = VolumeSpec(size=DISK_MIN)
RECORD = VolumeRecord(uid=UID, namespace="default", name="data", spec=SPEC, created_ns=1)


def test_a_volume_at_its_own_key_is_read() -> None:
    assert read_volume(subjects.volume_record("default", "data"), encode(RECORD)) == RECORD


@pytest.mark.parametrize(("namespace", "name"), [("default", "other"), ("shop", "data")])
def test_a_volume_at_another_key_is_refused(namespace: str, name: str) -> None:
    with pytest.raises(VirtbusError) as refused:
        read_volume(subjects.volume_record(namespace, name), encode(RECORD))
    assert refused.value.reason == "foreign_record"


def test_a_volume_of_an_older_schema_is_refused() -> None:
    value = encode(RECORD.model_dump() | {"schema_version": 1})
    with pytest.raises(VirtbusError) as refused:
        read_volume(subjects.volume_record("default", "data"), value)
    assert (refused.value.code, refused.value.reason) == (Code.UNSUPPORTED, "older_schema")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"size": DISK_MIN - 1},
        {"size": DISK_MAX + 1},
        {"size": "1GiB", "pool": "No such pool"},
        {"size": "1GiB", "source": {"image": "https://example.org/a.img?signature=x"}},
        {"size": "1GiB", "source": {"image": "../etc/shadow"}},
        {"size": "1GiB", "source": {"upload": "x"}},
        {"size": "1GiB", "source": {"image": "tiny", "volume": "data"}},
        {"size": "1GiB", "source": {"full": True}},
        {"size": "1GiB", "source": {"volume": "data", "full": True}},
        {"size": 0, "source": {"image": "tiny"}},
        {"size": 1, "source": {"volume": "data"}},
        {"size": 0, "source": {"volume": "data", "vm": "web"}},
        {"size": 0, "source": {"volume": "data", "disk": "root"}},
        {"size": 0, "source": {"volume": "data", "snapshot": "s1"}},
        {"size": "1GiB", "access": "many"},
        {"size": "1GiB", "access": "shared", "source": {"image": "tiny"}},
        {"size": 0, "access": "shared", "source": {"volume": "data"}},
        {"size": "1GiB", "access": "shared", "retention": "Delete"},
    ],
)
def test_a_bad_spec_is_refused(spec: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VolumeSpec.model_validate(spec)


@pytest.mark.parametrize(
    "source",
    [
        {"image": "tiny", "full": True},
        {"volume": "data"},
        {"vm": "web"},
        {"snapshot": "s1", "disk": "root"},
    ],
)
def test_a_copy_may_have_the_size_of_its_source(source: dict[str, object]) -> None:
    spec = VolumeSpec.model_validate({"size": 0, "source": source})
    assert (spec.size, spec.source.is_copied) == (0, True)


def test_a_volume_is_kept_unless_its_spec_says_otherwise() -> None:
    spec = VolumeSpec.model_validate({"size": "10GiB", "source": {"image": "tiny"}})
    assert (spec.size, spec.retention, spec.pool) == (10 * 1024**3, "Retain", "local")
