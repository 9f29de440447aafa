"""NoCloud seeds: a user's text is kept, ours is added, and nothing is spliced into text."""

import base64
import email
import gzip
import io
import json
import stat
from email.message import Message
from pathlib import Path
from typing import Any

import pycdlib
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from virtbus.nodeagent.core.config_drive import config_drive_files
from virtbus.nodeagent.core.seed import seed_files
from virtbus.nodeagent.core.user_data import MAX_VALUES
from virtbus.nodeagent.edge.seed_iso import KEPT_BYTES, NO_CLOUD, SeedIsos, iso
from virtbus.schemas.dns import DnsConfig
from virtbus.schemas.ignition import Ignition
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.network_config import check_network_config
from virtbus.schemas.seed import (
    CloudInitConfigDrive,
    CloudInitNoCloud,
    FilesVolume,
    SysprepVolume,
)
from virtbus.schemas.vm import (
    Domain,
    VmRecord,
    VmSecrets,
    VmSpec,
    Volume,
)

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE1 root@example"


def record(seed: CloudInitNoCloud) -> VmRecord:
    return VmRecord(
        uid=UID,
        namespace="default",
        name="web",
        spec=VmSpec(domain=Domain(), volumes=(Volume(name="ci", cloud_init_no_cloud=seed),)),
        spec_hash="0" * 64,
        node="n1",
        created_ns=1,
    )


def merge_bomb(levels: int) -> str:
    lines = (f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, levels))
    return "a0: &a0 {k: v}\n" + "".join(lines)


def files(seed: CloudInitNoCloud, *interfaces: InterfaceStatus) -> dict[str, bytes]:
    return seed_files(record(seed), seed, interfaces)


def user_data(data: bytes, hostname: str, ssh_keys: tuple[str, ...]) -> bytes:
    """Return the user data of a NoCloud seed with these values."""
    encoded = base64.b64encode(data).decode()
    seed = CloudInitNoCloud(user_data_base64=encoded, hostname=hostname, ssh_keys=ssh_keys)
    return files(seed)["user-data"]


def parts(data: bytes) -> list[Message]:
    return [p for p in email.message_from_bytes(data).walk() if not p.is_multipart()]


def test_meta_data_names_the_instance_by_its_uid() -> None:
    meta = yaml.safe_load(files(CloudInitNoCloud(ssh_keys=(KEY,)))["meta-data"])
    assert meta == {"instance-id": UID, "local-hostname": "web", "public-keys": [KEY]}


def test_further_meta_data_is_the_guests_but_for_the_platforms_keys() -> None:
    given = '{"colour": "blue", "instance-id": "mine", "more": {"a": [1]}}'
    meta = yaml.safe_load(files(CloudInitNoCloud(meta_data=given))["meta-data"])
    assert meta == {
        "colour": "blue",
        "more": {"a": [1]},
        "instance-id": UID,
        "local-hostname": "web",
    }


