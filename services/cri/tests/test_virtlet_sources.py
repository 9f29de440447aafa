"""Virtlet's annotations that name a ConfigMap or a Secret of the pod's namespace."""

import base64
from collections.abc import Mapping
from pathlib import Path

import pytest
from grpc import StatusCode
from services.cri.tests.api_server import ApiServer
from services.cri.tests.world import Fleet, Kubelet, sandbox

from virtbus.cri.core.virtlet import Wishes, wishes
from virtbus.cri.core.virtlet_sources import values
from virtbus.schemas.seed import CloudInitNoCloud

DATA, KEYS, FILES = (
    "VirtletCloudInitUserDataSource",
    "VirtletSSHKeySource",
    "VirtletFilesFromDataSource",
)
KEY, ENCODING = "VirtletCloudInitUserDataSourceKey", "VirtletCloudInitUserDataSourceEncoding"
INLINE, OVERWRITE = "VirtletCloudInitUserData", "VirtletCloudInitUserDataOverwrite"
HOME = "/api/v1/namespaces/default"
FIRST, SECOND = "ssh-rsa AAAAB3NzaC1yc2E first", "ssh-rsa AAAAB3NzaC1yc2E second"
SCRIPT = "#!/bin/sh\necho one: two\n  echo three\n"


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def read(notes: Mapping[str, str], **contents: Mapping[str, str]) -> Wishes:
    """Return the wishes; `contents` are texts by the name of the object."""
    named = {
        note: {key: text.encode() for key, text in contents[notes[note].split("/")[1]].items()}
        for note in (DATA, KEYS, FILES)
        if note in notes
    }
    found, problems = wishes(notes, named)
    assert problems == []
    return found


@pytest.mark.parametrize(
    ("notes", "user_data"),
    [
        ({DATA: "configmap/d"}, '{"users": [1], "a": {"b": 1}}'),
        ({DATA: "Secret/d", INLINE: "{}"}, '{"users": [1], "a": {"b": 1}}'),
        (
            {DATA: "configmap/d", INLINE: "{users: [2], a: {c: 3}}"},
            '{"users": [1, 2], "a": {"b": 1, "c": 3}}',
        ),
        ({DATA: "configmap/d", INLINE: "{a: 1}"}, '{"users": [1], "a": 1}'),
        ({DATA: "configmap/d", INLINE: "{a: 1}", OVERWRITE: "true"}, '{"a": 1}'),
        ({DATA: "configmap/d", OVERWRITE: "true"}, '{"users": [1], "a": {"b": 1}}'),
    ],
)
def test_user_data_of_an_object_is_merged_as_in_virtlet(
    notes: dict[str, str], user_data: str
) -> None:
    found = read(notes, d={"users": "[1]", "a": "b: 1"})
    assert found.user_data == f"#cloud-config\n{user_data}\n"


def test_a_script_of_an_object_keeps_its_lines_and_its_first_one() -> None:
    notes = {DATA: "configmap/d", KEY: "script"}
    assert read(notes, d={"script": SCRIPT, "other": "a: ["}).user_data == SCRIPT


def test_a_cloud_config_of_an_object_stays_a_text() -> None:
    text = "#cloud-config\nusers: []\n"
    assert read({DATA: "secret/d", KEY: "u"}, d={"u": text}).user_data == text


def test_values_may_be_in_base64_once_more() -> None:
    notes = {DATA: "configmap/d", KEY: "script", ENCODING: "base64"}
    assert read(notes, d={"script": base64_of(SCRIPT)}).user_data == SCRIPT


@pytest.mark.parametrize(
    ("notes", "keys"),
    [
        ({KEYS: "secret/k"}, (FIRST,)),
        ({KEYS: "configmap/k/more"}, (SECOND,)),
        ({KEYS: "secret/k", "VirtletSSHKeys": SECOND}, (FIRST, SECOND)),
        ({KEYS: "secret/k", "VirtletSSHKeys": SECOND, OVERWRITE: "true"}, (SECOND,)),
    ],
)
def test_keys_of_an_object_precede_the_inline_ones(
    notes: dict[str, str], keys: tuple[str, ...]
) -> None:
    assert read(notes, k={"authorized_keys": f"{FIRST}\n\n", "more": SECOND}).ssh_keys == keys


def test_files_of_an_object_have_a_path_and_an_encoding() -> None:
    found = read(
        {FILES: "secret/f"},
        f={
            "a": base64_of("one"),
            "a_path": "/etc/a",
            "b": "two",
            "b_path": "/etc/b",
            "b_encoding": "plain",
            "c": base64_of("three"),
            "c_path": "/c",
            "c_encoding": "base64",
        },
    )
    files = [(one.path, one.data) for one in found.files]
    assert files == [("/etc/a", b"one"), ("/etc/b", b"two"), ("/c", b"three")]


