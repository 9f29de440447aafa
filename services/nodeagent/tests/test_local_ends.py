"""The container runtime of the node ends a guest over the agent's socket, without the bus."""

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.pretended_node import (
    NODE,
    Domains,
    Node,
    eventually,
    in_state,
    record,
    uid,
)

from virtbus.nodeagent import local_ends
from virtbus.nodeagent.core.ports import DomainChange, DomainEvent, Ending
from virtbus.nodeagent.edge import local_socket
from virtbus.nodeagent.edge.record_files import AgentFiles
from virtbus.nodeagent.local_ends import LocalEnds
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.local_end import LocalEnd, LocalEnded
from virtbus.schemas.vm import RunStrategy
from virtbus.schemas.wire import encode, read

A = uid(1)
OWNER = "cri-n1"


class Telling(Domains):
    """libvirt tells that a destroyed guest has ended."""

    async def destroy(self, of: str, *, forced: bool = False) -> None:
        await super().destroy(of, forced=forced)
        self.tell(DomainEvent(of, DomainChange.ENDED))


@asynccontextmanager
async def running(tmp_path: Path, owner: str = OWNER) -> AsyncIterator[Node]:
    """A node whose runtime has one running guest, and the agent's socket."""
    node = Node(tmp_path)
    node.domains = Telling()
    await node.join()
    made = record()
    spec = made.spec.model_copy(update={"run_strategy": RunStrategy.MANUAL})
    await node.put(made.model_copy(update={"owner": owner, "spec": spec}))
    async with node.agent() as agent:
        await eventually(in_state(node, "Running"))
        ends = LocalEnds(node.domains, node.freezes, node.files)
        ends.guests = agent.vms.actors
        async with local_socket.serving(tmp_path / "agent.sock", ends.end):
            yield node


@asynccontextmanager
async def restarted_without_the_bus(tmp_path: Path, owner: str = OWNER) -> AsyncIterator[Node]:
    """The node after its agent was started again: it has only its files and libvirt."""
    async with running(tmp_path, owner) as node:
        pass
    files = AgentFiles(node.settings.state_dir, node.settings.run_dir)
    files.open(NODE)
    ends = LocalEnds(node.domains, node.freezes, files)
    try:
        async with local_socket.serving(tmp_path / "agent.sock", ends.end):
            yield node
    finally:
        files.close()


async def end(tmp_path: Path, grace_s: int = 0, of: str = A) -> LocalEnded:
    """Ask for an end."""
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "agent.sock"))
    body = encode(LocalEnd(uid=of, owner=OWNER, grace_s=grace_s))
    writer.write(len(body).to_bytes(4, "big") + body)
    size = int.from_bytes(await reader.readexactly(4), "big")
    answer = read(LocalEnded, await reader.readexactly(size))
    writer.close()
    return answer


async def test_a_guest_is_destroyed_after_its_grace_and_stays_off(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        done = await end(tmp_path, grace_s=1)
        assert done.last_exit is not None
        assert done.last_exit.how == "ended"
        assert [what for what, _ in node.domains.done][-2:] == ["shutdown", "destroy"]
        assert (await end(tmp_path)).last_exit == done.last_exit
        starts = [what for what, _ in node.domains.done if what == "start"]
        assert starts == ["start"]


async def test_a_guest_that_shuts_down_in_time_is_not_destroyed(tmp_path: Path) -> None:
    async with running(tmp_path) as node, asyncio.TaskGroup() as group:
        ended = group.create_task(end(tmp_path, grace_s=30))
        while ("shutdown", A) not in node.domains.done:
            await asyncio.sleep(0.01)
        node.domains.end(A, Ending.SHUT_DOWN, DomainChange.SHUT_DOWN)
        done = await ended
        assert done.last_exit is not None
        assert done.last_exit.how == "shut down"
        assert ("destroy", A) not in node.domains.done


async def test_a_guest_that_is_being_stopped_is_ended_before_the_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        spec = {"run_strategy": RunStrategy.MANUAL, "termination_grace_s": 3600}
        halted = record(owner=OWNER, powered=False, power_epoch=1, spec=spec)
        await node.put(halted)
        await eventually(in_state(node, "Stopping"))
        done = await end(tmp_path)
        assert done.last_exit is not None
        assert ("destroy", A) in node.domains.done


async def test_a_guest_that_starts_is_ended_once_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, go = Node(tmp_path), asyncio.Event()
    node.domains = Telling()
    start = node.domains.start

    async def held(of: str, **more: Any) -> None:
        await go.wait()
        await start(of, **more)

    monkeypatch.setattr(node.domains, "start", held)
    await node.join()
    await node.put(record(owner=OWNER, spec={"run_strategy": RunStrategy.MANUAL}))
    async with node.agent() as agent:
        await eventually(in_state(node, "Starting"))
        ends = LocalEnds(node.domains, node.freezes, node.files)
        ends.guests = agent.vms.actors
        monkeypatch.setattr(local_ends, "START_S", 0.0)
        with pytest.raises(VirtbusError) as refused:
            await ends.end(LocalEnd(uid=A, owner=OWNER))
        assert refused.value.reason == "end_slow"
        monkeypatch.undo()
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(ends.end(LocalEnd(uid=A, owner=OWNER)))
            go.set()
        assert ended.result().last_exit is not None
        await eventually(in_state(node, "Succeeded"))
        assert [what for what, _ in node.domains.done] == ["start", "destroy"]


@pytest.mark.parametrize("grace_s", [0, 1])
async def test_an_agent_that_has_not_reached_the_bus_ends_guests_by_its_files(
    tmp_path: Path, grace_s: int
) -> None:
    async with restarted_without_the_bus(tmp_path) as node:
        done = await end(tmp_path, grace_s=grace_s)
        assert done.error is None
        assert done.last_exit is not None
        assert done.last_exit.how == "ended"
        assert [("shutdown", A) in node.domains.done, node.domains.done[-1]] == [
            grace_s > 0,
            ("destroy", A),
        ]
        assert (await end(tmp_path)).error is None
        unknown = await end(tmp_path, of=uid(2))
        assert unknown.error is not None
        assert unknown.error.reason == "vm_not_here"
    async with node.agent():
        await eventually(in_state(node, "Succeeded"))
    assert [what for what, _ in node.domains.done if what == "start"] == ["start"]


async def test_such_an_agent_ends_no_vm_of_another_owner(tmp_path: Path) -> None:
    async with restarted_without_the_bus(tmp_path, owner="client") as node:
        refused = await end(tmp_path)
        assert refused.error is not None
        assert refused.error.reason == "not_its_vm"
        assert ("destroy", A) not in node.domains.done


async def test_only_the_runtimes_own_vms_are_ended(tmp_path: Path) -> None:
    async with running(tmp_path, owner="client") as node:
        refused = await end(tmp_path)
        assert refused.error is not None
        assert (refused.error.code, refused.error.reason) == (Code.DENIED, "not_its_vm")
        unknown = await end(tmp_path, of=uid(2))
        assert unknown.error is not None
        assert unknown.error.reason == "vm_not_here"
        assert ("destroy", A) not in node.domains.done


async def test_hostile_bytes_end_their_own_connection(tmp_path: Path) -> None:
    async with running(tmp_path):
        for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x04abcd", b""):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "agent.sock"))
            writer.write(data)
            writer.write_eof()
            await reader.read()
            writer.close()
        mode = (tmp_path / "agent.sock").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
        assert (await end(tmp_path)).error is None
    assert not (tmp_path / "agent.sock").exists()