@pytest.mark.parametrize(
    "text", ["", "[]", "1", "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 30_000, "{" + " " * 32_768]
)
def test_meta_data_that_are_no_json_object_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="meta_data"):
        CloudInitNoCloud(meta_data=text)


def test_a_name_with_a_domain_is_that_of_cloud_init() -> None:
    made = files(CloudInitNoCloud(hostname="web", fqdn="web.shop.example"))
    assert yaml.safe_load(made["meta-data"])["local-hostname"] == "web.shop.example"
    config = yaml.safe_load(made["user-data"])
    assert (config["hostname"], config["fqdn"]) == ("web", "web.shop.example")
    assert config["bootcmd"][0][4] == "127.0.1.1\tweb.shop.example\tweb"


def test_network_config_matches_each_mac_and_enables_dhcp() -> None:
    made = files(CloudInitNoCloud(), InterfaceStatus(name="a", mac="02:00:00:00:00:01"))
    assert yaml.safe_load(made["network-config"]) == {
        "version": 2,
        "ethernets": {"vb0": {"match": {"macaddress": "02:00:00:00:00:01"}, "dhcp4": True}},
    }


@pytest.mark.parametrize("servers", [(), ("10.96.0.10", "fd00:96::a")])
def test_network_config_has_the_dns_of_the_vm_if_there_is_a_server(
    servers: tuple[str, ...],
) -> None:
    seed, nic = CloudInitNoCloud(), InterfaceStatus(name="a", mac="02:00:00:00:00:01")
    dns = DnsConfig(nameservers=servers, searches=("svc.cluster.local",))
    whole = record(seed)
    spec = whole.spec.model_copy(update={"dns_config": dns})
    made = seed_files(whole.model_copy(update={"spec": spec}), seed, (nic,))
    nic_config = yaml.safe_load(made["network-config"])["ethernets"]["vb0"]
    named = {"addresses": list(servers), "search": ["svc.cluster.local"]}
    assert nic_config.get("nameservers") == (named if servers else None)
    assert not check_network_config(made["network-config"]).problems


def test_the_users_network_data_is_passed_on_as_it_is() -> None:
    text = "version: 1  # theirs\nconfig: []\n"
    assert files(CloudInitNoCloud(network_data=text))["network-config"] == text.encode()


def test_a_users_cloud_config_wins_and_keeps_all_its_keys() -> None:
    text = "#cloud-config\nhostname: mine\nruncmd: [[ls, -l]]\nssh_authorized_keys: [k2]\n"
    made = user_data(text.encode(), "web", (KEY,))
    assert made.startswith(b"#cloud-config\n")
    assert yaml.safe_load(made) == {
        "hostname": "mine",
        "runcmd": [["ls", "-l"]],
        "ssh_authorized_keys": [KEY, "k2"],
    }


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("#include http://169.254.169.254/x\n", "text/x-include-url"),
        ("#cloud-config-archive\n- type: text/plain\n", "text/cloud-config-archive"),
        ("## template: jinja\n#cloud-config\nhostname: {{ v1.region }}\n", "text/jinja2"),
        ("something else --==\nContent-Type: no\n", "text/plain"),
    ],
)
def test_user_data_of_another_kind_is_added_unchanged(text: str, kind: str) -> None:
    assert user_data(text.encode(), "web", ()) == text.encode()
    theirs, ours = parts(user_data(text.encode(), "web", (KEY,)))
    assert ours.get_content_type() == "text/cloud-config"
    assert theirs.get_content_type() == kind
    payload = theirs.get_payload(decode=True)
    assert payload == text.encode()


def test_a_script_stays_a_script_and_the_platforms_part_is_vendor_data() -> None:
    script = "#!/bin/sh\necho '$(id)'\n"
    made = files(CloudInitNoCloud(user_data=script, ssh_keys=(KEY,)))
    assert made["user-data"] == script.encode()
    assert "vendor-data" not in made
    assert yaml.safe_load(made["meta-data"])["public-keys"] == [KEY]
    vendor = "#cloud-config\ndisable_root: false\nwrite_files: [{path: /a}]\n"
    seed = CloudInitNoCloud(user_data=script, vendor_data=vendor, environment={"A": "1"})
    made = files(seed)
    assert made["user-data"] == script.encode()
    theirs = yaml.safe_load(made["vendor-data"])
    assert theirs["disable_root"] is False
    assert [one["path"] for one in theirs["write_files"]] == ["/a", "/etc/cloud/environment"]
    own = CloudInitConfigDrive(user_data=script, vendor_data=script, environment={"A": "1"})
    drawn = config_drive_files(drive(own), own, ())
    assert drawn["openstack/latest/user_data"] == script.encode()
    vendor = json.loads(drawn["openstack/latest/vendor_data.json"])["cloud-init"]
    kinds = [one.get_content_type() for one in parts(vendor.encode())]
    assert kinds == ["text/x-shellscript", "text/cloud-config"]


