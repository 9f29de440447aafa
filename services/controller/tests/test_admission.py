"""Admission: defaults are filled in, and one answer contains every problem."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.controller.tests.fleets import GIB, SSH_KEY, uid

from virtbus.controller.core.admission import AdmittedVm, admit
from virtbus.controller.core.secret_inputs import secret_bytes, split_secrets
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import RunStrategy, VmRecord, VmSpec
from virtbus.schemas.wire import encode, read, spec_hash

ROOT = {"name": "root", "image": {"ref": "tiny"}}
SEED = {"name": "seed", "cloud_init_no_cloud": {"user_data": "#cloud-config\n"}}


DISKS = "spec.domain.devices.disks"


def admitted(**data: Any) -> AdmittedVm:
    return admit({"name": "web", "image": "tiny"} | data, uid(1))


def refused(data: Any) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        admit(data, uid(1))
    assert caught.value.code == Code.INVALID
    return caught.value


def paths(data: Any) -> list[str]:
    return [detail.path for detail in refused(data).body.details]


# --- defaults --------------------------------------------------------------------------------
def test_a_name_and_an_image_make_a_whole_vm() -> None:
    done = admitted()
    assert (done.uid, done.namespace, done.powered, done.secrets) == (
        uid(1),
        "default",
        True,
        None,
    )
    assert [v.name for v in done.spec.volumes] == ["root", "cloudinit"]
    assert [d.name for d in done.spec.domain.devices.disks] == ["root", "cloudinit"]
    assert [d.readonly for d in done.spec.domain.devices.disks] == [False, True]
    assert [n.network for n in done.spec.networks] == ["default"]
    assert [i.name for i in done.spec.domain.devices.interfaces] == ["default"]
    seed = done.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert seed.hostname == "web"


def test_a_container_disk_is_an_image_to_boot_from() -> None:
    disk = {"image": "quay.io/team/web:1", "path": "/disk/a.qcow2"}
    done = admit(
        {"name": "web", "spec": {"volumes": [{"name": "r", "container_disk": disk}]}}, uid(1)
    )
    assert done.spec.volumes[0].image_ref == "docker://quay.io/team/web:1#/disk/a.qcow2"
    assert done.spec.domain.devices.disks[0].name == "r"
    assert done.spec.local_disks == ("r",)
    both = {"volumes": [ROOT | {"container_disk": disk}]}
    assert paths({"name": "web", "spec": both}) == ["spec.volumes[0]"]
    bad = {"volumes": [{"name": "r", "container_disk": {"image": "Quay/X", "path": "disk"}}]}
    where = "spec.volumes[0].container_disk"
    assert paths({"name": "web", "spec": bad}) == [f"{where}.image", f"{where}.path"]


def test_shorthand_becomes_the_spec() -> None:
    done = admitted(
        cpus=3, memory="1GiB", disk="8GiB", network="blue", ssh_keys=[SSH_KEY], uid=uid(9)
    )
    assert done.uid == uid(9)
    assert done.spec.domain.cpu.vcpus == 3
    assert done.spec.domain.memory.guest == GIB
    assert done.spec.volumes[0].image is not None
    assert done.spec.volumes[0].image.size == 8 * GIB
    assert done.spec.networks[0].network == "blue"
    seed = done.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert seed.ssh_keys == ()
    assert done.secrets is not None
    assert done.secrets.cloud_init["cloudinit"].ssh_keys == (SSH_KEY,)


def test_shorthand_and_the_same_spec_in_full_are_the_same_vm() -> None:
    full = admitted().spec.model_dump(mode="json")
    again = admit({"name": "web", "spec": full}, uid(2))
    assert again.spec == admitted().spec
    assert again.spec_hash == admitted().spec_hash


def test_devices_that_are_named_stay_and_the_others_are_added() -> None:
    devices = {"disks": [{"name": "root", "bus": "sata"}], "interfaces": [{"name": "lan"}]}
    done = admit(
        {
            "name": "web",
            "spec": {
                "domain": {"devices": devices},
                "volumes": [ROOT, {"name": "data", "empty_disk": {"capacity": "1GiB"}}],
                "networks": [{"name": "lan", "network": "blue"}, {"name": "wan"}],
            },
        },
        uid(1),
    )
    disks = {disk.name: str(disk.bus) for disk in done.spec.domain.devices.disks}
    assert disks == {"root": "sata", "data": "virtio", "cloudinit": "virtio"}
    assert [i.name for i in done.spec.domain.devices.interfaces] == ["lan", "wan"]


def test_an_explicit_empty_list_of_volumes_means_an_empty_machine() -> None:
    machine = admitted(image=None, spec={"volumes": []})
    assert [volume.image_ref for volume in machine.spec.volumes] == [""]
    assert paths({"name": "web"}) == ["image"]


@pytest.mark.parametrize(("bus", "wrong"), [("sata", []), ("virtio", [f"{DISKS}[0].name"])])
def test_a_cdrom_drive_needs_no_volume(bus: str, wrong: list[str]) -> None:
    drive = {"name": "drive", "device": "cdrom", "bus": bus}
    devices = {"domain": {"devices": {"disks": [drive]}}}
    data = {"name": "web", "image": "tiny", "spec": devices}
    if wrong:
        assert paths(data) == wrong
    else:
        assert admitted(**data).spec.domain.devices.disks[0].name == "drive"


def test_rules_of_disks_are_in_the_same_answer_as_wrong_types() -> None:
    disks = [{"name": "root", "bus": "sata", "readonly": True}, {"name": "data", "bus": "isa"}]
    volumes = [ROOT, {"name": "data", "empty_disk": {"capacity": "1GiB"}}]
    spec = {"domain": {"devices": {"disks": disks}}, "volumes": volumes}
    assert set(paths({"name": "web", "spec": spec})) == {
        f"{DISKS}[0].readonly",
        f"{DISKS}[1].bus",
    }


def test_disks_that_admission_adds_count_for_their_bus() -> None:
    volumes = [{"name": f"d{n}", "empty_disk": {"capacity": "1MiB"}} for n in range(60)]
    # the seed is the disk 61
    assert paths({"name": "web", "spec": {"volumes": volumes}}) == [f"{DISKS}[60].bus"]
    spec = {
        "volumes": volumes,
        "domain": {"devices": {"disks": [{"name": "d0", "bus": "scsi"}]}},
    }
    assert len(admitted(image=None, spec=spec).spec.domain.devices.disks) == 61


def test_an_explicit_empty_list_of_networks_means_none() -> None:
    done = admit({"name": "web", "spec": {"volumes": [ROOT], "networks": []}}, uid(1))
    assert done.spec.networks == ()
    assert done.spec.domain.devices.interfaces == ()


def test_a_seed_of_the_spec_takes_the_shorthand_in() -> None:
    done = admit({"name": "web", "ssh_keys": [SSH_KEY], "spec": {"volumes": [ROOT, SEED]}}, uid(1))
    assert [volume.name for volume in done.spec.volumes] == ["root", "seed"]
    seed = done.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert (seed.hostname, seed.ssh_keys) == ("web", ())
    assert done.secrets is not None
    assert done.secrets.cloud_init["seed"].ssh_keys == (SSH_KEY,)


@pytest.mark.parametrize("strategy", RunStrategy)
def test_manual_and_halted_vms_are_not_started(strategy: RunStrategy) -> None:
    done = admitted(spec={"run_strategy": str(strategy)})
    assert done.powered == (strategy not in {RunStrategy.MANUAL, RunStrategy.HALTED})


# --- secrets ---------------------------------------------------------------------------------
def test_secrets_leave_the_spec() -> None:
    done = admitted(user_data="#cloud-config\npassword: hunter2\n")
    assert done.secrets is not None
    assert b"hunter2" in secret_bytes(done.secrets)
    assert b"hunter2" not in encode(done.spec)
    assert done.secrets.cloud_init["cloudinit"].user_data == "#cloud-config\npassword: hunter2\n"
    bare = done.spec.volumes[1].cloud_init_no_cloud
    assert bare is not None
    assert bare.hostname == "web"
    assert split_secrets(done.spec, done.uid) == (done.spec, None)


def test_network_data_is_a_secret_too_and_an_empty_text_is_one() -> None:
    volume = {"name": "seed", "cloud_init_no_cloud": {"network_data": ""}}
    done = admit({"name": "web", "spec": {"volumes": [ROOT, volume]}}, uid(1))
    assert done.secrets is not None
    assert done.secrets.cloud_init["seed"].network_data == ""


def test_other_secrets_make_another_hash() -> None:
    assert admitted(user_data="a").spec_hash != admitted(user_data="b").spec_hash
    assert admitted(user_data="a").spec == admitted(user_data="b").spec


def test_a_problem_never_repeats_a_secret() -> None:
    error = refused({"name": "web", "user_data": ["hunter2"], "spec": {"volumes": "hunter2"}})
    assert "hunter2" not in error.body.model_dump_json()


# --- problems --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"name": "web"}, ["image"]),
        ({}, ["name", "image"]),
        ({"name": "web", "disk": "1GiB"}, ["image", "disk"]),
        ({"name": "web", "image": "tiny", "spec": {"volumes": [ROOT]}}, ["image"]),
        (
            {"name": "web", "image": "tiny", "cpus": 1, "spec": {"domain": {"cpu": {"cores": 2}}}},
            ["cpus"],
        ),
        (
            {
                "name": "web",
                "image": "tiny",
                "memory": "1GiB",
                "spec": {"domain": {"memory": {"guest": "2GiB"}}},
            },
            ["memory"],
        ),
        (
            {"name": "web", "image": "tiny", "network": "a", "spec": {"networks": [{"name": "b"}]}},
            ["network"],
        ),
        ({"name": "web", "spec": {"volumes": [ROOT, ROOT]}}, ["spec.volumes[1].name"]),
        (
            {
                "name": "web",
                "spec": {"volumes": [ROOT], "networks": [{"name": "a"}, {"name": "a"}]},
            },
            ["spec.networks[1].name"],
        ),
        (
            {"name": "web", "image": "tiny", "spec": {"volumes": [{"name": "x"}]}},
            ["spec.volumes[0]"],
        ),
        (
            {"name": "web", "spec": {"volumes": [ROOT | {"empty_disk": {"capacity": "1GiB"}}]}},
            ["spec.volumes[0]"],
        ),
        (
            {
                "name": "web",
                "spec": {"volumes": [ROOT], "domain": {"devices": {"disks": [{"name": "b"}]}}},
            },
            ["spec.domain.devices.disks[0].name"],
        ),
        (
            {
                "name": "web",
                "spec": {"volumes": [ROOT], "domain": {"devices": {"interfaces": [{"name": "b"}]}}},
            },
            ["spec.domain.devices.interfaces[0].name"],
        ),
        (
            {
                "name": "web",
                "spec": {
                    "volumes": [ROOT],
                    "domain": {"devices": {"disks": [{"name": "root"}] * 2}},
                },
            },
            ["spec.domain.devices.disks[1].name"],
        ),
        ({"name": "web", "user_data": "#!/a\n", "spec": {"volumes": [ROOT, SEED]}}, ["user_data"]),
    ],
)
def test_each_problem_between_fields_has_its_path(data: Any, expected: list[str]) -> None:
    assert paths(data) == expected


def test_problems_of_types_and_between_fields_come_in_one_answer() -> None:
    data = {
        "name": "Web",
        "cpus": 0,
        "imgae": "tiny",
        "spec": {
            "domain": {"cpu": {"cores": 2}, "devices": {"disks": [{"name": "nope"}]}},
            "volumes": [{"name": "a"}, {"name": "a", "image": {"ref": "t"}}],
        },
    }
    error = refused(data)
    assert sorted(detail.path for detail in error.body.details) == sorted(
        [
            "name",
            "cpus",
            "imgae",
            "cpus",
            "spec.volumes[1].name",
            "spec.volumes[0]",
            "spec.domain.devices.disks[0].name",
        ]
    )
    hints = {detail.path: detail.hint for detail in error.body.details}
    assert hints["imgae"] == "did you mean image?"


@pytest.mark.parametrize(
    ("volumes", "where"),
    [
        (
            [{"name": f"d{n}", "empty_disk": {"capacity": "1MiB"}} for n in range(256)],
            "spec.volumes",
        ),
        ([SEED | {"cloud_init_no_cloud": {"ssh_keys": [SSH_KEY] * 64}}], "ssh_keys"),
    ],
)
def test_defaults_have_bounds_too(volumes: list[Any], where: str) -> None:
    """A spec that a reader would refuse must never be stored."""
    data = {"name": "web", "image": "tiny", "ssh_keys": [SSH_KEY], "spec": {"volumes": volumes}}
    assert all(path.startswith("spec.") for path in paths(data))
    assert any(where in path for path in paths(data))


HOSTILE: list[Any] = [
    None,
    1,
    "web",
    [],
    b"x",
    {"name": None},
    {"name": {}},
    {"name": b"\xff"},
    {"name": "web", "spec": 5},
    {"name": "web", "spec": {"volumes": 5}},
    {"name": "web", "spec": {"volumes": [5, None, "x"]}},
    {"name": "web", "spec": {"volumes": [{"name": {}}, {"name": []}, {"name": 1}]}},
    {"name": "web", "spec": {"networks": [{"name": {}}]}},
    {"name": "web", "spec": {"domain": {"devices": {"disks": [{"name": {}}, {"name": "a"}]}}}},
    {"name": "web", "spec": {"volumes": [{"image": 1, "empty_disk": []}]}},
    {"name": "web", "image": {"ref": "x"}},
    {"name": "web", "image": "tiny", "spec": {"domain": []}},
    {"name": "web", "image": "tiny", "memory": "1"},
    {"name": "web", "image": "tiny", "disk": 1},
    {"name": "web", "image": "tiny", "cpus": 300},
    {"name": "web", "image": "tiny", "user_data": 7},
    {"name": "web", "image": "tiny", "uid": "../../etc"},
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: str(data)[:60])
def test_hostile_values_are_a_refusal_and_nothing_else(data: Any) -> None:
    assert refused(data).body.details


FIELDS = [
    *("name", "image", "ref", "spec", "volumes", "networks", "domain", "devices", "disks"),
    *("interfaces", "cloud_init_no_cloud", "user_data", "cpu", "memory", "guest", "cpus"),
]

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.just("root"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(junk)
def test_any_value_is_admitted_or_refused(data: Any) -> None:
    try:
        done = admit(data, uid(1))
    except VirtbusError:
        return
    again = VmSpec.model_validate(done.spec.model_dump())
    assert spec_hash(again) == spec_hash(done.spec)


def test_an_admitted_spec_can_be_stored_and_read() -> None:
    done = admitted(cpus=256, memory="16TiB", ssh_keys=[SSH_KEY] * 64, labels={"a": "b"})
    stored = VmRecord(
        uid=done.uid,
        namespace=done.namespace,
        name=done.name,
        spec=done.spec,
        spec_hash=done.spec_hash,
        node="n1",
        created_ns=1,
    )
    assert read(VmRecord, encode(stored)) == stored
