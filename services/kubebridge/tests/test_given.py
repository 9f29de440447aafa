"""Secrets and ConfigMaps become seeds, files, logins and keys, and their errors are reported."""

import base64
import json
from typing import Any

import pytest
from services.kubebridge.tests.manifests import put, vmi

from virtbus.kubebridge.core.objects.status_errors import Cause, Reason
from virtbus.kubebridge.core.translation.contents import needs
from virtbus.kubebridge.core.translation.mapping import translate
from virtbus.kubebridge.core.validation.rules import vmi_causes
from virtbus.schemas.vm import VmSpec

Json = dict[str, Any]
BINARY = b"\xff\x00"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5 me"


def secret(**data: str | bytes) -> Json:
    """Return a Secret as an API server returns it."""
    whole = {key: one.encode() if isinstance(one, str) else one for key, one in data.items()}
    return {"data": {key: base64.b64encode(one).decode() for key, one in whole.items()}}


def spec(whole: Json, given: dict[tuple[str, str], Json]) -> VmSpec:
    assert vmi_causes(whole) == []
    create, causes, _ = translate(whole, given, "c1")
    assert causes == ()
    assert create is not None
    assert create.spec is not None
    return create.spec


def causes(whole: Json, given: dict[tuple[str, str], Json]) -> tuple[Cause, ...]:
    translated = translate(whole, given, "c1")
    assert translated.create is None
    return translated.causes


def credential(name: str, way: str) -> Json:
    source = {"secret": {"secretName": name}}
    return {"sshPublicKey": {"source": source, "propagationMethod": {way: {}}}}


def volume(**source: Any) -> Json:
    """Return the smoke VMI with one more volume, at index 3."""
    return vmi({"volumes.3": {"name": "more", **source}})


def seeded(kind: str, **seed: Any) -> Json:
    """Return the smoke VMI with another seed."""
    return vmi({"volumes.2": {"name": "cloudinitdisk", kind: seed}})


BOTH = ("cloudInitNoCloud", "cloudInitConfigDrive")
OURS = {
    "cloudInitNoCloud": "cloud_init_no_cloud",
    "cloudInitConfigDrive": "cloud_init_config_drive",
}
NETWORK = {"cloudInitNoCloud": "version: 2", "cloudInitConfigDrive": '{"links": []}'}
WAY = {"cloudInitNoCloud": "noCloud", "cloudInitConfigDrive": "configDrive"}


