"""The CRI's files: what an answer says is on disk, and a damaged file costs one pod."""

import asyncio
import json
from pathlib import Path

import pytest
from cri_api.v1 import api_pb2
from grpc import StatusCode
from services.cri.tests.world import Fleet, Kubelet, cri, sandbox

from virtbus.schemas.errors import VirtbusError

FIRST_POD = Path(__file__).parent / "golden" / "first-pod.json"
"""The file of a pod as the first version of the runtime wrote it (2026-11-24)."""
STORE = Path(__file__).parent / "golden" / "store-0.2.0.json"
"""All files of the runtime as 0.2.0 writes them: a pod that runs, one that has ended, two images,
the node, and a VM that has to be deleted. A later version must read them as they are."""
OTHER = {"name": "db", "uid": "77", "namespace": "default"}


async def listed(kubelet: Kubelet) -> set[str]:
    """Return the ids of all sandboxes."""
    return {one.id for one in (await kubelet.call("ListPodSandbox")).items}


async def test_a_change_that_cannot_be_stored_does_not_happen(
    tmp_path: Path, kubelet: Kubelet
) -> None:
    first = await kubelet.sandbox()
    pods = tmp_path / "state" / "cri" / "pods"
    pods.rename(pods.with_suffix(".away"))
    code, text = await kubelet.refused("RunPodSandbox", config=sandbox(metadata=OTHER))
    assert (code, "cannot write" in text) == (StatusCode.UNAVAILABLE, True)
    assert await listed(kubelet) == {first}
    pods.with_suffix(".away").rename(pods)
    second = await kubelet.sandbox(metadata=OTHER)
    assert await listed(kubelet) == {first, second}


async def test_a_damaged_file_is_set_aside_and_costs_one_pod(tmp_path: Path, fleet: Fleet) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        await kubelet.sandbox()
        second = await kubelet.sandbox(metadata=OTHER)
    pods = tmp_path / "state" / "cri" / "pods"
    (damaged,) = (path for path in pods.iterdir() if second not in path.read_text())
    damaged.write_text(damaged.read_text()[:-20])
    (pods / "x.part").write_text("a write that a kill cut off")
    async with cri(tmp_path, fleet) as kubelet:
        assert await listed(kubelet) == {second}
    assert sorted(path.suffix for path in pods.iterdir()) == [".json", ".torn"]