@pytest.mark.parametrize(
    ("note", "more", "content", "words"),
    [
        (DATA, {}, {"a": b"b: ["}, "which is no YAML"),
        (DATA, {}, {"a": b"\xff"}, "no UTF-8 text in the encoding plain"),
        (DATA, {}, {"a": b"b: !!binary /w=="}, "no UTF-8 text"),
        (DATA, {KEY: "x"}, {"a": b"b"}, "names 'x'"),
        (KEYS, {}, {"a": b"b"}, "without the key 'authorized_keys'"),
        (FILES, {}, {"a": b"b"}, "without a_path"),
        (FILES, {}, {"a": b"b", "a_path": b"/x", "a_encoding": b"gzip"}, "write base64 or plain"),
        (FILES, {}, {"a": b"?", "a_path": b"x"}, "'a' and a_path: "),
    ],
)
def test_a_content_that_cannot_be_used_is_a_problem(
    note: str, more: dict[str, str], content: dict[str, bytes], words: str
) -> None:
    (problem,) = wishes({note: "secret/x", **more}, {note: content})[1]
    assert words in problem.message


@pytest.mark.parametrize(
    ("note", "content"),
    [
        (FILES, {"a": b"YQ==", "a_path": b"geheim"}),
        (FILES, {"a": b"YQ==", "a_path": b"/x", "a_encoding": b"geheim"}),
        (FILES, {"a": b"geheim", "a_path": b"/x"}),
        (DATA, {"a": b"x: *geheim"}),
        (DATA, {"a": b"x: !geheim y"}),
        (DATA, {"a": b"{? [geheim] : x}"}),
        (DATA, {"a": b"a: 2001-99-99 # geheim"}),
        (DATA, {"a": b"\x07geheim"}),
        (DATA, {"a": b"\xffgeheim"}),
    ],
)
def test_a_problem_shows_nothing_of_a_secret(note: str, content: dict[str, bytes]) -> None:
    (problem,) = wishes({note: "secret/x"}, {note: content})[1]
    assert "geheim" not in problem.message
    assert "'a'" in problem.message or "a_encoding" in problem.message


def test_a_problem_of_yaml_has_the_position_and_that_of_a_config_map_the_reason() -> None:
    content = {DATA: {"a": b"x: *other"}}
    (hidden,) = wishes({DATA: "secret/x"}, content)[1]
    assert hidden.message.endswith("no YAML: line 1, column 4")
    (shown,) = wishes({DATA: "configmap/x"}, content)[1]
    assert "undefined alias 'other' (line 1, column 4)" in shown.message


def test_the_values_of_both_kinds_are_bytes() -> None:
    assert values("secrets", {"data": {"a": base64_of("x")}}) == {"a": b"x"}
    config = {"data": {"a": "x"}, "binaryData": {"b": base64_of("y")}}
    assert values("configmaps", config) == {"a": b"x", "b": b"y"}


async def test_the_guest_gets_what_its_objects_contain(
    tmp_path: Path, fleet: Fleet, api: ApiServer, reader: Kubelet
) -> None:
    api.objects[f"{HOME}/secrets/keys"] = {"data": {"authorized_keys": base64_of(FIRST)}}
    api.objects[f"{HOME}/configmaps/data"] = {"data": {"script": SCRIPT}}
    notes = {KEYS: "secret/keys", DATA: "configmap/data", KEY: "script"}
    await reader.container(await reader.sandbox(annotations=notes))
    seed = fleet.vm.spec.volumes[1].cloud_init_no_cloud
    assert isinstance(seed, CloudInitNoCloud)
    assert (seed.ssh_keys[0], seed.user_data) == (FIRST, SCRIPT)
    stored = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert stored
    assert not [path for path in stored if b"AAAAB3NzaC1yc2E" in path.read_bytes()]


async def test_an_object_that_is_missing_fails_the_container_and_the_next_try_has_it(
    fleet: Fleet, api: ApiServer, reader: Kubelet
) -> None:
    sandbox_id = await reader.sandbox(annotations={KEYS: "secret/keys"})
    with pytest.raises(Exception, match="secrets/keys of default does not exist"):
        await reader.container(sandbox_id)
    assert not fleet.created
    api.objects[f"{HOME}/secrets/keys"] = {"data": {"authorized_keys": base64_of(FIRST)}}
    await reader.container(sandbox_id)
    assert fleet.created


async def test_a_right_that_is_missing_is_named(
    fleet: Fleet, api: ApiServer, reader: Kubelet
) -> None:
    api.refused = True
    sandbox_id = await reader.sandbox(annotations={KEYS: "secret/keys"})
    with pytest.raises(Exception, match="refuses to show /api/v1/namespaces/default/secrets/keys"):
        await reader.container(sandbox_id)
    assert not fleet.created


async def test_without_a_kubeconfig_such_a_pod_is_refused_with_the_next_step(
    kubelet: Kubelet,
) -> None:
    config = sandbox(annotations={KEYS: "secret/keys"})
    code, text = await kubelet.refused("RunPodSandbox", config=config)
    assert code is StatusCode.FAILED_PRECONDITION
    assert "kubeconfig in /etc/virtbus/cri.toml" in text