def test_the_references_of_a_vmi_have_their_fields() -> None:
    whole = seeded(
        "cloudInitNoCloud", secretRef={"name": "user"}, networkDataSecretRef={"name": "net"}
    )
    whole["spec"]["volumes"] += [
        {"name": "map", "configMap": {"name": "app", "optional": True}},
        {"name": "win", "sysprep": {"secret": {"name": "win"}}},
    ]
    whole["spec"]["accessCredentials"] = [credential("keys", "noCloud")]
    whole["spec"]["volumes"][0]["containerDisk"]["imagePullSecret"] = "login"
    assert [(one.kind, one.name, one.field, one.optional) for one in needs(whole["spec"])] == [
        ("Secret", "login", "spec.volumes[0].containerDisk.imagePullSecret", False),
        ("Secret", "user", "spec.volumes[2].cloudInitNoCloud.secretRef.name", False),
        ("Secret", "net", "spec.volumes[2].cloudInitNoCloud.networkDataSecretRef.name", False),
        ("ConfigMap", "app", "spec.volumes[3].configMap.name", True),
        ("Secret", "win", "spec.volumes[4].sysprep.secret.name", False),
        ("Secret", "keys", "spec.accessCredentials[0].sshPublicKey.source.secret.secretName",
         False),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", BOTH)
def test_secrets_become_either_kind_of_seed(kind: str) -> None:
    whole = seeded(kind, secretRef={"name": "user"}, networkDataSecretRef={"name": "net"})
    whole["spec"]["accessCredentials"] = [credential("keys", WAY[kind])]
    given = {
        ("Secret", "user"): secret(userdata="#!/bin/sh", networkdata="not this"),
        ("Secret", "net"): secret(networkData=NETWORK[kind]),
        ("Secret", "keys"): secret(a=f"{KEY}\n\n{KEY}2\n"),
    }
    seed = getattr(spec(whole, given).volumes[2], OURS[kind])
    assert (seed.user_data, seed.network_data) == ("#!/bin/sh", NETWORK[kind])
    assert seed.ssh_keys == (KEY, f"{KEY}2")
    assert seed.hostname == "smoke"


@pytest.mark.parametrize("kind", BOTH)
def test_inline_data_becomes_either_kind_of_seed(kind: str) -> None:
    network = base64.b64encode(NETWORK[kind].encode()).decode()
    whole = seeded(kind, userData="#!/bin/sh", networkDataBase64=network)
    made = spec(whole, {})
    seed = getattr(made.volumes[2], OURS[kind])
    assert (seed.user_bytes, seed.network_bytes) == (b"#!/bin/sh", NETWORK[kind].encode())
    assert len(made.volumes) == 3


@pytest.mark.parametrize("kind", BOTH)
def test_user_data_need_not_be_text(kind: str) -> None:
    by_secret = spec(
        seeded(kind, secretRef={"name": "s"}), {("Secret", "s"): secret(userData=BINARY)}
    )
    inline = spec(seeded(kind, userDataBase64=base64.b64encode(BINARY).decode()), {})
    for made in (by_secret, inline):
        assert getattr(made.volumes[2], OURS[kind]).user_bytes == BINARY


def test_keys_go_into_the_kind_of_seed_that_they_name() -> None:
    whole = volume(cloudInitConfigDrive={"userData": "a"})
    whole["spec"]["accessCredentials"] = [
        credential("one", "noCloud"), credential("two", "configDrive"),
    ]  # fmt: skip
    given = {("Secret", "one"): secret(a=KEY), ("Secret", "two"): secret(a=f"{KEY}2")}
    volumes = spec(whole, given).volumes
    assert volumes[2].cloud_init is not None
    assert volumes[3].cloud_init is not None
    assert [volumes[i].cloud_init.ssh_keys for i in (2, 3)] == [(KEY,), (f"{KEY}2",)]  # type: ignore[union-attr]


def test_a_config_map_becomes_files_on_a_disk() -> None:
    given = {
        ("ConfigMap", "app"): {
            "data": {"app.conf": "a = b\n"},
            "binaryData": {"key.der": base64.b64encode(BINARY).decode()},
        }
    }
    made = spec(volume(configMap={"name": "app", "volumeLabel": "app"}), given)
    files = made.volumes[3].files
    assert files is not None
    assert (files.contents, files.volume_label) == (
        {"app.conf": b"a = b\n", "key.der": BINARY}, "app",
    )  # fmt: skip
    assert made.domain.devices.disks[3].name == "more"


def test_a_secret_becomes_files_on_a_disk() -> None:
    data: dict[str, str | bytes] = {"tls.key": "text", "tls.der": BINARY}
    given = {("Secret", "app"): secret(**data)}
    files = spec(volume(secret={"secretName": "app"}), given).volumes[3].files
    assert files is not None
    assert files.contents == {"tls.key": b"text", "tls.der": BINARY}
    assert (files.volume_label, files.data) == ("cfgdata", {"tls.key": "text"})


@pytest.mark.parametrize(
    "source",
    [
        {"configMap": {"name": "app", "optional": True}},
        {"secret": {"secretName": "app", "optional": True}},
    ],
)
def test_the_disk_of_a_missing_optional_object_is_empty(source: Json) -> None:
    files = spec(volume(**source), {}).volumes[3].files
    assert files is not None
    assert files.contents == {}


def test_a_sysprep_volume_has_the_label_that_windows_expects() -> None:
    given = {("ConfigMap", "win"): {"data": {"Autounattend.xml": "<a/>"}}}
    files = spec(volume(sysprep={"configMap": {"name": "win"}}), given).volumes[3].files
    assert files is not None
    assert (files.volume_label, files.data) == ("unattendCD", {"Autounattend.xml": "<a/>"})


LOGIN = {"auths": {"docker.io": {"auth": base64.b64encode(b"me:secret").decode()}}}


def test_a_pull_secret_becomes_the_login_of_its_disk() -> None:
    whole = vmi({"volumes.0.containerDisk.imagePullSecret": "login"})
    given = {("Secret", "login"): secret(**{".dockerconfigjson": json.dumps(LOGIN)})}
    disk = spec(whole, given).volumes[0].container_disk
    assert disk is not None
    assert json.loads(disk.image_pull_secret or "") == LOGIN


WAITING = [
    (seeded("cloudInitNoCloud", secretRef={"name": "s"}),
     "spec.volumes[2].cloudInitNoCloud.secretRef.name"),
    (seeded("cloudInitConfigDrive", networkDataSecretRef={"name": "s"}),
     "spec.volumes[2].cloudInitConfigDrive.networkDataSecretRef.name"),
    (vmi({"volumes.0.containerDisk.imagePullSecret": "s"}),
     "spec.volumes[0].containerDisk.imagePullSecret"),
    (volume(sysprep={"secret": {"name": "s"}}), "spec.volumes[3].sysprep.secret.name"),
]  # fmt: skip


@pytest.mark.parametrize(("whole", "field"), WAITING, ids=[field for _, field in WAITING])
def test_a_vmi_waits_for_a_missing_secret_or_key(whole: Json, field: str) -> None:
    assert vmi_causes(whole) == []
    for given in ({}, {("Secret", "s"): secret(other="x")}):
        translated = translate(whole, given, "c1")
        assert [(one.field, one.reason) for one in translated.causes] == [(field, Reason.NOT_FOUND)]


def test_a_vmi_waits_for_a_missing_config_map() -> None:
    translated = translate(volume(configMap={"name": "app"}), {}, "c1")
    assert [one.reason for one in translated.causes] == [Reason.NOT_FOUND]
    assert [one.field for one in translated.causes] == ["spec.volumes[3].configMap.name"]
    assert "ConfigMap app does not exist" in translated.causes[0].message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a" * 65: "x"}, "is not a valid file name"),
        ({"a/b": "x"}, "is not a valid file name"),
        ({f"k{number}": "x" for number in range(129)}, "129 keys"),
    ],
)
def test_an_unusable_config_map_is_reported_at_its_reference(data: Json, message: str) -> None:
    (cause,) = causes(volume(configMap={"name": "app"}), {("ConfigMap", "app"): {"data": data}})
    assert cause.field == "spec.volumes[3].configMap.name"
    assert message in cause.message


