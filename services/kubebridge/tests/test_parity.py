"""Verdicts and defaults in which the bridge once differed from KubeVirt's webhooks."""

import re
from typing import Any

import pytest
from services.kubebridge.tests.manifests import put, template, vm, vmi

from virtbus.kubebridge.core.translation.mapping import translate
from virtbus.kubebridge.core.validation.rules import vm_causes, vmi_causes
from virtbus.schemas.api import VmCreate
from virtbus.schemas.disk import (
    BlockSize,
    CacheMode,
    Disk,
    IoMode,
    IoThreads,
    IoThreadsPolicy,
)
from virtbus.schemas.vm import MEMORY_MIN, DiskBus, ErrorPolicy

DISKS, NICS = "domain.devices.disks", "domain.devices.interfaces"
EMPTY_MACHINE: dict[str, Any] = {
    "domain": {
        "devices": {"autoattachPodInterface": False},
        "resources": {"requests": {"memory": "1Mi"}},
    },
    "volumes": None,
    "networks": None,
}


def made(changes: dict[str, Any]) -> VmCreate:
    """Return the VM of a VMI that breaks no rule."""
    whole = vmi(changes)
    assert vmi_causes(whole) == []
    create = translate(whole, {}, "cluster").create
    assert create is not None
    return create


def domain(create: VmCreate) -> Any:
    """Return the domain of a VM."""
    assert create.spec is not None
    return create.spec.domain


def test_a_disk_without_a_bus_and_a_volume_without_a_disk_are_sata() -> None:
    disks = domain(made({DISKS: [{"name": "emptydisk"}]})).devices.disks
    assert len(disks) == 3
    assert {disk.bus for disk in disks} == {DiskBus.SATA}


def test_a_watchdog_without_a_model_resets_its_guest() -> None:
    watchdog = domain(made({"domain.devices.watchdog": {"name": "w"}})).devices.watchdog
    assert watchdog.i6300esb.action == "reset"


def test_a_problem_of_virtbus_own_rules_names_the_manifests_field() -> None:
    (cause,) = vmi_causes(vmi({f"{DISKS}.1": {"name": "emptydisk", "cdrom": {"bus": "usb"}}}))
    assert cause.field == f"spec.{DISKS}[1].cdrom"
    assert domain(made({f"{DISKS}.1.disk.bus": "usb"})).devices.disks[1].bus is DiskBus.USB


def test_a_problem_is_reported_by_a_rule_of_kubevirt_or_by_ours() -> None:
    readonly = {"name": "emptydisk", "disk": {"bus": "sata", "readonly": True}}
    (cause,) = vmi_causes(vmi({f"{DISKS}.1": readonly}))
    assert cause.field == f"spec.{DISKS}[1].disk.readonly"


def test_each_property_of_a_disk_in_kubevirt_reaches_the_disk() -> None:
    disk = {
        "name": "containerdisk",
        "disk": {"bus": "virtio"},
        "cache": "none",
        "io": "native",
        "dedicatedIOThread": True,
        "blockSize": {"custom": {"logical": 512, "physical": 4096}, "matchVolume": {}},
    }
    pool = {"ioThreadsPolicy": "supplementalPool", "ioThreads.supplementalPoolThreadCount": 3}
    changes = {f"domain.{path}": value for path, value in pool.items()}
    done = domain(made({f"{DISKS}.0": disk} | changes))
    assert done.devices.disks[0] == Disk(
        name="containerdisk",
        cache=CacheMode.NONE,
        io=IoMode.NATIVE,
        dedicated_io_thread=True,
        block_size=BlockSize(logical_bytes=512, physical_bytes=4096),
    )
    assert done.io_threads == IoThreads(policy=IoThreadsPolicy.POOL, count=3)


def test_native_io_without_a_cache_mode_bypasses_the_cache_as_in_kubevirt() -> None:
    disk = domain(made({f"{DISKS}.0.io": "native"})).devices.disks[0]
    assert (disk.io, disk.cache) == (IoMode.NATIVE, CacheMode.NONE)
    assert domain(made({f"{DISKS}.0.io": "default"})).devices.disks[0].io is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({f"{DISKS}.0.cache": "writeback", f"{DISKS}.0.io": "native"}, f"{DISKS}[0].io"),
        (
            {f"{DISKS}.0.disk.bus": "scsi", f"{DISKS}.0.dedicatedIOThread": True},
            f"{DISKS}[0].dedicatedIOThread",
        ),
        (
            {f"{DISKS}.0.blockSize": {"custom": {"logical": 1000}}},
            f"{DISKS}[0].blockSize.custom.logical",
        ),
        (
            {f"{DISKS}.0.blockSize": {"custom": {"discardGranularity": 4096}}},
            f"{DISKS}[0].blockSize.custom.discardGranularity",
        ),
        ({f"{DISKS}.0.shareable": True}, f"{DISKS}[0].shareable"),
        ({f"{DISKS}.0.serial": "x" * 21}, f"{DISKS}[0].serial"),
        (
            {f"{DISKS}.0.serial": "s", f"{DISKS}.1.serial": "s"},
            f"{DISKS}[1].serial",
        ),
        (
            {f"{DISKS}.0.bootOrder": 2, "domain.devices.interfaces.0.bootOrder": 2},
            "domain.devices.interfaces[0].bootOrder",
        ),
        (
            {"domain.devices.interfaces.0.acpiIndex": 16384},
            "domain.devices.interfaces[0].acpiIndex",
        ),
        ({"domain.devices.interfaces.0.model": "rtl8139"}, "domain.devices.interfaces[0].model"),
        ({"domain.devices.interfaces.0.state": "gone"}, "domain.devices.interfaces[0].state"),
        (
            {"domain.ioThreadsPolicy": "auto", "domain.ioThreads.supplementalPoolThreadCount": 3},
            "domain.ioThreads.supplementalPoolThreadCount",
        ),
    ],
    ids=str,
)
def test_a_property_of_a_device_that_cannot_work_is_refused_at_its_field(
    changes: dict[str, Any], field: str
) -> None:
    assert [cause.field for cause in vmi_causes(vmi(changes))] == [f"spec.{field}"]


