"""Secrets of a VM leave its record, for every kind of volume."""

import json
from typing import Any

import pytest
from services.controller.tests.fleets import uid

from virtbus.controller.core.admission import admit
from virtbus.controller.core.secret_inputs import MAX_BYTES, secret_bytes, secret_paths
from virtbus.schemas.bounds import SECRET
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.vm import VmSecrets
from virtbus.schemas.wire import encode, read

ROOT = {"name": "root", "image": {"ref": "tiny"}}
DRIVE = {"name": "drive", "cloud_init_config_drive": {"user_data_base64": "aHVudGVyMg=="}}
FILES = {
    "name": "app",
    "files": {"data": {"app.conf": "hunter2"}, "binary_data": {"k.der": "aHVudGVyMg=="}},
}


PULLED = {
    "name": "tools",
    "container_disk": {
        "image": "quay.io/team/tools:1",
        "image_pull_secret": json.dumps(
            {"auths": {"quay.io": {"username": "me", "password": "hunter2"}, "other": {}}}
        ),
    },
}


def request(*volumes: dict[str, Any]) -> dict[str, Any]:
    return {"name": "web", "spec": {"volumes": [ROOT, *volumes]}}


def details(data: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(VirtbusError) as refused:
        admit(data, uid(1))
    assert "hunter2" not in refused.value.body.model_dump_json()
    return {detail.path: detail.message for detail in refused.value.body.details}


def test_config_drives_and_files_leave_the_record_and_keep_their_labels() -> None:
    done = admit(request(DRIVE, FILES), uid(1))
    assert [volume.name for volume in done.spec.volumes] == ["root", "drive", "app"]
    assert [disk.readonly for disk in done.spec.domain.devices.disks] == [False, True, True]
    for secret in (b"hunter2", b"aHVudGVyMg"):
        assert secret not in encode(done.spec)
    assert done.secrets is not None
    assert b"hunter2" in secret_bytes(done.secrets)
    assert done.secrets.cloud_init["drive"].user_bytes == b"hunter2"
    assert done.secrets.cloud_init["drive"].hostname == "web"
    assert done.secrets.files["app"].contents == {"app.conf": b"hunter2", "k.der": b"hunter2"}
    assert done.spec.local_disks == ("root",)


def test_vendor_data_and_every_part_of_user_data_leave_the_record() -> None:
    given = {
        "vendor_data": "#!/bin/hunter2",
        "user_data_parts": [{"data": "#!/bin/hunter2"}, {"data_base64": "IyFodW50ZXIy"}],
    }
    done = admit(request({"name": "ci", "cloud_init_no_cloud": given}), uid(1))
    assert b"hunter2" not in encode(done.spec)
    assert done.secrets is not None
    seed = done.secrets.cloud_init["ci"]
    assert [part.content for part in seed.user_data_parts] == [b"#!/bin/hunter2", b"#!hunter2"]
    assert seed.vendor_bytes == b"#!/bin/hunter2"


def test_files_and_environment_leave_the_record_and_mounts_stay() -> None:
    given = {
        "environment": {"KEY": "hunter2"},
        "write_files": [{"path": "/etc/hunter2", "content": "hunter2", "mode": "0600"}],
        "mounts": [{"volume": "root", "path": "/again"}],
    }
    done = admit(request({"name": "ci", "cloud_init_no_cloud": given}), uid(1))
    assert b"hunter2" not in encode(done.spec)
    seed = done.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert [mount.path for mount in seed.mounts] == ["/again"]
    assert done.secrets is not None
    assert done.secrets.cloud_init["ci"].environment == {"KEY": "hunter2"}
    assert done.secrets.cloud_init["ci"].write_files[0].data == b"hunter2"


def test_a_mounted_disk_has_a_serial_of_at_most_twenty_characters() -> None:
    long = "a-rather-long-name-of-a-volume"
    spec = {
        "volumes": [
            ROOT,
            {"name": long, "empty_disk": {"capacity": "1MiB"}},
            {"name": "own", "empty_disk": {"capacity": "1MiB"}},
            {
                "name": "ci",
                "cloud_init_no_cloud": {
                    "mounts": [{"volume": one, "path": f"/{one}"} for one in ("root", long, "own")]
                },
            },
        ],
        "domain": {"devices": {"disks": [{"name": "own", "serial": "Mine-1"}]}},
    }
    done = admit({"name": "web", "spec": spec}, uid(1))
    serials = {disk.name: disk.guest_serial for disk in done.spec.domain.devices.disks}
    assert serials == {"root": "root", long: "a-rather-lo-4f3233bc", "own": "Mine-1", "ci": "ci"}


@pytest.mark.parametrize(
    ("mount", "serial", "path", "words"),
    [
        ({"volume": "gone", "path": "/a"}, "x", ".volume", "no volume is named"),
        ({"volume": "root", "path": "/a"}, "root", ".volume", "another disk has the serial"),
        ({"volume": "root", "path": "/a"}, "root1", ".volume", "serial number root1"),
        ({"volume": "root", "path": "/a", "partition": 2}, "rootp2", ".volume", "number rootp2"),
        ({"volume": "ci", "path": "/a"}, "a.b", ".volume", "has a dot"),
        ({"volume": "root", "path": "a"}, "x", ".path", "match"),
        ({"volume": "root", "path": "/a b"}, "x", ".path", "match"),
        ({"volume": "root", "path": "/a", "options": "a b"}, "x", ".options", "match"),
        ({"volume": "root", "path": "/a", "filesystem": "-x y"}, "x", ".filesystem", "match"),
        (
            {"volume": "root", "path": "/a", "filesystem": "ext4", "make_filesystem": True},
            *("x", ".make_filesystem", "only an empty_disk"),
        ),
    ],
)
def test_a_wrong_mount_is_refused(
    mount: dict[str, Any], serial: str, path: str, words: str
) -> None:
    seed = {"name": "ci", "cloud_init_no_cloud": {"mounts": [mount]}}
    devices = {"disks": [{"name": "ci", "serial": serial}]}
    data = request(seed)
    data["spec"]["domain"] = {"devices": devices}
    found = details(data)
    assert words in found[f"spec.volumes[1].cloud_init_no_cloud.mounts[0]{path}"]


def test_a_file_system_is_made_by_its_name_on_the_whole_disk() -> None:
    for wrong in ({}, {"filesystem": "auto"}, {"filesystem": "ext4", "partition": 1}):
        mount = {"volume": "tmp", "path": "/a", "make_filesystem": True, **wrong}
        data = request({"name": "ci", "cloud_init_no_cloud": {"mounts": [mount]}})
        data["spec"]["volumes"].append({"name": "tmp", "empty_disk": {"capacity": 2**20}})
        path = "spec.volumes[1].cloud_init_no_cloud.mounts[0].make_filesystem"
        assert "by name" in details(data)[path]


def test_a_link_to_no_volume_is_refused() -> None:
    seed = {"name": "ci", "cloud_init_no_cloud": {"links": [{"volume": "gone", "path": "/dev/a"}]}}
    path = "spec.volumes[1].cloud_init_no_cloud.links[0].volume"
    assert "no volume is named" in details(request(seed))[path]


def test_the_volume_of_the_shorthand_can_be_mounted() -> None:
    seed = {"name": "ci", "cloud_init_no_cloud": {"mounts": [{"volume": "root", "path": "/a"}]}}
    done = admit({"name": "web", "image": "tiny", "spec": {"volumes": [seed]}}, uid(1))
    serials = {disk.name: disk.guest_serial for disk in done.spec.domain.devices.disks}
    assert serials == {"root": "root", "ci": "ci"}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"environment": {"A B": "hunter2"}}, "environment.A B"),
        ({"environment": {"A": "hunter2\nB=1"}}, "environment.A"),
        ({"environment": {"A": "\0"}}, "environment.A"),
        ({"write_files": [{"path": "etc", "content": "hunter2"}]}, "write_files[0].path"),
        ({"write_files": [{"path": "/e\nb", "content": ""}]}, "write_files[0].path"),
        ({"write_files": [{"path": "/etc/a"}]}, "write_files[0]"),
        ({"write_files": [{"path": "/a", "content": "", "mode": "0888"}]}, "write_files[0].mode"),
        ({"write_files": [{"path": "/a", "content": "", "owner": "a b"}]}, "write_files[0].owner"),
        ({"write_files": [{"path": "/a", "content_base64": "?"}]}, "write_files[0].content_base64"),
    ],
)
def test_a_file_or_value_that_could_break_out_is_refused(given: dict[str, Any], path: str) -> None:
    found = details(request({"name": "ci", "cloud_init_no_cloud": given}))
    assert list(found) == [f"spec.volumes[1].cloud_init_no_cloud.{path}"]


