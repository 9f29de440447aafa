"""Image names of the bus on a node: their targets come with records and pull requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import named as named_volume
from services.imaged.tests.records import record, ref, uid, volume
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_disks import refused
from services.imaged.tests.test_pulls import digest_of
from services.imaged.tests.test_service import serving

from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.imaged.core.disk_requests import refs_of
from virtbus.imaged.core.expiry import ExpiryLimits
from virtbus.imaged.core.transports import Transport, refusal, server_of
from virtbus.imaged.images import Images
from virtbus.schemas.container import ImagePullPolicy
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageSource, ImageTarget, parse_image_ref
from virtbus.schemas.node_rpc import ForgetImage, PullImage
from virtbus.schemas.vm import VmRecord

NAME = "debian/12"


def target(url: str, **more: Any) -> ImageTarget:
    return ImageTarget(url=url, **more)


def vm(one: ImageTarget, number: int = 1, image: str = NAME) -> VmRecord:
    return record(volume(image), uid=uid(number), targets={NAME: one})


def named(one: ImageTarget, pin: str = "") -> ImageSource:
    return parse_image_ref(f"{NAME}@{pin}" if pin else NAME)._replace(target=one)


async def digest(node: Node, wanted: VmRecord) -> str:
    return (await node.disks.ensure(wanted)).ready.digest


async def reason(images: Images, source: ImageSource) -> str:
    with pytest.raises(VirtbusError) as caught:
        await images.refresh(source)
    return caught.value.reason


def rules(node: Node, text: str, file: str = "a.toml") -> None:
    (node.names_dir / file).write_text(text)


# --- meaning -----------------------------------------------------------------------------------
async def test_a_target_precedes_the_files_of_the_node(make_node: NodeMaker, server: Web) -> None:
    mine, theirs = qcow2_image(), qcow2_image()
    server.files |= {"bus": mine, "file": theirs}
    async with make_node() as node:
        rules(node, f"[[image]]\nname = '{NAME}'\nurl = '{server.url('file')}'\n")
        assert await digest(node, vm(target(server.url("bus")), 1)) == digest_of(mine)
        assert await digest(node, record(volume(NAME), uid=uid(2))) == digest_of(theirs)
        assert await digest(node, vm(target(server.url("bus")), 3)) == digest_of(mine)


async def test_a_broken_file_of_the_node_does_not_touch_names_of_the_bus(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = data = qcow2_image()
    async with make_node() as node:
        rules(node, "no toml")
        assert await digest(node, vm(target(server.url("a")))) == digest_of(data)


async def test_a_changed_name_is_another_image_at_once(make_node: NodeMaker, server: Web) -> None:
    first, second = qcow2_image(), qcow2_image()
    server.files |= {"a": first, "b": second}
    async with make_node() as node:
        assert await digest(node, vm(target(server.url("a")), 1)) == digest_of(first)
        assert await digest(node, vm(target(server.url("b")), 2)) == digest_of(second)
        assert await digest(node, vm(target(server.url("a")), 1)) == digest_of(first)
        pinned = target(server.url("a"), digest=digest_of(second))
        assert await digest(node, vm(pinned, 3)) == digest_of(second)  # the store has these bytes
        assert len(server.requests) == 2


async def test_targets_survive_a_restart_without_a_server(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = data = qcow2_image()
    one = target(server.url("a"))
    async with make_node() as node:
        await digest(node, vm(one, 1))
    del server.files["a"]
    async with make_node() as node:
        assert await digest(node, vm(one, 2)) == digest_of(data)


async def test_wrong_bytes_are_refused(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = qcow2_image()
    pin = "sha256:" + "0" * 64
    async with make_node() as node:
        error = await refused(node.disks, vm(target(server.url("a"), digest=pin)))
        assert (error.reason, node.data()) == ("digest_mismatch", [])
        other = named(target(server.url("a"), digest=pin), "sha256:" + "1" * 64)
        assert await reason(node.images, other) == "digest_mismatch"
        container = named(target("docker://127.0.0.1:1/a:1"), pin)
        assert await reason(node.images, container) == "container_name_pinned"


async def test_a_lost_image_of_a_disk_is_fetched_again(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = data = qcow2_image()
    wanted = vm(target(server.url("a")))
    async with make_node() as node:
        await digest(node, wanted)
        node.store.path(digest_of(data)).unlink()
        assert await digest(node, wanted) == digest_of(data)
        assert node.store.path(digest_of(data)).exists()


async def test_a_volume_has_the_target_of_its_own_create(make_node: NodeMaker, server: Web) -> None:
    server.files["a"] = data = qcow2_image(payload=0)
    one = ref(32 * MIB, NAME).model_copy(update={"target": target(server.url("a"))})
    wanted = record(named_volume(), refs={"data": one})
    async with make_node() as node:
        assert await digest(node, wanted) == digest_of(data)
    assert refs_of(wanted) == {f"{NAME}#{target(server.url('a')).key}"}


# --- pull policy -------------------------------------------------------------------------------
async def test_always_asks_the_server_at_each_create_and_never_for_an_existing_disk(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    always = target(server.url("a"), pull_policy=ImagePullPolicy.ALWAYS)
    async with make_node() as node:
        first = await digest(node, vm(always, 1))
        server.files["a"] = data = qcow2_image()
        server.etags["a"] = '"v2"'
        assert await digest(node, vm(always, 2)) == digest_of(data)
        assert await digest(node, vm(always, 1)) == first
        assert len(server.requests) == 2
        lazy = target(server.url("a"))
        assert await digest(node, vm(lazy, 3)) == digest_of(data)
        assert len(server.requests) == 2


async def test_never_needs_an_image_that_was_pulled_before(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = data = qcow2_image()
    never = target(server.url("a"), pull_policy=ImagePullPolicy.NEVER, namespace="shop")
    async with make_node() as node:
        error = await refused(node.disks, vm(never))
        assert (error.code, error.reason) == (404, "image_not_present")
        assert f"virtbus image pull {NAME} -n shop" in str(error)
        assert server.requests == []
        await node.images.refresh(named(never))
        assert await digest(node, vm(never)) == digest_of(data)


# --- transports --------------------------------------------------------------------------------
async def test_a_transport_is_used_only_for_servers_that_its_operator_named(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    """Users set names of the bus, so they must not send a login of the node elsewhere."""
    data = qcow2_image()
    server.guard("a", data, "user:password")
    (tmp_path / "login").write_text("user:password")
    one = named(target(server.url("a"), transport="corp"))
    text = f"[transports.corp]\nlogin_file = '{tmp_path}/login'\n"
    async with make_node() as node:
        assert await reason(node.images, named(target(server.url("a")))) == "image_denied"
        assert await reason(node.images, one) == "image_transport_invalid"
        for servers in ("[]", "['https://images.example']", "['http://127.0.0.1']"):
            rules(node, f"{text}image_name_servers = {servers}\n")
            assert await reason(node.images, one) == "image_transport_invalid"
        assert len(server.requests) == 1
        rules(node, f"{text}image_name_servers = ['{server.base}']\n")
        assert (await node.images.refresh(one)).digest == digest_of(data)
        # the image of a login is nobody's without this name, transport and URL
        plain = parse_image_ref(server.url("a"))
        assert node.images.cached(plain) is None
        assert node.images.cached(named(target(server.url("a")))) is None


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a.toml": ""}, "no file in images.d"),
        ({"a.toml": "[transports.corp]\ntimeout_s = 'x'\n"}, "has problems"),
        ({"a.toml": "[transports.corp]\n", "b.toml": "[transports.corp]\n"}, "ambiguous"),
        ({"a.toml": "[transports.corp]\n"}, "image_name_servers"),
    ],
)
async def test_a_transport_that_cannot_be_used_says_why(
    make_node: NodeMaker, server: Web, files: dict[str, str], told: str
) -> None:
    async with make_node() as node:
        for file, text in files.items():
            rules(node, text, file)
        error = await refused(node.disks, vm(target(server.url("a"), transport="corp")))
    assert (error.code, error.reason) == (503, "image_transport_invalid")
    assert told in str(error)


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("https://H.example/a", "https://h.example"),
        ("https://h:443/a", "https://h"),
        ("http://h:8080/a", "http://h:8080"),
        ("http://[FD00::1]:80/a", "http://[fd00::1]"),
        ("docker://h:5000/a:1", "docker://h:5000"),
        ("https://h@evil/a", ""),
        ("https://evil\\@h/a", ""),
        ("file:///a", ""),
        ("https://h:99999/a", ""),
        ("https://[::1/a", ""),
    ],
)
def test_the_server_of_a_url_is_read_strictly(url: str, server: str) -> None:
    assert server_of(url) == server
    allowed = Transport(image_name_servers=("https://h", "http://h:8080", "docker://h:5000"))
    assert (refusal(allowed, url, "x") == "") == (server in allowed.image_name_servers)


@pytest.mark.parametrize("bad", ["https://h/", "h", "https://h/a", "https://u@h", "ftp://h", ""])
def test_servers_of_a_transport_are_checked(bad: str) -> None:
    with pytest.raises(ValueError, match="must be https"):
        Transport(image_name_servers=(bad,))


def test_registry_logins_stay_in_their_own_file() -> None:
    one = Transport(image_name_servers=("docker://h",), login_file="login")
    assert "registry_auth_file" in refusal(one, "docker://h/a:1", "x")


# --- store and requests ------------------------------------------------------------------------
async def test_old_meanings_of_a_name_expire_and_that_of_a_vm_stays(
    make_node: NodeMaker, server: Web
) -> None:
    server.files |= {"a": qcow2_image(), "b": qcow2_image()}
    old, new = (target(server.url(path)) for path in "ab")
    async with make_node() as node:
        for one in (old, new):
            await node.images.refresh(named(one))
        assert node.store.plain_names() == ()
        wanted = refs_of(vm(new))
        gone = await node.disks.expire_names(wanted, ExpiryLimits(-1.0, 99))
        assert gone == (named(old).name,)


async def test_a_pull_a_list_and_a_delete_use_the_plain_name(tmp_path: Path, server: Web) -> None:
    server.files |= {"a": qcow2_image(), "b": qcow2_image()}
    job = uid(0xABC)
    async with serving(tmp_path, MemoryServer()) as desk:
        async with asyncio.TaskGroup() as group:
            pulls = [PullImage(ref=NAME, job=job, target=target(server.url(path))) for path in "ab"]
            tasks = [group.create_task(desk.ask("pull", pull)) for pull in pulls]
        assert len({task.result()["digest"] for task in tasks}) == 2
        page = await desk.ask("list", {})
        assert [image["names"] for image in page["images"]] == [[NAME], [NAME]]
        gone = await desk.ask("delete", ForgetImage(ref=NAME))
        assert gone["names"] == [NAME]
        assert await desk.ask("list", {}) == {}