def test_contents_that_are_too_large_are_reported() -> None:
    whole = volume(configMap={"name": "app"})
    whole["spec"]["volumes"].append({"name": "other", "secret": {"secretName": "app"}})
    half = {("ConfigMap", "app"): {"data": {"a": "x" * 262_000}},
            ("Secret", "app"): secret(b="x" * 262_000)}  # fmt: skip
    assert translate(whole, half, "c1").create is not None
    more = half | {("Secret", "app"): secret(b="x" * 263_000)}
    (cause,) = causes(whole, more)
    assert cause.field == "spec.volumes"
    assert "at most 524288" in cause.message


@pytest.mark.parametrize("label", ["a" * 17, "no spaces"])
def test_an_invalid_volume_label_is_refused_with_the_next_step(label: str) -> None:
    found = vmi_causes(volume(configMap={"name": "app", "volumeLabel": label}))
    assert [one.field for one in found] == ["spec.volumes[3].configMap.volumeLabel"]
    assert "1-16 characters" in found[0].message


def test_a_config_drive_takes_openstacks_network_data() -> None:
    (cause,) = vmi_causes(seeded("cloudInitConfigDrive", networkData="version: 2"))
    assert cause.field.startswith("spec.volumes[2].cloudInitConfigDrive")
    assert "network_data.json" in cause.message


def test_a_login_for_another_registry_is_reported_without_its_content() -> None:
    whole = vmi({"volumes.0.containerDisk.imagePullSecret": "login"})
    other = json.dumps({"auths": {"quay.io": {"auth": "bWU6aHVudGVyMg=="}}})
    for text in (other, "hunter2"):
        given = {("Secret", "login"): secret(**{".dockerconfigjson": text})}
        (cause,) = causes(whole, given)
        assert cause.field == "spec.volumes[0].containerDisk.imagePullSecret"
        assert "hunter2" not in cause.message
        assert "bWU6aHVudGVyMg" not in cause.message


def test_binary_keys_are_reported_at_their_reference() -> None:
    whole = put(vmi(), {"spec.accessCredentials": [credential("keys", "noCloud")]})
    (cause,) = causes(whole, {("Secret", "keys"): secret(a=BINARY)})
    assert cause.field == "spec.accessCredentials[0].sshPublicKey.source.secret.secretName"