def test_sysprep_is_a_cdrom_with_its_own_label_and_its_answers_leave_the_record() -> None:
    answers = {"name": "win", "sysprep": {"data": {"Autounattend.xml": "<hunter2/>"}}}
    done = admit(request(answers), uid(1))
    assert b"hunter2" not in encode(done.spec)
    disk = done.spec.domain.devices.disks[1]
    assert (disk.device, disk.bus, disk.readonly) == ("cdrom", "sata", True)
    files = done.spec.volumes[1].file_set
    assert files is not None
    assert files.volume_label == "unattendCD"
    assert done.secrets is not None
    back = read(VmSecrets, secret_bytes(done.secrets))
    assert back.files["win"].contents == {"Autounattend.xml": b"<hunter2/>"}


@pytest.mark.parametrize(
    ("files", "disk", "path"),
    [
        ({"setup.xml": "<a/>"}, {}, "spec.volumes[1].sysprep.data"),
        ({"unattend.xml": "<a/>"}, {"bus": "sata"}, "spec.domain.devices.disks[0].device"),
        ({"unattend.xml": "<a/>"}, {"device": "cdrom", "bus": "virtio"},
         "spec.domain.devices.disks[0].device"),
    ],
)  # fmt: skip
def test_answers_that_windows_setup_would_not_find_are_refused(
    files: dict[str, str], disk: dict[str, str], path: str
) -> None:
    data = request({"name": "win", "sysprep": {"data": files}})
    if disk:
        data["spec"]["domain"] = {"devices": {"disks": [{"name": "win"} | disk]}}
    assert list(details(data)) == [path]


