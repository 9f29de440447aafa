"""Environment, files and mounts reach the guest unchanged, with any content."""

import base64
import subprocess
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from virtbus.nodeagent.core.guest_files import cloud_config_lists, device_path, environment_file
from virtbus.nodeagent.core.seed import seed_files
from virtbus.schemas.filesystem import Filesystem
from virtbus.schemas.guest_files import GuestFile, GuestLink, GuestMount
from virtbus.schemas.seed import CloudInit, CloudInitNoCloud
from virtbus.schemas.vm import Devices, Disk, DiskBus, Domain, VmRecord, VmSpec

HOSTILE = "a b'c\"d$HOME`id`\\$(id)!*#;&|"
values = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=30)


def lists(seed: CloudInit, *disks: Disk) -> dict[str, list[Any]]:
    return cloud_config_lists(seed, Devices(disks=disks))


def as_systemd_reads(line: str) -> str:
    """Return the value of a line by the rules of systemd.exec(5), EnvironmentFile=."""
    value = line.rstrip("\n").partition("=")[2]
    if not value.startswith('"'):
        return value
    out, rest = "", iter(value[1:-1])
    for char in rest:
        out += next(rest) if char == "\\" else char
    return out


@given(values)
def test_systemd_reads_the_environment_as_it_was_given(value: str) -> None:
    line = environment_file({"KEY": value})
    assert as_systemd_reads(line) == value
    assert line.count("\n") == 1


@settings(max_examples=5, deadline=None)
@given(values)
def test_a_shell_reads_the_environment_as_it_was_given(value: str) -> None:
    script = environment_file({"A": HOSTILE, "KEY": value}) + 'printf "%s\\n%s" "$A" "$KEY"'
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True, timeout=10)
    assert done.stdout.decode() == f"{HOSTILE}\n{value}"


def test_simple_values_are_as_virtlet_writes_them() -> None:
    assert environment_file({"A": "1", "B": "http://h:80/p,q", "C": ""}) == (
        "A=1\nB=http://h:80/p,q\nC=\n"
    )


def test_files_keep_their_bytes_mode_and_owner() -> None:
    seed = CloudInit(
        write_files=(
            GuestFile(path="/etc/a b", content="größe\n", mode="600"),
            GuestFile(path="/srv/k", content_base64="AP8=", owner="app:app"),
        ),
        environment={"KEY": "a b"},
    )
    first, second, env = lists(seed)["write_files"]
    assert first == {
        "path": "/etc/a b",
        "encoding": "b64",
        "content": base64.b64encode("größe\n".encode()).decode(),
        "permissions": "0600",
        "owner": "root:root",
    }
    assert (second["content"], second["owner"], second["defer"]) == ("AP8=", "app:app", True)
    assert env["path"] == "/etc/cloud/environment"
    assert base64.b64decode(env["content"]) == b'KEY="a b"\n'


def test_every_disk_has_a_path_in_its_guest() -> None:
    without_drives = {DiskBus.USB, DiskBus.NVME}
    for bus in DiskBus:
        for device in ("disk",) if bus in without_drives else ("disk", "cdrom"):
            disk = Disk.model_validate({"name": "a", "bus": bus, "device": device, "serial": "S1"})
            assert "S1" in device_path(disk)
    assert device_path(Disk(name="a", serial="S1")) == "/dev/disk/by-id/virtio-S1"


def test_a_mount_names_its_volume_by_a_path_that_does_not_depend_on_order() -> None:
    seed = CloudInit(
        mounts=(
            GuestMount(volume="data", path="/data"),
            GuestMount(volume="old", path="/old", filesystem="xfs", options="ro", partition=2),
            GuestMount(volume="gone", path="/gone"),
        )
    )
    disks = (Disk(name="data", serial="data"), Disk(name="old", bus=DiskBus.SATA, serial="old-1"))
    assert lists(seed, *disks)["mounts"] == [
        ["/dev/disk/by-id/virtio-data", "/data", "auto", "defaults,nofail", "0", "0"],
        ["/dev/disk/by-id/ata-QEMU_HARDDISK_old-1.2", "/old", "xfs", "ro", "0", "0"],
    ]


def test_an_empty_disk_gets_its_file_system_once_and_a_disk_its_names() -> None:
    mounts = [
        GuestMount(volume="tmp", path=path, filesystem="ext4", make_filesystem=True)
        for path in ("/a", "/b")
    ]
    links = (GuestLink(volume="tmp", path="/dev/x/y"), GuestLink(volume="gone", path="/dev/z"))
    found = lists(CloudInit(mounts=tuple(mounts), links=links), Disk(name="tmp"))
    device = "/dev/disk/by-id/virtio-tmp"
    assert found == {
        "fs_setup": [{"device": device, "filesystem": "ext4", "partition": "any"}],
        "mounts": [[device, path, "ext4", "defaults,nofail", "0", "0"] for path in ("/a", "/b")],
        "bootcmd": [["mkdir", "-p", "/dev/x"], ["ln", "-sfn", device, "/dev/x/y"]],
    }


@pytest.mark.parametrize("user_data", ["#!/bin/sh\n", "#cloud-config\nwrite_files: [{path: /a}]\n"])
def test_a_seed_has_the_files_next_to_any_user_data(user_data: str) -> None:
    seed = CloudInitNoCloud(user_data=user_data, environment={"A": "1"})
    devices = Devices(disks=(Disk(name="data", serial="data"),))
    record = VmRecord(
        uid="0192f0c1-2d3e-7abc-8def-0123456789ab",
        namespace="default",
        name="web",
        spec=VmSpec(domain=Domain(devices=devices)),
        spec_hash="0" * 64,
        node="n1",
        created_ns=1,
    )
    made = seed_files(record, seed, ())
    if user_data.startswith("#!"):
        assert made["user-data"] == user_data.encode()
        written = yaml.safe_load(made["vendor-data"])["write_files"]
        assert [one["path"] for one in written] == ["/etc/cloud/environment"]
    else:
        written = yaml.safe_load(made["user-data"])["write_files"]
        assert [one["path"] for one in written] == ["/a", "/etc/cloud/environment"]


def test_a_directory_is_mounted_by_its_tag_and_a_failure_is_on_the_console() -> None:
    seed = CloudInit(mounts=(GuestMount(volume="www", path="/srv/www", options="ro,nofail"),))
    devices = Devices(filesystems=(Filesystem(name="www", directory="/srv/host"),))
    found = cloud_config_lists(seed, devices)
    assert set(found) == {"bootcmd"}, "cloud-init ignores mounts of tags"
    ((*_, path, tag, options, text),) = found["bootcmd"]
    assert (path, tag, options) == ("/srv/www", "www", "ro")
    assert "the kernel module virtiofs" in text