async def test_the_vm_of_a_damaged_file_is_reported_until_a_person_deletes_it(
    tmp_path: Path, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        await kubelet.container(await kubelet.sandbox())
        assert await unclaimed(kubelet) == {}
    lost = fleet.vm
    (path,) = (tmp_path / "state" / "cri" / "pods").iterdir()
    path.write_text(path.read_text()[:-20])
    async with cri(tmp_path, fleet) as kubelet:
        while await unclaimed(kubelet) != {lost.uid: lost.name}:
            await asyncio.sleep(0.01)
        await kubelet.container(await kubelet.sandbox())  # kubelet makes the pod again
        assert await unclaimed(kubelet) == {lost.uid: lost.name}
        assert lost.uid in fleet.vms
        assert f"virtbus vm delete {lost.uid}" in caplog.text
        fleet.show(lost.uid, deleting=True)
        while await unclaimed(kubelet):
            await asyncio.sleep(0.01)


async def unclaimed(kubelet: Kubelet) -> dict[str, str]:
    """Return the VMs that no pod has, as `crictl info` shows them."""
    info = (await kubelet.call("Status", verbose=True)).info
    found: dict[str, str] = json.loads(info["vms_without_pod"])
    return found


async def test_a_pod_of_the_first_version_keeps_its_vm_and_root_disk(
    tmp_path: Path, fleet: Fleet
) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        await kubelet.running()
    uid, made = fleet.vm.uid, fleet.asked("vm.create")
    (path,) = (tmp_path / "state" / "cri" / "pods").iterdir()
    former = json.loads(FIRST_POD.read_text())
    former["machine"]["uid"] = uid
    path.write_text(json.dumps(former))
    async with cri(tmp_path, fleet) as kubelet:
        (container,) = (await kubelet.call("ListContainers")).containers
        assert (container.id, container.state) == ("c0" * 32, api_pb2.CONTAINER_RUNNING)
        assert container.pod_sandbox_id in await listed(kubelet)
        fleet.end("crashed")
        await kubelet.until_state(container.id, api_pb2.CONTAINER_EXITED)
        second = await kubelet.container(container.pod_sandbox_id, attempt=1)
        await kubelet.call("StartContainer", container_id=second)
        assert fleet.vm.uid == uid
        assert not fleet.asked("vm.delete")
        assert fleet.asked("vm.create") == made


async def test_the_store_of_this_version_has_its_pods_also_in_later_ones(
    tmp_path: Path, fleet: Fleet
) -> None:
    async with cri(tmp_path / "former", fleet) as kubelet:
        await kubelet.running()
    uid, made = fleet.vm.uid, fleet.asked("vm.create")
    stored = json.loads(STORE.read_text())
    web, db = (stored[name] for name in stored if name.startswith("pods/"))
    web["machine"]["uid"] = uid
    for name, record in stored.items():
        path = tmp_path / "state" / "cri" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    fleet.away = True
    async with cri(tmp_path, fleet) as kubelet:
        assert await listed(kubelet) == {"1a" * 32, "2a" * 32}
        runs, ended = await kubelet.status("1c" * 32), await kubelet.status("2c" * 32)
        assert (runs.state, ended.state) == (api_pb2.CONTAINER_RUNNING, api_pb2.CONTAINER_EXITED)
        ending = db["containers"][0]["ending"]
        assert (ended.reason, ended.finished_at) == (ending["reason"], ending["finished_ns"])
        sandbox_status = await kubelet.call("PodSandboxStatus", pod_sandbox_id="1a" * 32)
        assert sandbox_status.status.network.ip == web["machine"]["addresses"][0]
        images = (await kubelet.call("ListImages")).images
        assert {tag for one in images for tag in one.repo_tags} == {
            "tiny:latest",
            "virtlet.cloud/other:latest",
        }
    assert not list((tmp_path / "state" / "cri").rglob("*.torn"))
    fleet.away = False
    async with cri(tmp_path, fleet) as kubelet:
        (gone,) = [record["uid"] for name, record in stored.items() if name.startswith("removals/")]
        while [data["uid"] for data in fleet.asked("vm.delete")] != [gone]:
            await asyncio.sleep(0.01)
        fleet.end("crashed")
        await kubelet.until_state("1c" * 32, api_pb2.CONTAINER_EXITED)
        image = {"image": web["machine"]["image_id"]}
        second = await kubelet.container("1a" * 32, attempt=1, image=image)
        await kubelet.call("StartContainer", container_id=second)
        assert fleet.vm.uid == uid
        assert fleet.asked("vm.create") == made, "its VM and root disk are those of before"


async def test_a_file_of_a_newer_version_is_refused_and_kept(tmp_path: Path, fleet: Fleet) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        await kubelet.sandbox()
    (path,) = (tmp_path / "state" / "cri" / "pods").iterdir()
    newer = path.read_text().replace('"schema_version":2', '"schema_version":3')
    path.write_text(newer)
    with pytest.raises(VirtbusError, match="schema version 3"):
        async with cri(tmp_path, fleet):
            pass
    assert path.read_text() == newer


async def test_no_secret_of_a_container_is_stored(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    envs = [{"key": "PASSWORD", "value": "hunter2"}]
    await kubelet.container(await kubelet.sandbox(), envs=envs)
    seed = fleet.vm.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert seed.environment == {"PASSWORD": "hunter2"}
    for path in (tmp_path / "state").rglob("*.json"):
        assert "hunter2" not in path.read_text()