def test_ignitions_configuration_leaves_the_record() -> None:
    config = '{"ignition": {"version": "3.4.0"}, "a": "hunter2"}'
    done = admit({"name": "web", "spec": {"volumes": [], "ignition": {"config": config}}}, uid(1))
    assert b"hunter2" not in encode(done.spec)
    assert done.spec.ignition is not None
    assert done.secrets is not None
    assert done.secrets.ignition is not None
    assert done.secrets.ignition.config == config
    assert secret_paths(done.spec)[0] == "spec.ignition"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "missing"),
        ("hunter2", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "version"),
        ('{"ignition": {}}', "version"),
        ('{"ignition": {"version": 3}}', "version"),
        ('{"ignition": {"version": "3"}, "a": "hunter2"}', "version"),
        ("x" * (512 * 1024 + 1), "at most"),
    ],
)
def test_what_ignition_would_not_read_is_refused(config: str | None, words: str) -> None:
    found = details({"name": "web", "spec": {"volumes": [], "ignition": {"config": config}}})
    assert words in found["spec.ignition.config"]


def test_a_pull_secret_leaves_the_record_and_goes_with_its_own_registry_alone() -> None:
    done = admit(request(PULLED), uid(1))
    disk = done.spec.volumes[1].container_disk
    assert disk is not None
    assert disk.image_pull_secret == ""
    assert done.secrets is not None
    held = json.loads(done.secrets.image_pull["tools"])
    assert held == {"auths": {"quay.io": {"auth": "bWU6aHVudGVyMg=="}}}
    assert secret_paths(done.spec) == (
        "spec.volumes[1].container_disk",
        "spec.volumes[2].cloud_init_no_cloud",
    )


def test_the_shorthand_goes_into_the_config_drive_if_that_is_the_seed() -> None:
    drive = {"name": "drive", "cloud_init_config_drive": {}}
    done = admit(request(drive) | {"user_data": "#!/bin/sh\n"}, uid(1))
    assert done.secrets is not None
    assert done.secrets.cloud_init["drive"].user_bytes == b"#!/bin/sh\n"