@pytest.mark.parametrize("policy", [str(one) for one in ErrorPolicy])
def test_each_error_policy_of_kubevirt_reaches_the_disk(policy: str) -> None:
    assert domain(made({f"{DISKS}.0.errorPolicy": policy})).devices.disks[0].error_policy == policy


def test_an_error_policy_that_kubevirt_lacks_is_refused() -> None:
    (cause,) = vmi_causes(vmi({f"{DISKS}.0.errorPolicy": "enospc"}))
    assert cause.field == f"spec.{DISKS}[0].errorPolicy"


@pytest.mark.parametrize(
    "credential",
    [
        {},
        {"sshPublicKey": {"propagationMethod": {"noCloud": {}}}},
        {"sshPublicKey": {"source": {}}},
    ],
)
def test_a_credential_without_effect_is_refused(credential: dict[str, Any]) -> None:
    assert vmi_causes(vmi({"accessCredentials": [credential]}))


@pytest.mark.parametrize(
    "changes",
    [
        {f"{DISKS}.3": {"name": "drive", "cdrom": {"bus": "sata"}}},
        {"domain.resources": {"limits": {"memory": "1G"}}, "domain.memory.guest": "2G"},
        {f"{NICS}.0.macAddress": "02-00-5e-10-00-01"},
        {f"{DISKS}.0.bootOrder": 65},
        {"hostname": ""},
        {f"{DISKS}.0.serial": ""},
        {f"{NICS}.0": {"name": "default", "masquerade": {}, "ports": [{"port": 80}]}},
        EMPTY_MACHINE,
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_manifests_that_kubevirt_accepts_become_a_vm(changes: dict[str, Any]) -> None:
    made(changes)


def test_a_vm_may_lack_memory_and_a_vmi_may_not() -> None:
    assert vm_causes(template({"domain.resources": None})) == []
    without = {"domain.resources": None, "domain.memory": None}
    assert [one.field for one in vmi_causes(vmi(without))] == ["spec.domain.memory.guest"]


def test_a_mac_address_with_dashes_is_the_same_address() -> None:
    nics = domain(made({f"{NICS}.0.macAddress": "02-00-5E-10-00-01"})).devices.interfaces
    assert nics[0].mac_address == "02:00:5e:10:00:01"


def test_too_little_memory_is_raised_to_the_minimum() -> None:
    create = made(EMPTY_MACHINE)
    assert domain(create).memory.guest == MEMORY_MIN
    assert create.image is None


def test_a_refusal_uses_kubevirts_names_and_units() -> None:
    broken: list[dict[str, Any]] = [
        {"volumes.0.containerDisk": {}},
        {"volumes.0.containerDisk.path": "../x"},
        {"volumes.1.emptyDisk.capacity": "1"},
        {"domain.memory.guest": "32Ti"},
        {"domain.cpu": {"sockets": 1000}},
        {"terminationGracePeriodSeconds": -1},
        {"domain.firmware.uuid": "x"},
        {f"{NICS}.0.macAddress": "x"},
    ]
    for changes in broken:
        causes = vmi_causes(vmi(changes))
        assert causes, changes
        for cause in causes:
            said = f"{cause.field} {cause.message}"
            assert not re.search(r"[a-z]_[a-z]|\b[0-9]{7,}\b", said), said


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tolerations": [{"operator": "Equal"}]}, "tolerations[0].operator"),
        ({"tolerations": [{"key": "a", "effect": "Never"}]}, "tolerations[0].effect"),
        ({"domain.ioThreadsPolicy": "bad"}, "domain.ioThreadsPolicy"),
    ],
)
def test_an_ignored_field_must_be_valid(changes: dict[str, Any], field: str) -> None:
    assert [one.field for one in vmi_causes(vmi(changes))] == [f"spec.{field}"]


def test_an_empty_list_of_node_terms_is_refused() -> None:
    required: dict[str, Any] = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}
    }
    (cause,) = vmi_causes(vmi({"affinity": {"nodeAffinity": required}}))
    assert cause.field.endswith("nodeSelectorTerms")


@pytest.mark.parametrize("weight", [0, 101, "1", None])
def test_a_preference_needs_a_weight_of_1_to_100(weight: Any) -> None:
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": weight}]}
    causes = vm_causes(put(vm(), {"spec.template.spec.affinity": {"nodeAffinity": preferred}}))
    assert [one.field.rpartition(".")[2] for one in causes] == ["weight"]
