"""Permitted changes of an existing VM, and the effect of a repeated request."""

from typing import Any

import pytest
from services.controller.tests.fleets import GIB, record

from virtbus.controller.core.mutations import changed_paths, deleting, powered, updated
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import VmRecord, VmSpec


def with_spec(of: VmRecord, **more: Any) -> VmSpec:
    """Return the record's spec with changes, by dotted path."""
    plain = of.spec.model_dump()
    for path, value in more.items():
        inner = plain
        *parents, last = path.split("__")
        for part in parents:
            inner = inner[part]
        inner[last] = value
    return VmSpec.model_validate(plain)


def update(of: VmRecord, spec: VmSpec | None = None, **more: Any) -> VmRecord:
    return updated(of, **({"spec": spec, "labels": None, "annotations": None} | more))


@pytest.mark.parametrize(
    "change",
    [
        {"run_strategy": "Manual"},
        {"node_selector": {"zone": "a"}},
        {"termination_grace_s": 5},
        {"domain__cpu": {"cores": 4}},
        {"domain__memory": {"guest": GIB}},
        {"domain__firmware": {"serial": "x1"}},
        {"domain__accelerator": "tcg"},
        {"domain__io_threads": {"policy": "shared"}},
        {"dns_config": {"nameservers": ["10.96.0.10"]}},
        {"domain__resources": {"cpu_shares": 512, "cpu_quota_us": 50_000, "cpus": "0"}},
    ],
    ids=str,
)
def test_a_permitted_change_raises_the_generation_and_changes_the_hash(
    change: dict[str, Any],
) -> None:
    before = record()
    after = update(before, with_spec(before, **change))
    assert after.generation == before.generation + 1
    assert after.spec_hash != before.spec_hash
    assert (after.epoch, after.uid, after.node) == (before.epoch, before.uid, before.node)


def test_limits_on_the_host_change_one_by_one_and_are_lifted() -> None:
    before = record()
    some = update(before, with_spec(before, domain__resources={"cpu_shares": 512}))
    more = update(some, with_spec(some, domain__resources__cpus="0-1"))
    assert more.spec.domain.resources is not None
    assert (more.spec.domain.resources.cpu_shares, more.spec.domain.resources.cpus) == (512, "0-1")
    none = update(more, with_spec(more, domain__resources=None))
    assert none.spec_hash == before.spec_hash


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"volumes": []}, "spec.volumes"),
        ({"domain__devices": {}}, "spec.domain.devices.disks"),
    ],
)
def test_an_immutable_field_is_422_with_its_path(change: dict[str, Any], path: str) -> None:
    before = record()
    with pytest.raises(VirtbusError) as caught:
        update(before, with_spec(before, **change, termination_grace_s=1))
    assert (caught.value.code, caught.value.reason) == (Code.UNSUPPORTED, "immutable")
    found = [detail.path for detail in caught.value.body.details]
    assert path in found
    assert "spec.termination_grace_s" not in found


def with_disk(of: VmRecord, **changes: Any) -> VmSpec:
    """Return the record's spec with changes of its first disk."""
    plain = of.spec.model_dump()
    first, *others = plain["domain"]["devices"]["disks"]
    plain["domain"]["devices"]["disks"] = [first | changes, *others]
    return VmSpec.model_validate(plain)


def test_properties_of_a_disk_change_at_a_restart_and_its_bus_does_not() -> None:
    before = record()
    limits, size = {"iops": 50, "burst": {"iops": 90}}, {"logical_bytes": 4096}
    tuned = with_disk(before, limits=limits, block_size=size, io="io_uring", boot_order=3)
    after = update(before, tuned)
    assert after.generation == before.generation + 1
    assert update(after, with_disk(after, limits={"iops": 70})).spec.domain.devices.disks[0].limits
    with pytest.raises(VirtbusError) as caught:
        update(before, with_disk(before, bus="scsi", cache="none"))
    path = "spec.domain.devices.disks[0]"
    assert [detail.path for detail in caught.value.body.details] == [f"{path}.bus"]


def test_a_changed_disk_keeps_the_rules_of_a_new_one() -> None:
    before = record()
    with pytest.raises(VirtbusError) as caught:
        update(before, with_disk(before, io="native"))
    (detail,) = caught.value.body.details
    assert (caught.value.code, detail.path) == (Code.INVALID, "spec.domain.devices.disks[0].io")


def with_nic(of: VmRecord, **changes: Any) -> VmSpec:
    """Return the record's spec with changes of its first interface."""
    plain = of.spec.model_dump()
    (nic,) = plain["domain"]["devices"]["interfaces"]
    plain["domain"]["devices"]["interfaces"] = [nic | changes]
    return VmSpec.model_validate(plain)


