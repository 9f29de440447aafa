"""Image names against a scripted controller."""

from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image_api import PulledImages
from virtbus.schemas.image_name import ImageNameSpec
from virtbus.schemas.image_name_api import ImageNameDeleted, ImageNamePage, ImageNameView

pytestmark = pytest.mark.integration

URL = "https://images.example/a.qcow2"
DIGEST = "sha256:" + "5e" * 32


def view(**changes: Any) -> ImageNameView:
    known: dict[str, Any] = {
        "uid": UID,
        "namespace": "default",
        "name": "debian/12",
        "spec": ImageNameSpec(url=URL),
        "generation": 1,
        "revision": 3,
        "created_ns": 1,
        "changed_ns": 1,
    }
    return ImageNameView(**(known | changes))


async def test_set_sends_the_spec_and_shows_the_name(script: Script, cli: Cli) -> None:
    script.answer("imagename", "set", view())
    flags = ("--digest", DIGEST, "--transport", "corp", "--pull-policy", "Always")
    ended = await cli("imagename", "set", "debian/12", URL, *flags, "--revision", "0")
    assert ended.code == 0, ended.err
    row = ["default", "debian/12", URL, "-", "-", "IfNotPresent", "1"]
    assert ended.out.splitlines()[1].split() == row
    spec = {"url": URL, "digest": DIGEST, "transport": "corp", "pull_policy": "Always"}
    asked = {"name": "debian/12", "namespace": "default", "spec": spec, "revision": 0}
    assert script.data("imagename.set") == [asked]
    assert (await cli("imagename", "set", "debian/12")).code == 2
    assert (await cli("imagename", "set", "a", URL, "--pull-policy", "x")).code == 2


async def test_names_of_the_fleet_have_a_flag(script: Script, cli: Cli) -> None:
    script.answer("imagename", "list", ImageNamePage(items=(view(namespace="_"),)))
    script.answer("imagename", "get", view(namespace="_"))
    for arguments in (("list", "--fleet"), ("get", "debian/12", "--fleet")):
        ended = await cli("imagename", *arguments)
        assert ended.out.splitlines()[1].split()[:2] == ["(fleet)", "debian/12"], ended.err
    assert script.data("imagename.list")[0]["namespace"] == "_"
    assert script.data("imagename.get") == [{"name": "debian/12", "namespace": "_"}]
    assert "namespace" not in await _listed(script, cli)


async def _listed(script: Script, cli: Cli) -> dict[str, Any]:
    assert (await cli("imagename", "list", "-o", "json")).json["items"][0]["name"] == "debian/12"
    asked: dict[str, Any] = script.data("imagename.list")[-1]
    return asked


async def test_delete_removes_each_name_once(script: Script, cli: Cli) -> None:
    script.answer("imagename", "delete", ImageNameDeleted(namespace="shop", name="a", uid=UID))
    ended = await cli("imagename", "delete", "a", "a", "-n", "shop")
    assert (ended.code, ended.out.strip()) == (0, "a deleted")
    assert script.data("imagename.delete") == [{"name": "a", "namespace": "shop"}]


async def test_a_refusal_says_which_credentials_are_needed(script: Script, cli: Cli) -> None:
    error = VirtbusError(Code.DENIED, "admin_only", "needs the credentials admin")
    script.answer("imagename", "set", error)
    ended = await cli("imagename", "set", "a", URL, "--fleet")
    assert (ended.code, "admin" in ended.err) == (1, True)


async def test_a_pull_may_name_a_namespace(script: Script, cli: Cli) -> None:
    script.answer("image", "pull", PulledImages())
    await cli("image", "pull", "debian/12", "-n", "shop")
    await cli("image", "pull", "debian/12")
    assert [asked.get("namespace") for asked in script.data("image.pull")] == ["shop", None]


async def test_help_teaches(cli: Cli) -> None:
    ended = await cli("imagename", "set", "--help")
    assert "virtbus imagename set debian/12" in ended.out
    assert "image_name_servers" in ended.out