def test_a_users_mime_message_is_unpacked_with_ours() -> None:
    text = (
        'Content-Type: multipart/mixed; boundary="b"\nMIME-Version: 1.0\n\n'
        "--b\nContent-Type: text/x-shellscript\n\n#!/bin/sh\n--b--\n"
    )
    kinds = [p.get_content_type() for p in parts(user_data(text.encode(), "web", (KEY,)))]
    assert kinds == ["text/x-shellscript", "text/cloud-config"]


@pytest.mark.parametrize(
    "text",
    [
        "#cloud-config\n" + "[" * 60_000,
        "#cloud-config\n- a\n- list\n",
        "#cloud-config\na: 2001-99-99\n",
        "#cloud-config\n? {a: b}\n: c\n",
        "#cloud-config\na: !!python/object/apply:os.system [id]\n",
        "#cloud-config\n\ta: b: c\n",
        "#cloud-config\n" + merge_bomb(20),
        "#cloud-config\n" + merge_bomb(1500),
        "#cloud-config\na: &a {<<: *a}\n",
        f"#cloud-config\nwords: [{'a,' * MAX_VALUES}]\n",
    ],
)
def test_an_invalid_cloud_config_reaches_the_guest_unchanged(text: str) -> None:
    assert user_data(text.encode(), "web", (KEY,)) == text.encode()


def test_anchors_and_merge_keys_of_a_cloud_config_are_read() -> None:
    text = (
        "#cloud-config\nx-base: &base {shell: /bin/sh}\n"
        "users: [{<<: *base, name: a}, {<<: *base, name: b}]\n"
    )
    made = yaml.safe_load(user_data(text.encode(), "web", (KEY,)))
    assert [user["shell"] for user in made["users"]] == ["/bin/sh"] * 2
    assert made["ssh_authorized_keys"] == [KEY]


def test_a_mail_of_a_thousand_levels_becomes_a_part_unchanged() -> None:
    levels = "".join(
        f'Content-Type: multipart/mixed; boundary="b{n}"\n\n--b{n}\n' for n in range(1000)
    )
    made = user_data(levels.encode(), "web", (KEY,))
    assert levels.encode() in made
    ours = parts(b"MIME-Version: 1.0\n" + made[made.rindex(b"Content-Type: text/cloud-config") :])
    assert ours[0].get_content_type() == "text/cloud-config"


def test_aliases_stay_aliases_so_that_a_bomb_stays_small() -> None:
    text = "#cloud-config\na0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)
    )
    assert len(user_data(text.encode(), "web", ())) < 2 * len(text)


plain: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(min_size=1, max_size=12), plain, max_size=6))
def test_any_mapping_comes_back_as_it_was(value: dict[str, Any]) -> None:
    text = "#cloud-config\n" + yaml.safe_dump(value)
    back = yaml.safe_load(user_data(text.encode(), "web", ()))
    assert back == {"hostname": "web"} | value


@given(st.text(st.characters(exclude_characters="\r\n\0", codec="utf-8"), min_size=16))
def test_an_ssh_key_is_never_more_than_one_value(key: str) -> None:
    made = seed_files(record(CloudInitNoCloud()), CloudInitNoCloud(ssh_keys=(key,)), ())
    assert yaml.safe_load(made["meta-data"])["public-keys"] == [key]
    assert yaml.safe_load(made["user-data"])["ssh_authorized_keys"] == [key]


def test_the_iso_bears_the_label_and_plain_names_in_both_extensions() -> None:
    contents = {"meta-data": b"m", "user-data": b"", "network-config": b"n" * 5000}
    image = pycdlib.PyCdlib()
    image.open_fp(io.BytesIO(iso(contents, NO_CLOUD)))
    assert image.pvd.volume_identifier.rstrip() == b"cidata"
    for name, data in contents.items():
        for where in ({"rr_path": f"/{name}"}, {"joliet_path": f"/{name}"}):
            out = io.BytesIO()
            image.get_file_from_iso_fp(out, **where)
            assert out.getvalue() == data
    image.close()


