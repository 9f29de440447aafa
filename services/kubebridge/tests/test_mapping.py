"""A VMI maps to the VM of virtbus that runs its guest."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.kubebridge.tests.manifests import UID, put, template, vm, vmi
from services.kubebridge.tests.world import CLUSTER, NOW, reconcile_vm, reconcile_vmi, vmi_of

from virtbus.controller.core.admission import admit
from virtbus.kubebridge.core.fields.vm import IGNITION
from virtbus.kubebridge.core.objects import quantity
from virtbus.kubebridge.core.runtime.controller import BusCall, Create
from virtbus.kubebridge.core.translation import defaults
from virtbus.kubebridge.core.translation.annotations import IGNITION_CHARS
from virtbus.kubebridge.core.translation.contents import needs
from virtbus.kubebridge.core.translation.mapping import defaulted_template, translate
from virtbus.kubebridge.core.validation.rules import vm_causes, vmi_causes
from virtbus.kubebridge.core.vmi.status import Seen
from virtbus.schemas.api import VmCreate
from virtbus.schemas.ignition import Ignition
from virtbus.schemas.vm import RunStrategy
from virtbus.schemas.watchdog import I6300esb, Watchdog


def made(whole: dict[str, Any]) -> VmCreate:
    create, causes, _ = translate(whole, {}, "c1")
    assert causes == ()
    assert create is not None
    return create


def fields(whole: dict[str, Any]) -> list[str]:
    return [cause.field for cause in vmi_causes(whole)]


def test_the_smoke_vm_maps_unchanged() -> None:
    assert vm_causes(vm()) == []
    create = made(vmi())
    assert (create.uid, create.name, create.namespace) == (UID, "smoke", "default")
    spec = create.spec
    assert spec is not None
    assert spec.run_strategy is RunStrategy.ONCE
    assert spec.domain.memory.guest == 4 * 10**9
    assert spec.domain.cpu.vcpus == 1
    assert spec.domain.devices.autoattach_graphics_device is True
    assert spec.domain.firmware.uuid == "c3ecdb42-282e-44c3-8266-91b99ac91261"
    assert [disk.name for disk in spec.domain.devices.disks] == [
        *("containerdisk", "emptydisk", "cloudinitdisk"),
    ]
    disk, empty, seed = spec.volumes
    assert disk.container_disk is not None
    assert disk.container_disk.image == "kubevirt/fedora-cloud-container-disk-demo:latest"
    assert disk.container_disk.image_pull_policy == "Always"
    assert empty.empty_disk is not None
    assert empty.empty_disk.capacity == 2 * 1024**3
    assert seed.cloud_init_no_cloud is not None
    assert "password: changeme" in (seed.cloud_init_no_cloud.user_data or "")
    assert seed.cloud_init_no_cloud.hostname == "smoke"
    assert [(net.name, net.network) for net in spec.networks] == [("default", "default")]
    assert dict(spec.node_selector) == {}


@pytest.mark.parametrize(
    ("host_disk", "size_bytes"),
    [
        ({"path": "/srv/vms/a.img", "type": "Disk"}, None),
        ({"path": "/srv/vms/a.img", "type": "DiskOrCreate", "capacity": "1Gi"}, 1024**3),
    ],
)
def test_a_host_disk_is_a_file_of_the_node(
    host_disk: dict[str, str], size_bytes: int | None
) -> None:
    create = made(vmi({"volumes.1": {"name": "emptydisk", "hostDisk": host_disk}}))
    assert create.spec is not None
    found = create.spec.volumes[1].host_disk
    assert found is not None
    assert (found.path, found.capacity) == ("/srv/vms/a.img", size_bytes)


def test_watchdog_and_panic_devices_map() -> None:
    devices = {
        "spec.domain.devices.watchdog": {"name": "w", "i6300esb": {"action": "poweroff"}},
        "spec.domain.devices.panicDevices": [{"model": "isa"}],
        "spec.domain.devices.autoattachGraphicsDevice": False,
    }
    spec = made(put(vmi(), devices)).spec
    assert spec is not None
    assert spec.domain.devices.watchdog == Watchdog(i6300esb=I6300esb(action="poweroff"))
    assert spec.domain.devices.autoattach_graphics_device is False
    others = {"watchdog": {"name": "w", "diag288": {}}, "panicDevices": [{"model": "hyperv"}]}
    other = put(vmi(), {f"spec.domain.devices.{name}": one for name, one in others.items()})
    assert set(fields(other)) == {
        "spec.domain.devices.watchdog.diag288",
        "spec.domain.devices.panicDevices[0].model",
    }


def test_the_controller_admits_the_mapped_smoke_vm() -> None:
    admitted = admit(made(vmi()).model_dump(exclude_none=True), "not used")
    assert (admitted.uid, admitted.powered) == (UID, True)
    assert len(admitted.spec.volumes) == 3


def test_labels_identify_the_vms_of_a_cluster() -> None:
    assert made(vmi()).labels == {"kubevirt.io/created-by": UID, "virtbus.io/cluster": "c1"}


@pytest.mark.parametrize(
    ("changes", "path", "ours"),
    [
        ({"domain.cpu": {"sockets": 2, "cores": 3}}, "domain.cpu.vcpus", 6),
        ({"domain.cpu": None, "domain.resources.limits": {"cpu": "1500m"}},
         "domain.cpu.sockets", 2),
        ({"domain.cpu.model": "host-passthrough"}, "domain.cpu.model", None),
        ({"domain.cpu.model": "Nehalem"}, "domain.cpu.model", "Nehalem"),
        ({"domain.memory": {"guest": "1.5Gi"}}, "domain.memory.guest", 3 * 512 * 1024**2),
        ({"domain.firmware.serial": "a-1"}, "domain.firmware.serial", "a-1"),
        ({"terminationGracePeriodSeconds": 0}, "termination_grace_s", 0),
        ({"startStrategy": "Paused"}, "start_strategy", "Paused"),
        ({"evictionStrategy": "External"}, "eviction_strategy", "External"),
        ({"nodeSelector": {"disk": "fast"}}, "node_selector", {"disk": "fast"}),
        ({"domain.devices.disks.0": {"name": "containerdisk", "cdrom": {}}},
         "domain.devices.disks.0.device", "cdrom"),
        ({"domain.devices.disks.0": {"name": "containerdisk", "cdrom": {}}},
         "domain.devices.disks.0.bus", "sata"),
        ({"domain.devices.disks.0.bootOrder": 2}, "domain.devices.disks.0.boot_order", 2),
        ({"domain.devices.interfaces.0.macAddress": "02:00:5E:10:00:01"},
         "domain.devices.interfaces.0.mac_address", "02:00:5e:10:00:01"),
        ({"domain.devices.interfaces.0.model": "e1000e"},
         "domain.devices.interfaces.0.model", "e1000e"),
        ({"domain.devices.interfaces.0.state": "down"},
         "domain.devices.interfaces.0.state", "down"),
        ({"domain.devices.interfaces.0.bootOrder": 3},
         "domain.devices.interfaces.0.boot_order", 3),
        ({"domain.devices.interfaces.0.acpiIndex": 7},
         "domain.devices.interfaces.0.acpi_index", 7),
        ({"domain.cpu": {"cores": 3}, "domain.devices.networkInterfaceMultiqueue": True},
         "domain.devices.interfaces.0.queues", 3),
        ({"domain.cpu": {"cores": 40}, "domain.devices.networkInterfaceMultiqueue": True},
         "domain.devices.interfaces.0.queues", 16),
        ({"networks.0": {"name": "default", "multus": {"networkName": "lan"}}},
         "networks.0.network", "lan"),
        ({"networks": None, "domain.devices.interfaces": None}, "networks.0.network", "default"),
        ({"volumes.0.containerDisk.path": "/disk/a.img"}, "volumes.0.container_disk.path",
         "/disk/a.img"),
        ({"volumes.2.cloudInitNoCloud": {"userDataBase64": "YQ=="}},
         "volumes.2.cloud_init_no_cloud.user_bytes", b"a"),
        ({"hostname": "box"}, "volumes.2.cloud_init_no_cloud.hostname", "box"),
    ],
)  # fmt: skip
def test_a_field_maps(changes: dict[str, Any], path: str, ours: Any) -> None:
    here: Any = made(vmi(changes)).spec
    for name in path.split("."):
        here = here[int(name)] if name.isdigit() else getattr(here, name)
    assert here == ours


def test_node_affinity_becomes_a_node_selector() -> None:
    wanted = [
        {"key": "zone", "operator": "In", "values": ["a"]},
        {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]},
    ]
    term = {"matchExpressions": wanted}
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]},
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}],
        },
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": {"topologyKey": "zone"}}
            ]
        },
    }
    both = vmi({"affinity": affinity, "nodeSelector": {"disk": "fast", "zone": "a"}})
    assert vmi_causes(both) == []
    spec = made(both).spec
    assert spec is not None
    assert dict(spec.node_selector) == {"disk": "fast", "zone": "a"}
    alone = made(vmi({"affinity": affinity, "nodeSelector": None})).spec
    assert alone is not None
    assert dict(alone.node_selector) == {"zone": "a"}
    wanted[0]["operator"] = "NotIn"
    (cause,) = vmi_causes(vmi({"affinity": affinity}))
    assert cause.field.endswith("nodeSelectorTerms[0].matchExpressions[0].operator")
    assert "nodeSelector" in cause.message


def test_a_vm_may_have_no_network() -> None:
    bare = {"networks": None, "domain.devices": {"autoattachPodInterface": False}}
    spec = made(vmi(bare)).spec
    assert spec is not None
    assert (spec.networks, spec.domain.devices.interfaces) == ((), ())


def test_a_vm_without_a_seed_gets_one_with_its_host_name() -> None:
    volumes = [{"name": "cloudinit", "containerDisk": {"image": "a/b"}}]
    spec = made(vmi({"volumes": volumes, "domain.devices.disks": None})).spec
    assert spec is not None
    assert [volume.name for volume in spec.volumes] == ["cloudinit", "cloudinit1"]
    assert spec.volumes[1].cloud_init_no_cloud is not None
    assert spec.volumes[1].cloud_init_no_cloud.hostname == "smoke"


def test_errors_of_our_models_have_kubevirts_path() -> None:
    whole = vmi(
        {
            "volumes.0.containerDisk.image": "NO image",
            "domain.memory.guest": "32Ti",
            "domain.firmware.uuid": "x",
            "domain.devices.interfaces.0.macAddress": "ff:ff:ff:ff:ff:ff",
        }
    )
    assert set(fields(whole)) == {
        "spec.volumes[0].containerDisk.image",
        "spec.domain.memory.guest",
        "spec.domain.firmware.uuid",
        "spec.domain.devices.interfaces[0].macAddress",
    }


def test_a_memory_error_is_reported_at_the_given_field() -> None:
    whole = vmi()
    whole["spec"]["domain"]["resources"]["requests"]["memory"] = "32Ti"
    del whole["spec"]["domain"]["memory"]
    assert fields(whole) == ["spec.domain.memory.guest"]  # the default copied it there


def test_an_invalid_name_is_refused_once() -> None:
    assert fields(put(vmi(), {"metadata.name": "a.b"})) == ["metadata.name"]


def test_a_generated_name_is_not_checked() -> None:
    assert fields(put(vmi(), {"metadata.name": None})) == []


def test_a_hook_is_refused_and_an_unknown_annotation_is_not() -> None:
    annotations = {"hooks.kubevirt.io/hookSidecars": "[]", "example.com/a": "b"}
    assert fields(put(vmi(), {"metadata.annotations": annotations})) == [
        "metadata.annotations.hooks.kubevirt.io/hookSidecars"
    ]


def test_ignition_of_an_annotation_becomes_the_vms() -> None:
    config = '{"ignition": {"version": "3.4.0"}}'
    create = made(put(vmi(), {"metadata.annotations": {IGNITION: config}}))
    assert create.spec is not None
    assert create.spec.ignition == Ignition(config=config)
    assert create.annotations == {}


@pytest.mark.parametrize("config", ["{", "{}", '{"ignition": 3}', "x" * (IGNITION_CHARS + 1)])
def test_invalid_ignition_is_refused_at_its_annotation(config: str) -> None:
    noted = put(vmi(), {"metadata.annotations": {IGNITION: config}})
    assert fields(noted) == [f"metadata.annotations.{IGNITION}"]


def test_all_problems_of_a_vm_are_reported_together() -> None:
    whole = template({"domain.devices.gpus": [{}], "foo": 1, "volumes.0.containerDisk.image": "X"})
    put(whole, {"spec.instancetype": {"name": "a"}, "spec.runStrategy": "Always"})
    assert {cause.field for cause in vm_causes(whole)} == {
        "spec.running",
        "spec.instancetype",
        "spec.template.spec.domain.devices.gpus",
        "spec.template.spec.foo",
        "spec.template.spec.volumes[0].containerDisk.image",
    }


# --- defaults ----------------------------------------------------------------------------------
def test_defaults_fill_missing_fields_and_are_idempotent() -> None:
    once = defaults.of_vm(vm())
    assert defaults.of_vm(once) == once
    assert defaults.json_patch(once, defaults.of_vm(once)) == []
    whole = vmi({"volumes.0.containerDisk.imagePullPolicy": None, "domain.cpu": None})
    assert defaults.of_vmi(whole) == whole
    assert whole["spec"]["domain"]["cpu"] == {
        "model": "host-model",
        "sockets": 1,
        "cores": 1,
        "threads": 1,
    }


def test_a_vm_gets_the_firmware_uuid_that_kubevirt_gives_its_name() -> None:
    whole = defaults.of_vm(put(template({"domain.firmware": None}), {"metadata.name": "testvm"}))
    first = whole["spec"]["template"]["spec"]["domain"]["firmware"]["uuid"]
    assert first == "5a9fc181-957e-5c32-9e5a-2de5e9673531"


@pytest.mark.parametrize(
    ("image", "policy"),
    [
        ("a/b", "Always"),
        ("localhost:5000/b", "Always"),
        ("a/b:latest", "Always"),
        ("a/b:1", "IfNotPresent"),
        ("a/b@sha256:" + "0" * 64, "IfNotPresent"),
    ],
)
def test_the_pull_policy_follows_the_tag(image: str, policy: str) -> None:
    whole = vmi({"volumes.0.containerDisk": {"image": image}})
    assert whole["spec"]["volumes"][0]["containerDisk"]["imagePullPolicy"] == policy


KEYS = st.sampled_from(
    [
        *("spec", "template", "metadata", "domain", "devices", "disks", "volumes", "networks"),
        *("name", "disk", "cdrom", "bus", "cpu", "memory", "resources", "requests", "limits"),
        *("containerDisk", "cloudInitNoCloud", "userData", "interfaces", "labels", "image", "x"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_problems_of_any_object_are_reported(spec: dict[str, Any]) -> None:
    whole = {"metadata": {"name": "a", "namespace": "b"}, "spec": spec}
    assert vmi_causes(whole)
    assert vm_causes(whole)
    template_only = {**whole, "spec": {"running": True, "template": {"spec": spec}}}
    assert all(cause.message for cause in vm_causes(template_only))
    once = defaults.of_vmi(whole)
    assert defaults.of_vmi(once) == once
    list(needs(spec))


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(KEYS, JSON, max_size=5))
def test_an_object_that_bypassed_the_webhooks_is_reported(
    spec: dict[str, Any],
) -> None:
    metadata = {"name": "a", "namespace": "b", "uid": UID, "generation": 1}
    whole = {"metadata": metadata, "spec": spec}
    actions = reconcile_vmi(whole, Seen(), {}, NOW, CLUSTER)
    assert not any(isinstance(one, BusCall) for one in actions)
    reconcile_vm(whole, None, NOW)
    odd = {**whole, "spec": {"running": True, "template": spec}}
    assert any(isinstance(one, Create) for one in reconcile_vm(odd, None, NOW))


@pytest.mark.parametrize(
    ("text", "number"),
    [("4G", 4 * 10**9), ("1Ki", 1024), ("1.5Gi", 3 * 2**29), ("100m", 1), ("1e3", 1000), (7, 7)],
)
def test_quantities_are_parsed_as_in_kubernetes(text: Any, number: int) -> None:
    assert quantity.whole(text) == number


@pytest.mark.parametrize("text", ["", "4GB", "1e99", "9" * 21, "-1", True, "1 G", "E", None])
def test_an_invalid_quantity_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="must"):
        quantity.whole(text)


def test_a_defaulted_template_has_the_name_of_its_vm() -> None:
    made_ = defaulted_template(vm())
    assert made_["metadata"]["name"] == "kubevirt-smoke-fedora"


def test_an_admitted_vmi_has_room_for_the_bridges_labels() -> None:
    def labelled(count: int) -> dict[str, Any]:
        return put(vm(), {"spec.template.metadata.labels": {f"l{n}": "" for n in range(count)}})

    most = next(n for n in range(64, 0, -1) if not vm_causes(labelled(n)))
    assert most >= 60
    begun = put(vmi_of(labelled(most), paused=False), {"metadata.uid": UID})
    begun["metadata"]["labels"]["kubevirt.io/nodeName"] = "n1"
    assert translate(begun, {}, "c1").causes == ()
