"""`virtbus image prefetch` against scripted controllers, and its table on a terminal."""

import io
from typing import Any

import pytest
from cli.tests.fakes import Cli, Script
from cli.tests.test_fleet_verbs import IMAGE, node

from virtbus.bus.client.ports import Request
from virtbus.cli.live_table import LiveTable
from virtbus.schemas.api import NodePage
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageInfo, Progress
from virtbus.schemas.image_api import PulledImages
from virtbus.schemas.node import NodeState
from virtbus.schemas.subjects import progress

NODES = (
    node(node="n1", labels={"zone": "a"}),
    node(node="n2", labels={"zone": "a"}),
    node(node="n3", labels={"zone": "b"}),
    node(node="n4", labels={"zone": "a"}, state=NodeState.DOWN),
)


class Fleet:
    """Answers each node's pulls: n1 and n2 need two requests, n3 fails."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[str] = []
        self.digests: dict[str, str] = {}

    async def pull(self, request: Request) -> PulledImages:
        name, job = request.data["node"], request.data["job"]
        self.asked.append(name)
        if name == "n3":
            raise VirtbusError(Code.UNAVAILABLE, "image_quota", "no room on n3")
        if self.asked.count(name) == 1:
            if name == "n1":  # the other nodes have no account on this bus
                report = Progress(uid=job, step="image", done_bytes=5, total_bytes=10)
                await self.script.node.publish(progress("n1", job, "image"), report)
            raise VirtbusError(Code.DEADLINE, "image_pulling", "still fetched", after_ms=100)
        image = ImageInfo(**(IMAGE | {"digest": self.digests.get(name, IMAGE["digest"])}))
        return PulledImages(images={name: image})


@pytest.fixture
def fleet(script: Script) -> Fleet:
    made = Fleet(script)
    script.answer("node", "list", NodePage(items=NODES))
    script.handlers["image", "pull"] = made.pull
    return made


@pytest.mark.integration
async def test_each_node_has_its_row_and_a_failure_fails_the_command(
    cli: Cli, fleet: Fleet
) -> None:
    ended = await cli("image", "prefetch", "tiny")
    assert ended.code == 1
    header, *rows = [line.split() for line in ended.out.splitlines()]
    assert header[:3] == ["NODE", "STATE", "FETCHED"]
    assert [row[:2] for row in rows] == [["n1", "ready"], ["n2", "ready"], ["n3", "failed"]]
    assert "  n3: no room on n3" in ended.err
    assert "1 of 3 node(s)" in ended.err
    assert sorted(fleet.asked) == ["n1", "n1", "n2", "n2", "n3"], "n4 is down"


@pytest.mark.integration
async def test_selected_nodes_get_it_and_programs_read_json(cli: Cli, fleet: Fleet) -> None:
    ended = await cli("image", "prefetch", "tiny", "--label", "zone=a", "-o", "json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = {one["node"]: one for one in ended.json["nodes"]}
    assert set(found) == {"n1", "n2"}
    assert found["n1"]["fetched_bytes"] == 5
    assert found["n2"]["image"]["digest"] == IMAGE["digest"]
    assert ended.err == ""


@pytest.mark.integration
async def test_different_images_of_one_name_are_noticed(cli: Cli, fleet: Fleet) -> None:
    fleet.digests["n2"] = "sha256:" + "cd" * 32
    ended = await cli("image", "prefetch", "tiny", "--node", "n1", "--node", "n2")
    assert ended.code == 0, ended.err
    assert "not the same image on all nodes" in ended.err


@pytest.mark.integration
async def test_a_node_that_needs_too_long_is_reported(cli: Cli, fleet: Fleet) -> None:
    async def slow(_: Request) -> PulledImages:
        raise VirtbusError(Code.DEADLINE, "image_pulling", "still fetched", after_ms=10)

    fleet.script.handlers["image", "pull"] = slow
    ended = await cli("image", "prefetch", "tiny", "--node", "n1", "--timeout", "0.5")
    assert ended.code == 1
    assert "the node continues" in ended.err


@pytest.mark.integration
async def test_an_impossible_reference_is_refused_before_any_request(
    cli: Cli, fleet: Fleet
) -> None:
    assert (await cli("image", "prefetch", "ftp://x/y")).code == 2
    assert fleet.asked == []


class Screen(io.StringIO):
    """A terminal of 24 lines."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_table_that_is_redrawn_and_erased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Screen()
    table = LiveTable(("NODE", "STATE"), shown=True, stream=screen)
    table.show([("n1", "fetching"), ("n2", "waiting")])
    assert screen.getvalue() == "NODE  STATE\nn1    fetching\nn2    waiting\n"
    table.show([("n1", "ready"), ("n2", "waiting")])
    assert "ready" not in screen.getvalue(), "five times a second at most"
    table.close()
    assert screen.getvalue().endswith("\x1b[3F\x1b[J")


def test_a_table_that_is_higher_than_the_terminal_says_how_many_rows_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    LiveTable(("NODE", "STATE"), shown=True, stream=screen).show(
        [(f"n{n}", "waiting") for n in range(100)]
    )
    assert screen.getvalue().count("\n") == 23
    assert "and 79 more" in screen.getvalue()


def test_without_a_terminal_a_finished_row_is_printed_once() -> None:
    stream = io.StringIO()
    table = LiveTable(("NODE", "STATE"), shown=True, stream=stream)
    for state in ("waiting", "fetching", "ready", "ready"):
        table.show([("n1", state, "-", "no\x1bescape")])
    table.close()
    assert stream.getvalue() == "n1 ready no\\x1bescape\n"