@pytest.mark.parametrize("filler", [b"", b"x" * KEPT_BYTES])
def test_an_iso_has_its_own_contents_after_another_one_of_the_same_sizes(filler: bytes) -> None:
    for letter in (b"a", b"b"):
        contents = {"meta-data": letter * 3000, "openstack/content": letter, "filler": filler}
        assert read_iso(iso(contents, NO_CLOUD))[1] == contents


async def test_a_seed_is_written_for_root_only_with_the_secrets_in_it(tmp_path: Path) -> None:
    made = record(CloudInitNoCloud(hostname="web"))
    secret = CloudInitNoCloud(user_data="#!/bin/sh\nCANARY\n")
    seeds = SeedIsos(tmp_path)
    for _ in range(2):
        await seeds.write(made, VmSecrets(uid=UID, cloud_init={"ci": secret}), ())
    path = seeds.paths(made)["ci"]
    assert [path] == list((tmp_path / UID).iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"CANARY" in path.read_bytes()


async def test_another_network_changes_the_network_config_and_not_the_instance(
    tmp_path: Path,
) -> None:
    made, seeds = record(CloudInitNoCloud()), SeedIsos(tmp_path)
    found = []
    for mac in ("02:00:00:00:00:01", "02:00:00:00:00:02"):
        await seeds.write(made, None, (InterfaceStatus(name="a", mac=mac),))
        found.append(read_iso(seeds.paths(made)["ci"].read_bytes())[1])
        assert mac.encode() in found[-1]["network-config"]
    before, after = found
    assert before["meta-data"] == after["meta-data"]
    assert before["user-data"] == after["user-data"]


async def test_ignitions_configuration_is_a_file_for_root_only(tmp_path: Path) -> None:
    text = '{"ignition": {"version": "3.4.0"}, "x": "CANARY"}'
    seeds = SeedIsos(tmp_path)
    made = record(CloudInitNoCloud())
    assert seeds.ignition_path(made) is None
    spec = VmSpec(ignition=Ignition())
    made = made.model_copy(update={"spec": spec})
    assert not seeds.stand(made)
    await seeds.write(made, VmSecrets(uid=UID, ignition=Ignition(config=text)), ())
    assert seeds.stand(made)
    path = seeds.ignition_path(made)
    assert path is not None
    assert [path] == list((tmp_path / UID).iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == text


def test_user_data_that_is_no_text_is_passed_unchanged() -> None:
    packed = gzip.compress(b"#cloud-config\n")
    assert user_data(packed, "web", (KEY,)) == packed


def test_a_config_drive_has_openstacks_layout_and_leaves_the_users_data_alone() -> None:
    seed = CloudInitConfigDrive(user_data="#!/bin/sh\n", ssh_keys=(KEY,))
    nic = InterfaceStatus(name="a", mac="02:00:00:00:00:01")
    made = config_drive_files(drive(seed), seed, (nic,))
    assert json.loads(made["openstack/latest/meta_data.json"]) == {
        "uuid": UID,
        "name": "web",
        "hostname": "web",
        "public_keys": {"key-0": KEY},
    }
    assert json.loads(made["openstack/latest/network_data.json"]) == {
        "links": [{"id": "vb0", "type": "phy", "ethernet_mac_address": nic.mac}],
        "networks": [{"id": "vb0", "type": "ipv4_dhcp", "link": "vb0"}],
        "services": [],
    }
    assert made["openstack/latest/user_data"] == b"#!/bin/sh\n"
    own = CloudInitConfigDrive(network_data_base64="e30=")
    made = config_drive_files(drive(own), own, (nic,))
    assert made["openstack/latest/network_data.json"] == b"{}"
    assert "openstack/latest/user_data" not in made


def test_vendor_data_is_a_file_of_its_own_in_both_kinds_of_seed() -> None:
    text = "#cloud-config\npackages: [vim]\n"
    assert files(CloudInitNoCloud(vendor_data=text))["vendor-data"] == text.encode()
    assert "vendor-data" not in files(CloudInitNoCloud())
    own = CloudInitConfigDrive(vendor_data=text)
    made = config_drive_files(drive(own), own, ())["openstack/latest/vendor_data.json"]
    assert json.loads(made) == {"cloud-init": text}
    packed = gzip.compress(text.encode())
    own = CloudInitConfigDrive(vendor_data_base64=base64.b64encode(packed).decode())
    made = config_drive_files(drive(own), own, ())["openstack/latest/vendor_data.json"]
    (part,) = parts(json.loads(made)["cloud-init"].encode())
    assert part.get_content_type() == "application/gzip"
    assert part.get_payload(decode=True) == packed


def drive(seed: CloudInitConfigDrive) -> VmRecord:
    volume = Volume(name="ci", cloud_init_config_drive=seed)
    spec = VmSpec(domain=Domain(), volumes=(volume,))
    return record(CloudInitNoCloud()).model_copy(update={"spec": spec})


async def test_config_drives_and_files_are_isos_with_their_labels_and_folders(
    tmp_path: Path,
) -> None:
    seeds, seed = SeedIsos(tmp_path), CloudInitConfigDrive(user_data="CANARY")
    shown = FilesVolume(volume_label="app")
    volumes = (
        Volume(name="ci", cloud_init_config_drive=seed.without_secrets()),
        Volume(name="app", files=shown),
    )
    made = drive(seed).model_copy(update={"spec": VmSpec(volumes=volumes)})
    files = FilesVolume(
        volume_label="app", data={".x": "größe", "n" * 64: ""}, binary_data={"k": "AP8="}
    )
    secrets = VmSecrets(uid=UID, cloud_init={"ci": seed}, files={"app": files})
    await seeds.write(made, secrets, ())
    found = {name: read_iso(path.read_bytes()) for name, path in seeds.paths(made).items()}
    assert found["app"] == ("app", {".x": "größe".encode(), "n" * 64: b"", "k": b"\0\xff"})
    label, tree = found["ci"]
    assert label == "config-2"
    assert tree["openstack/latest/user_data"] == b"CANARY"
    assert json.loads(tree["openstack/latest/meta_data.json"])["uuid"] == UID


async def test_windows_finds_its_answers_by_label_and_name(tmp_path: Path) -> None:
    seeds, answers = SeedIsos(tmp_path), SysprepVolume(data={"autounattend.xml": "<a/>"})
    volume = Volume(name="win", sysprep=answers.without_secrets())
    made = drive(CloudInitConfigDrive()).model_copy(update={"spec": VmSpec(volumes=(volume,))})
    held = VmSecrets.model_validate({"uid": UID, "files": {"win": answers.model_dump()}})
    await seeds.write(made, held, ())
    found = read_iso(seeds.paths(made)["win"].read_bytes())
    assert found == ("unattendCD", {"autounattend.xml": b"<a/>"})


def read_iso(data: bytes) -> tuple[str, dict[str, bytes]]:
    """Return the label, and contents by path, as given by both of the ISO's name trees."""
    image = pycdlib.PyCdlib()
    image.open_fp(io.BytesIO(data))
    trees: list[dict[str, bytes]] = []
    for kind in ("rr_path", "joliet_path"):
        tree = {}
        for folder, _, names in image.walk(**{kind: "/"}):
            for name in names:
                path, out = f"{folder.rstrip('/')}/{name}", io.BytesIO()
                image.get_file_from_iso_fp(out, **{kind: path})
                tree[path.lstrip("/")] = out.getvalue()
        trees.append(tree)
    label = image.pvd.volume_identifier.decode().rstrip()
    image.close()
    assert trees[0] == trees[1]
    return label, trees[0]
