"""Environment, files and mounts reach the guest unchanged, with any content."""

import base64
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from virtbus.nodeagent.core.guest_files import cloud_config_lists, device_path, environment_file
from virtbus.nodeagent.core.seed import seed_files
from virtbus.schemas.filesystem import Filesystem
from virtbus.schemas.guest_files import GuestFile, GuestLink, GuestMount, HostAlias
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


def written(etc: Path, *aliases: HostAlias) -> list[str]:
    """Run a boot's command on the folder `etc`, and return the lines of its hosts."""
    (command,) = lists(CloudInit(host_aliases=aliases))["bootcmd"]
    script = [word.replace("/etc/", f"{etc}/") for word in command]
    subprocess.run(script, check=True, timeout=10)
    return (etc / "hosts").read_text().splitlines()


def test_host_aliases_are_in_the_hosts_and_its_template_once_after_any_boot(tmp_path: Path) -> None:
    templates = tmp_path / "cloud" / "templates"
    templates.mkdir(parents=True)
    (tmp_path / "hosts").write_text("127.0.0.1\tlocalhost\n")
    (templates / "hosts.debian.tmpl").write_text("## template:jinja\n127.0.1.1 {{fqdn}}\n")
    (templates / "hosts.debian.tmpl").chmod(0o640)
    first = HostAlias(ip="192.0.2.7", hostnames=("db.example", "db"))
    second = HostAlias(ip="fd00::7", hostnames=("six",))
    once = written(tmp_path, first)
    assert [line for line in once if line[:1] != "#"] == [
        "127.0.0.1\tlocalhost",
        "192.0.2.7\tdb.example\tdb",
    ]
    assert written(tmp_path, first) == once
    assert [line for line in written(tmp_path, second) if line[:1] != "#"] == [
        "127.0.0.1\tlocalhost",
        "fd00::7\tsix",
    ]
    template = (templates / "hosts.debian.tmpl").read_text()
    assert template.startswith("## template:jinja\n127.0.1.1 {{fqdn}}\n#")
    assert template.count("fd00::7\tsix\n") == 1
    assert (templates / "hosts.debian.tmpl").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["cloud", "hosts"]
    assert os.listdir(templates) == ["hosts.debian.tmpl"]


def test_a_guest_without_hosts_gets_them_and_one_whose_hosts_are_a_link_keeps_it(
    tmp_path: Path,
) -> None:
    alias = HostAlias(ip="192.0.2.7", hostnames=("db",))
    assert "192.0.2.7\tdb" in written(tmp_path, alias)
    (tmp_path / "hosts").rename(tmp_path / "other")
    (tmp_path / "hosts").symlink_to("other")
    other = HostAlias(ip="192.0.2.8", hostnames=("db",))
    assert "192.0.2.8\tdb" not in written(tmp_path, other)
    assert (tmp_path / "hosts").is_symlink()


def test_no_more_host_aliases_than_one_command_can_have() -> None:
    names = tuple(f"{'x' * 60}.{at}" for at in range(64))
    with pytest.raises(ValueError, match="65536 characters at most"):
        CloudInit(host_aliases=(HostAlias(ip="192.0.2.7", hostnames=names),) * 17)
    most = CloudInit(host_aliases=(HostAlias(ip="192.0.2.7", hostnames=names),) * 16)
    (command,) = lists(most)["bootcmd"]
    assert max(map(len, command)) < 128 * 1024, "MAX_ARG_STRLEN of Linux"
    assert most.without_secrets().host_aliases == ()