def test_properties_of_an_interface_change_and_its_mac_does_not() -> None:
    before = record()
    limits = {"outbound": {"bytes_per_s": "1MiB"}}
    live = update(before, with_nic(before, state="down", limits=limits))
    assert live.generation == before.generation + 1
    later = update(live, with_nic(live, model="e1000", mtu=1400, boot_order=1, acpi_index=1))
    assert later.spec.domain.devices.interfaces[0].boot_order == 1
    assert update(later, with_nic(live, boot_order=None)).generation == later.generation + 1
    with pytest.raises(VirtbusError) as caught:
        update(before, with_nic(before, mac_address="02:00:00:00:00:09", queues=2))
    path = "spec.domain.devices.interfaces[0].mac_address"
    assert [detail.path for detail in caught.value.body.details] == [path]
    with pytest.raises(VirtbusError, match="has one queue"):
        update(before, with_nic(before, model="e1000e", queues=2))


def test_a_change_deep_in_a_list_is_reported_with_its_index() -> None:
    before = record()
    plain = before.spec.model_dump()
    plain["volumes"][0]["image"]["ref"] = "other"
    plain["volumes"][1]["name"] = "other"
    with pytest.raises(VirtbusError) as caught:
        update(before, VmSpec.model_validate(plain))
    assert [detail.path for detail in caught.value.body.details] == [
        "spec.volumes[0].image.ref",
        "spec.volumes[1].name",
    ]


def test_new_user_data_is_refused_and_not_shown() -> None:
    before = record()
    plain = before.spec.model_dump()
    plain["volumes"][1]["cloud_init_no_cloud"]["user_data"] = "hunter2"
    with pytest.raises(VirtbusError) as caught:
        update(before, VmSpec.model_validate(plain))
    assert "hunter2" not in caught.value.body.model_dump_json()


def test_labels_and_annotations_change_no_generation() -> None:
    before = record(labels={"a": "1"})
    after = update(before, labels={"b": "2"}, annotations={"x": "y"})
    assert (after.labels, after.annotations) == ({"b": "2"}, {"x": "y"})
    assert after.generation == before.generation
    assert update(before, labels={}).labels == {}
    assert update(before).labels == {"a": "1"}


def test_the_same_spec_changes_nothing() -> None:
    before = record()
    assert update(before, before.spec) == before


@pytest.mark.parametrize(("strategy", "on"), [("Halted", False), ("Once", True)])
def test_a_changed_run_strategy_changes_the_power_state(strategy: str, on: bool) -> None:
    before = record(powered=not on)
    after = update(before, with_spec(before, run_strategy=strategy))
    assert after.powered is on
    assert after.power_epoch == before.power_epoch + 1


def test_a_stop_by_the_run_strategy_has_the_grace_of_the_spec() -> None:
    at_once = powered(record(), on=False, grace_s=0)
    started = update(at_once, with_spec(at_once, run_strategy="Once"))
    assert update(started, with_spec(started, run_strategy="Halted")).stop_grace_s is None


def test_start_and_stop_each_raise_the_power_epoch() -> None:
    stopped = powered(record(), on=False, grace_s=7)
    assert (stopped.powered, stopped.power_epoch, stopped.stop_grace_s) == (False, 1, 7)
    started = powered(stopped, on=True)
    assert (started.powered, started.power_epoch, started.stop_grace_s) == (True, 2, None)
    assert powered(started, on=True).power_epoch == 3


def test_a_repeated_delete_is_one_delete() -> None:
    once = deleting(record(), None)
    assert once.deleting
    assert deleting(once, None) == once
    short = deleting(record(), 5)
    assert deleting(short, 5) == short


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (None, 0, 0),
        (10, 3, 3),
        (10, 30, 10),
        (10, None, 10),
        (None, 29, 29),
        (None, 31, None),
        (None, 86_400, None),
    ],
)
def test_a_second_request_may_only_shorten_the_grace(
    first: int | None, second: int | None, kept: int | None
) -> None:
    """The default grace is the spec's 30 s, and no second request makes it longer."""
    assert deleting(deleting(record(), first), second).delete_grace_s == kept


@pytest.mark.parametrize(
    "change", [lambda r: powered(r, on=True), lambda r: powered(r, on=False), update]
)
def test_nothing_else_changes_a_vm_that_is_being_deleted(change: Any) -> None:
    with pytest.raises(VirtbusError) as caught:
        change(deleting(record(), 0))
    assert (caught.value.code, caught.value.reason) == (Code.CONFLICT, "deleting")


def test_differences_are_listed_by_path() -> None:
    before = {"a": 1, "b": {"c": [1, 2]}, "d": None}
    after = {"a": 1, "b": {"c": [1, 3]}, "d": {"x": 1}, "e": []}
    assert list(changed_paths(before, after, "spec")) == ["spec.b.c[1]", "spec.d", "spec.e"]
    assert list(changed_paths(before, before, "spec")) == []
