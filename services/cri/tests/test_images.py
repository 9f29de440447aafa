"""The images of pods: their names, digests, and the CRI's own references to them."""

import pytest
from grpc import StatusCode
from services.cri.tests.world import DIGEST, OTHER_DIGEST, Fleet, Kubelet

from virtbus.cri.core import image_refs
from virtbus.schemas.errors import VirtbusError


@pytest.mark.parametrize(
    ("name", "references"),
    [
        ("tiny", ("tiny",)),
        ("tiny:latest", ("tiny",)),
        ("debian/12:v3", ("debian/12:v3",)),
        ("virtlet.cloud/tiny", ("tiny",)),
        ("virtlet.cloud/tiny:latest", ("tiny",)),
        (
            "virtlet.cloud/images.example/cirros.img:latest",
            ("images.example/cirros.img", "https://images.example/cirros.img"),
        ),
        ("quay.io/containerdisks/fedora:40", ("docker://quay.io/containerdisks/fedora:40",)),
        ("localhost:5000/disk:latest", ("docker://localhost:5000/disk:latest",)),
        (f"tiny@{DIGEST}", (f"tiny@{DIGEST}",)),
    ],
)
def test_a_name_has_one_meaning_in_a_fixed_order(name: str, references: tuple[str, ...]) -> None:
    assert image_refs.candidates(image_refs.parse(name)) == references


@pytest.mark.parametrize("name", ["", "tiny@sha256:12", "tiny@md5:x", "a b", "UPPER", "x@", "@y"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(VirtbusError, match="image"):
        image_refs.candidates(image_refs.parse(name))


def test_the_vm_gets_exactly_the_file_that_was_pulled() -> None:
    assert image_refs.pinned("tiny", DIGEST) == f"tiny@{DIGEST}"
    container_image = "docker://quay.io/containerdisks/fedora:40"
    assert image_refs.pinned(container_image, DIGEST) == container_image


async def test_an_image_is_known_by_name_and_id_after_its_pull(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    assert not (await kubelet.call("ImageStatus", image={"image": "tiny"})).HasField("image")
    sandbox = {"metadata": {"namespace": "team"}}
    pulled = await kubelet.call("PullImage", image={"image": "tiny:latest"}, sandbox_config=sandbox)
    assert pulled.image_ref == DIGEST
    assert fleet.asked("image.pull")[0] == {"ref": "tiny", "node": "n1", "namespace": "team"}
    for name in ("tiny", "tiny:latest", DIGEST, f"tiny@{DIGEST}"):
        image = (await kubelet.call("ImageStatus", image={"image": name})).image
        assert (image.id, image.size, list(image.repo_tags)) == (DIGEST, 1000, ["tiny:latest"])
    answer = await kubelet.call("ImageStatus", image={"image": f"tiny@{OTHER_DIGEST}"})
    assert not answer.HasField("image")


async def test_two_names_of_one_file_are_one_image(fleet: Fleet, kubelet: Kubelet) -> None:
    fleet.images["twin"] = DIGEST
    for name in ("tiny", "twin", "other"):
        await kubelet.call("PullImage", image={"image": name})
    images = (await kubelet.call("ListImages")).images
    assert {image.id: list(image.repo_tags) for image in images} == {
        DIGEST: ["tiny", "twin"],
        OTHER_DIGEST: ["other"],
    }
    listed = await kubelet.call("ListImages", filter={"image": {"image": "twin"}})
    assert [list(image.repo_tags) for image in listed.images] == [["twin"]]
    (usage,) = (await kubelet.call("ImageFsInfo")).image_filesystems
    assert (usage.used_bytes.value, usage.inodes_used.value) == (2000, 2)


async def test_a_removal_drops_only_the_reference(fleet: Fleet, kubelet: Kubelet) -> None:
    await kubelet.call("PullImage", image={"image": "tiny"})
    requests = len(fleet.requests)
    for _ in range(2):
        await kubelet.call("RemoveImage", image={"image": "tiny"})
    assert not (await kubelet.call("ListImages")).images
    assert not {name for name, _ in fleet.requests[requests:]} - {"node.get"}


async def test_a_failed_pull_says_why(kubelet: Kubelet) -> None:
    code, text = await kubelet.refused("PullImage", image={"image": "nothing"})
    assert (code, "nothing" in text) == (StatusCode.NOT_FOUND, True)
    code, text = await kubelet.refused("PullImage", image={"image": f"tiny@{OTHER_DIGEST}"})
    assert (code, "another digest" in text) == (StatusCode.FAILED_PRECONDITION, True)
    assert not (await kubelet.call("ListImages")).images


async def test_a_name_of_virtlet_becomes_a_url_only_if_nobody_has_it(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    fleet.images["https://images.example/cirros.img"] = OTHER_DIGEST
    name = "virtlet.cloud/images.example/cirros.img"
    assert (await kubelet.call("PullImage", image={"image": name})).image_ref == OTHER_DIGEST
    fleet.images["images.example/cirros.img"] = DIGEST
    assert (await kubelet.call("PullImage", image={"image": name})).image_ref == DIGEST


async def test_a_container_needs_a_pulled_image(kubelet: Kubelet) -> None:
    sandbox_id = await kubelet.sandbox()
    config = {"metadata": {"name": "vm"}, "image": {"image": DIGEST}}
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert (code, "PullImage" in text) == (StatusCode.NOT_FOUND, True)
