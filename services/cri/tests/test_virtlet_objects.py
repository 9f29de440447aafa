"""Virtlet's objects of the cluster: image translations reach imaged, and settings this node."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.api_server import (
    CONFIG_MAPPINGS,
    CONFIG_MAPS,
    IMAGE_MAPPINGS,
    NODES,
    ApiServer,
    named,
)
from services.cri.tests.world import Fleet, cri

from virtbus.cri.core.virtlet_objects import ClusterObjects, image_files, node_config
from virtbus.cri.edge import cluster
from virtbus.cri.edge.kubeconfig import read_login
from virtbus.schemas.errors import VirtbusError

RULES = {"translations": [{"name": "cirros", "url": "https://h/cirros.img"}]}
PATTERN = {"translations": [{"regexp": "x", "url": "https://h/x"}, RULES["translations"][0]]}


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    (tmp_path / "run" / "image-names").mkdir(parents=True)  # as tmpfiles.conf does
    monkeypatch.setattr(cluster, "CHANGE_PAUSE_S", 0.01)
    monkeypatch.setattr(cluster, "ABSENT_PAUSE_S", 0.05)
    monkeypatch.setattr("virtbus.cri.virtlet_objects.AGAIN_S", (0.01, 0.05))
    async with ApiServer().serving() as api:
        yield api


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.01)


def names(folder: Path) -> dict[str, Any]:
    """Return the contents of imaged's folder by file name."""
    found = {}
    for path in (folder / "run" / "image-names").glob("*.yaml"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found[path.name] = json.loads(path.read_text())
    return found


# --- image translations ---------------------------------------------------------------------
async def test_translations_reach_imaged_and_follow_each_change(
    tmp_path: Path, fleet: Fleet, api: ApiServer
) -> None:
    api.put(IMAGE_MAPPINGS, named("primary", spec=RULES))
    api.put(CONFIG_MAPS, named("virtlet-image-translations", data={"a.yaml": "prefix: a"}))
    async with cri(tmp_path, fleet, kubeconfig=api.kubeconfig(tmp_path)):
        mapping, translations = (
            "VirtletImageMapping.primary.yaml",
            "ConfigMap.virtlet-image-translations.yaml",
        )
        await until(lambda: len(names(tmp_path)) == 2)
        assert names(tmp_path)[mapping] == {"kind": "VirtletImageMapping", "spec": RULES}
        assert names(tmp_path)[translations]["data"] == {"a.yaml": "prefix: a"}
        api.put(IMAGE_MAPPINGS, named("other", spec=RULES))
        await until(
            lambda: set(names(tmp_path)) == {"VirtletImageMapping.other.yaml", translations}
        )
        api.put(IMAGE_MAPPINGS)
        await until(lambda: set(names(tmp_path)) == {translations})
    assert any("fieldSelector=metadata.name" in one for one in api.asked)


async def test_a_cluster_that_is_away_or_refuses_changes_nothing_also_over_a_restart(
    tmp_path: Path, fleet: Fleet, api: ApiServer
) -> None:
    api.put(IMAGE_MAPPINGS, named("primary", spec=RULES))
    kubeconfig = api.kubeconfig(tmp_path)
    async with cri(tmp_path, fleet, kubeconfig=kubeconfig):
        await until(lambda: bool(names(tmp_path)))
    before = names(tmp_path)
    for path in (tmp_path / "run" / "image-names").iterdir():
        path.unlink()  # a reboot empties the folder
    api.refused = True
    async with cri(tmp_path, fleet, kubeconfig=kubeconfig):
        assert names(tmp_path) == before
        asked = len(api.asked)
        await until(lambda: len(api.asked) > asked + 6)
        api.refused, api.away = False, True
        asked = len(api.asked)
        await until(lambda: len(api.asked) > asked + 6)
        assert names(tmp_path) == before


async def test_without_a_kubeconfig_the_former_names_of_the_cluster_end(
    tmp_path: Path, fleet: Fleet
) -> None:
    folder = tmp_path / "run" / "image-names"
    folder.mkdir(parents=True)
    (folder / "VirtletImageMapping.old.yaml").write_text("{}")
    async with cri(tmp_path, fleet):
        assert names(tmp_path) == {}


async def test_a_missing_folder_of_image_names_is_reported_and_never_made(
    tmp_path: Path, fleet: Fleet, api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run" / "image-names"
    folder.rmdir()
    async with cri(tmp_path, fleet):
        pass
    assert "tmpfiles.conf" not in caplog.text
    async with cri(tmp_path, fleet, kubeconfig=api.kubeconfig(tmp_path)):
        await until(lambda: f"{folder}: it is missing; apply deploy/systemd" in caplog.text)
    assert not folder.exists()


async def test_names_that_cannot_be_written_keep_no_others_and_are_tried_again(
    tmp_path: Path, fleet: Fleet, api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    long, blocked = "a" * 253, "VirtletImageMapping.b.yaml"
    (tmp_path / "run" / "image-names" / blocked / "x").mkdir(parents=True)
    api.put(IMAGE_MAPPINGS, *(named(one, spec=RULES) for one in (long, f"{long[1:]}b", "b", "c")))
    async with cri(tmp_path, fleet, kubeconfig=api.kubeconfig(tmp_path)):
        here = tmp_path / "run" / "image-names"
        await until(lambda: len(list(here.iterdir())) >= 4 and blocked in caplog.text)
        assert (here / "VirtletImageMapping.c.yaml").is_file()
        (here / blocked / "x").rmdir()
        (here / blocked).rmdir()
        await until((here / blocked).is_file)
        assert sum("a" * 150 in one for one in names(tmp_path)) == 2


@pytest.mark.integration
async def test_files_from_before_the_folder_was_imageds_get_its_group(
    tmp_path: Path, fleet: Fleet, api: ApiServer
) -> None:
    folder = tmp_path / "run" / "image-names"
    api.put(IMAGE_MAPPINGS, named("primary", spec=RULES))
    kubeconfig = api.kubeconfig(tmp_path)
    async with cri(tmp_path, fleet, kubeconfig=kubeconfig):
        await until(lambda: bool(names(tmp_path)))
    os.chown(folder, -1, 65534)
    folder.chmod(0o2750)
    async with cri(tmp_path, fleet, kubeconfig=kubeconfig):
        assert {path.stat().st_gid for path in folder.iterdir()} == {65534}


def test_the_switch_of_expressions_leaves_exact_names() -> None:
    objects = ClusterObjects(
        image_mappings=[named("a", spec=PATTERN)],
        translations=[named("b", data={"1": json.dumps(PATTERN), "2": "a: [", "3": "7"})],
    )
    files = image_files(objects, regexps=False).files
    found = {name: json.loads(one) for name, one in files.items()}
    assert found["VirtletImageMapping.a.yaml"]["spec"] == RULES
    texts = found["ConfigMap.b.yaml"]["data"]
    assert json.loads(texts["1"]) == RULES
    assert texts["2"] == "a: ["  # imaged reports it
    whole = image_files(objects, regexps=True).files["VirtletImageMapping.a.yaml"]
    assert json.loads(whole)["spec"] == PATTERN


def test_values_that_json_does_not_have_keep_no_name_from_imaged() -> None:
    text = "version: 2018-05-01\n2018-05-01: !!set {b, a}\nrule: !!binary YQ==\ntrue: .5\n"
    objects = ClusterObjects(
        image_mappings=[named("a", spec=PATTERN)],
        translations=[named("b", data={"1": text + json.dumps(PATTERN)[1:-1]})],
    )
    found, problems = image_files(objects, regexps=False)
    assert problems == ()
    assert json.loads(json.loads(found["ConfigMap.b.yaml"])["data"]["1"]) == RULES | {
        "version": "2018-05-01",
        "2018-05-01": {"a": None, "b": None},
        "rule": "a",
        "true": 0.5,
    }


async def test_an_object_that_cannot_be_used_is_named_and_the_others_count(
    tmp_path: Path, fleet: Fleet, api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    off = {"config": {"enableRegexpImageTranslation": False}}
    api.put(CONFIG_MAPPINGS, named("off", spec=off))
    api.put(CONFIG_MAPS, named("virtlet-image-translations", data={"a": "a: !!binary /w=="}))
    for _ in range(2):  # the second one begins with the stored objects
        async with cri(tmp_path, fleet, kubeconfig=api.kubeconfig(tmp_path)):
            await until(lambda: "ConfigMap virtlet-image-translations: cannot" in caplog.text)
            api.put(IMAGE_MAPPINGS, named("primary", spec=RULES))
            await until(lambda: "VirtletImageMapping.primary.yaml" in names(tmp_path))
        caplog.clear()


# --- settings of nodes ----------------------------------------------------------------------
def mapping(name: str, protocol: str | None = None, **spec: Any) -> dict[str, Any]:
    config = {"downloadProtocol": protocol} if protocol else {}
    return {"metadata": {"name": name}, "spec": {"config": config, **spec}}


NODE = {"metadata": {"name": "worker", "labels": {"rack": "1"}}}


@pytest.mark.parametrize(
    ("mappings", "scheme"),
    [
        ([], "https"),
        ([mapping("a", "http")], "http"),
        ([mapping("a", "http", nodeName="worker")], "http"),
        ([mapping("a", "http", nodeName="other")], "https"),
        ([mapping("a", "http", nodeSelector={"rack": "1"})], "http"),
        ([mapping("a", "http", nodeSelector={"rack": "1", "disk": "ssd"})], "https"),
        ([mapping("a", "http", nodeName="worker", nodeSelector={"rack": "2"})], "https"),
        ([mapping("a", "http", priority=2), mapping("b", "https", priority=1)], "http"),
        ([mapping("b", "http"), mapping("a", "https")], "http"),
        ([mapping("a", "http"), mapping("b")], "http"),
        ([{"metadata": {"name": "a"}}], "https"),
    ],
)
def test_mappings_are_joined_by_priority_and_then_by_name(
    mappings: list[dict[str, Any]], scheme: str
) -> None:
    objects = ClusterObjects(config_mappings=mappings, nodes=[NODE])
    assert node_config(objects).config.scheme == scheme
    backwards = ClusterObjects(config_mappings=mappings[::-1], nodes=[NODE])
    assert node_config(backwards).config.scheme == scheme


def test_a_wrong_mapping_is_reported_and_the_others_count() -> None:
    objects = ClusterObjects(
        config_mappings=[mapping("a", "ftp"), mapping("b", "http")], nodes=[NODE]
    )
    settled = node_config(objects)
    assert settled.config.scheme == "http"
    assert settled.problems[0].path.startswith("VirtletConfigMapping a: spec.config")


def test_a_wrong_setting_is_skipped_alone_and_named() -> None:
    first = mapping("a", "http", priority="high")
    first["spec"]["config"] |= {"rawDevices": ["loop0"], "enableRegexpImageTranslation": False}
    under = {"rawDevices": "sdb", "downloadProtocol": "https"}
    objects = ClusterObjects(
        config_mappings=[first, named("0", spec={"config": under, "priority": -1})], nodes=[NODE]
    )
    settled = node_config(objects)
    assert (settled.config.scheme, settled.config.regexps) == ("http", False)
    assert settled.config.devices == ("/dev/sdb",), "the next mapping's setting holds"
    assert [one.path for one in settled.problems] == [
        "VirtletConfigMapping a: spec.priority",
        "VirtletConfigMapping a: spec.config.rawDevices",
    ]


@pytest.mark.parametrize(
    "spec", [{"nodeName": 7}, {"nodeSelector": ["a"]}, {"config": [1]}, ["config"]]
)
def test_a_mapping_whose_nodes_are_unreadable_is_for_none(spec: Any) -> None:
    given = {"config": {"downloadProtocol": "http"}, **spec} if isinstance(spec, dict) else spec
    settled = node_config(ClusterObjects(config_mappings=[named("a", spec=given)], nodes=[NODE]))
    assert settled.config.scheme == "https"
    assert settled.problems


def test_raw_devices_are_patterns_below_dev() -> None:
    spec = {"config": {"rawDevices": "loop*, a**b, vg0/pvc-*,,../etc/x,/dev/sda"}}
    objects = ClusterObjects(config_mappings=[{"metadata": {"name": "a"}, "spec": spec}])
    settled = node_config(objects)
    assert settled.config.devices == ("/dev/loop*", "/dev/vg0/pvc-*")
    assert [one.path for one in settled.problems] == [
        "VirtletConfigMapping a: spec.config.rawDevices"
    ] * 3
    assert "a**b" in settled.problems[0].message


@pytest.mark.parametrize("narrow", [{"nodeName": "worker"}, {"nodeSelector": {"rack": "1"}}])
def test_an_unknown_node_has_no_devices_while_a_mapping_is_for_nodes(
    narrow: dict[str, Any],
) -> None:
    every = named("a", spec={"config": {"rawDevices": "loop*", "downloadProtocol": "http"}})
    none = named("b", spec={"config": {"rawDevices": ""}, **narrow})
    unknown = node_config(ClusterObjects(config_mappings=[every, none])).config
    assert (unknown.devices, unknown.scheme) == ((), "http")
    known = [{"metadata": {"name": "other", "labels": {}}}]
    found = node_config(ClusterObjects(config_mappings=[every, none], nodes=known)).config
    assert found.devices == ("/dev/loop*",)


async def test_a_cluster_without_this_node_is_reported(
    tmp_path: Path, fleet: Fleet, api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    words = "no Kubernetes node has the label kubernetes.io/hostname=worker-1"
    async with cri(tmp_path, fleet, kubeconfig=api.kubeconfig(tmp_path)):
        await until(lambda: words in caplog.text)


async def test_a_mapping_for_this_node_sets_the_protocol_of_downloads(
    tmp_path: Path, fleet: Fleet, api: ApiServer
) -> None:
    api.put(NODES, named("worker") | {"metadata": NODE["metadata"]})
    api.put(CONFIG_MAPPINGS, mapping("a", "http", nodeName="worker"))
    async with cri(tmp_path, fleet, kubeconfig=api.kubeconfig(tmp_path)) as kubelet:
        image = {"image": "virtlet.cloud/images.example/x.img"}

        async def refs() -> set[str]:
            code, _ = await kubelet.refused("PullImage", image=image)
            assert code is StatusCode.NOT_FOUND
            return {one["ref"] for one in fleet.asked("image.pull")}

        async with asyncio.timeout(10):
            while "http://images.example/x.img" not in await refs():
                await asyncio.sleep(0.01)
    assert any("labelSelector=kubernetes.io%2Fhostname%3Dworker-1" in one for one in api.asked) or (
        any("labelSelector=kubernetes.io/hostname%3Dworker-1" in one for one in api.asked)
    )


# --- the kubeconfig -------------------------------------------------------------------------
def config(**user: Any) -> dict[str, Any]:
    return {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api.example:6443/"}}],
        "users": [{"name": "u", "user": user}],
    }


def test_a_token_may_be_in_a_file_beside_the_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("renewed\n")
    path = tmp_path / "config"
    path.write_text(json.dumps(config(tokenFile="token")))
    login = read_login(path)
    assert login.server == "https://api.example:6443"
    assert login.headers == {"Authorization": "Bearer renewed"}


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        ("a: [", "cannot be used"),
        ("[]", "cannot be used"),
        ({}, "has no context ''"),
        (config() | {"users": []}, "has no user 'u'"),
        (config() | {"clusters": [{"name": "c", "cluster": {}}]}, "server must be an URL"),
        (config(exec={"command": "aws"}), "exec is not supported"),
        (config(tokenFile="none"), "cannot be used"),
        (config(**{"client-certificate-data": "no base64"}), "cannot be used"),
        (
            config()
            | {
                "clusters": [
                    {
                        "name": "c",
                        "cluster": {"server": "https://h", "insecure-skip-tls-verify": True},
                    }
                ]
            },
            "always verified",
        ),
    ],
)
def test_a_wrong_kubeconfig_is_refused_with_its_field(
    tmp_path: Path, whole: Any, words: str
) -> None:
    path = tmp_path / "config"
    path.write_text(whole if isinstance(whole, str) else json.dumps(whole))
    with pytest.raises(VirtbusError) as caught:
        read_login(path)
    assert caught.value.reason == "kubeconfig_invalid"
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_kubeconfig_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VirtbusError, match="cannot be used"):
        read_login(tmp_path / "none")