@pytest.mark.parametrize(
    ("volume", "path", "words"),
    [
        (
            {"cloud_init_no_cloud": {"user_data": "a", "user_data_base64": "YQ=="}},
            "cloud_init_no_cloud.user_data",
            "not both",
        ),
        (
            {"cloud_init_no_cloud": {"user_data_base64": "hunter2"}},
            "cloud_init_no_cloud.user_data_base64",
            "base64",
        ),
        (
            {"cloud_init_config_drive": {"network_data": "version: 2\n"}},
            "cloud_init_config_drive.network_data",
            "network_data.json",
        ),
        (
            {"cloud_init_no_cloud": {"vendor_data": "a", "vendor_data_base64": "YQ=="}},
            "cloud_init_no_cloud.vendor_data",
            "not both",
        ),
        (
            {"cloud_init_no_cloud": {"user_data_parts": [{"data": "hunter2"}]}},
            "cloud_init_no_cloud.user_data_parts[0]",
            "content_type",
        ),
        (
            {"cloud_init_no_cloud": {"user_data_parts": [{"content_type": "text/x"}]}},
            "cloud_init_no_cloud.user_data_parts[0]",
            "either data",
        ),
        (
            {
                "cloud_init_no_cloud": {
                    "user_data_parts": [{"data": "a", "content_type": "a\nb: c"}]
                }
            },
            "cloud_init_no_cloud.user_data_parts[0].content_type",
            "match",
        ),
        ({"files": {"data": {"../x": "hunter2"}}}, "files.data.../x", "match"),
        ({"files": {"data": {"..": "hunter2"}}}, "files.data...", "match"),
        ({"files": {"data": {"a" * 65: "hunter2"}}}, f"files.data.{'a' * 65}", "64"),
        ({"files": {"data": {"a": "x"}, "binary_data": {"a": "YQ=="}}}, "files", "both"),
        ({"files": {"binary_data": {"a": "?"}}}, "files.binary_data.a", "base64"),
        ({"files": {"volume_label": "a label"}}, "files.volume_label", "match"),
        ({"files": {"data": {f"f{n}": "" for n in range(129)}}}, "files.data", "128"),
    ],
)
def test_an_unwritable_value_is_refused_with_its_path(
    volume: dict[str, Any], path: str, words: str
) -> None:
    found = details(request({"name": "x"} | volume))
    assert list(found) == [f"spec.volumes[1].{path}"]
    assert words in found[f"spec.volumes[1].{path}"]


def test_network_data_is_checked_and_its_unknown_keys_are_warnings() -> None:
    text = "version: 2\nethernets: {eth0: {dhcp4: true, dhcp_6: true, mtu: hunter2}}\n"
    found = details(request({"name": "ci", "cloud_init_no_cloud": {"network_data": text}}))
    path = "spec.volumes[1].cloud_init_no_cloud.network_data"
    assert found == {path: "ethernets.eth0.mtu: must be a whole number"}
    text = text.replace("hunter2", "1400")
    done = admit(request({"name": "ci", "cloud_init_no_cloud": {"network_data": text}}), uid(1))
    (warning,) = done.warnings
    assert warning.path == path
    assert warning.message.startswith("ethernets.eth0.dhcp_6: ")
    assert admit(request(DRIVE), uid(1)).warnings == ()


def test_user_data_may_have_the_size_of_all_secret_inputs() -> None:
    large = "#!/bin/sh\n" + "x" * (MAX_BYTES - 4096)
    done = admit({"name": "web", "image": "tiny", "user_data": large}, uid(1))
    assert done.secrets is not None
    assert len(secret_bytes(done.secrets)) < SECRET.written_bytes
    assert done.secrets.cloud_init["cloudinit"].user_bytes == large.encode()
    parts = [{"data": "#!" + "x" * (MAX_BYTES // 4)}] * 5
    found = details(request({"name": "ci", "cloud_init_no_cloud": {"user_data_parts": parts}}))
    assert f"{MAX_BYTES} at most" in found["spec.volumes"]


def test_secret_inputs_above_the_bound_are_refused() -> None:
    half = {"data": {"a": "x" * (MAX_BYTES // 2)}}
    found = details(request({"name": "a", "files": half}, {"name": "b", "files": half}))
    assert json.dumps(found) == json.dumps(
        {
            "spec.volumes": "seeds, SSH keys, files and Ignition have "
            f"{MAX_BYTES + 2} bytes; {MAX_BYTES} at most"
        }
    )
