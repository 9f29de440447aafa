"""The fence agent: its targets, its times, and the value of its proof (F24)."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.controller.tests.fleets import uid
from services.controller.tests.test_departures import FREE, Site, site
from services.controller.tests.test_vm_api import refused
from services.controller.tests.virtual import run, world

from virtbus.bus.runtime.tasks import background
from virtbus.controller.edge.fencing import FenceAgent, FenceResult, command
from virtbus.controller.edge.lease import LeaderTerm

FOREVER = LeaderTerm("fleet", 7, float("inf"))


class Switch:
    """A fence command with a test's answers."""

    def __init__(self) -> None:
        self.pulled: list[str] = []
        self.answer = FenceResult(True, "exit code 0")

    async def __call__(self, node: str) -> FenceResult:
        self.pulled.append(node)
        await asyncio.sleep(1)
        return self.answer


@asynccontextmanager
async def agent(there: Site) -> AsyncIterator[Switch]:
    """The first controller has a fence agent."""
    switch = Switch()
    controller = there.made.controllers["c1"]
    async with background() as tasks:
        tasks.start(FenceAgent(controller._fleet, controller._nodes, switch).run(FOREVER))
        yield switch


@site()
async def test_a_down_node_is_fenced_and_its_vms_start_elsewhere_within_a_minute(
    there: Site,
) -> None:
    async with agent(there) as switch, there.host("n2").on():
        n1 = there.host("n1")
        async with n1.on():
            await there.until(lambda: "n1" in there.made.controllers["c1"]._fleet.nodes)
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.node("uncordon", "n2")
        off_s = asyncio.get_running_loop().time()
        await there.runs_on(1, "n2")
        assert asyncio.get_running_loop().time() - off_s < 60
        assert switch.pulled == ["n1"]
        node_spec = (await there.node("get", "n1")).node.node_spec
        assert node_spec is not None
        assert node_spec.fenced is not None
        assert (node_spec.fenced.by, node_spec.fenced.instance, node_spec.lease_revision) == (
            "agent",
            "n1-1",
            7,
        )


@site()
async def test_a_failed_command_proves_nothing_and_is_retried(there: Site) -> None:
    async with agent(there) as switch, there.host("n2").on():
        switch.answer = FenceResult(False, "exit code 1: no route to the BMC")
        async with there.host("n1").on():
            await there.until(lambda: "n1" in there.made.controllers["c1"]._fleet.nodes)
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.node("uncordon", "n2")
        await asyncio.sleep(100)
        assert 2 <= len(switch.pulled) <= 4
        assert uid(1) not in there.guests.running
        switch.answer = FenceResult(True, "exit code 0")
        await there.runs_on(1, "n2")


@site()
async def test_nodes_that_fall_silent_together_are_never_turned_off(there: Site) -> None:
    async with agent(there) as switch, there.host("n3").on():
        async with there.host("n1").on(), there.host("n2").on():
            await asyncio.sleep(5)
            for number in range(1, 5):
                await there.made.vm("create", name=f"v{number}", image="tiny", uid=uid(number))
            await asyncio.sleep(5)
        await asyncio.sleep(3600)
        assert switch.pulled == []


@site()
async def test_a_node_that_is_back_before_the_command_has_ended_is_not_fenced(
    there: Site,
) -> None:
    async with agent(there) as switch, there.host("n2").on():
        n1 = there.host("n1")
        async with n1.on():
            await there.until(lambda: "n1" in there.made.controllers["c1"]._fleet.nodes)
            await there.node("cordon", "n2")
            await there.vm(1, "n1", **FREE)
            await there.node("uncordon", "n2")
        await there.until(lambda: switch.pulled)
        async with n1.on():
            await asyncio.sleep(60)
            assert there.guests.running == {uid(1): "n1"}
            node_spec = (await there.node("get", "n1")).node.node_spec
            assert node_spec is None or node_spec.fenced is None


def test_a_fence_with_an_old_lease_revision_is_refused() -> None:
    async def body() -> None:
        async with world(nodes=1) as made:
            there = Site(made)
            nodes = made.controllers["c1"]._nodes
            await there.until(lambda: "n1" in made.controllers["c1"]._fleet.nodes)
            await nodes.prove("n1", nodes.proof(None, "agent", "exit code 0"), 9)
            error = await refused(nodes.prove("n1", nodes.proof(None, "agent", "late"), 8))
            assert error.reason == "lease_lost"

    run(body)


# --- command ------------------------------------------------------------------------------


async def test_the_command_gets_the_node_as_an_argument_and_no_shell_sees_it() -> None:
    script = "import sys; print(sys.argv[1:]); sys.exit(0)"
    answer = await command([sys.executable, "-c", script, "--node={node}", "$HOME;x"], 20)("n1")
    assert answer == FenceResult(True, "exit code 0: ['--node=n1', '$HOME;x']")


async def test_a_failed_missing_or_hung_command_proves_nothing(tmp_path: Path) -> None:
    failed = await command([sys.executable, "-c", "import sys; sys.exit('no BMC')"], 20)("n1")
    assert failed == FenceResult(False, "exit code 1: no BMC")
    missing = await command([str(tmp_path / "none")], 20)("n1")
    assert not missing.done
    hung = await command([sys.executable, "-c", "import time; time.sleep(600)"], 0.3)("n1")
    assert hung == FenceResult(False, "did not end in 0.3 s")


async def test_a_child_in_the_background_ends_with_a_command_that_has_ended() -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    answer = await command([sys.executable, "-c", script], 20)("n1")
    assert answer.done, answer
    async with asyncio.timeout(5):
        while _runs(answer.output.split()[-1]):
            await asyncio.sleep(0.01)


def _runs(pid: str) -> bool:
    try:
        return " Z " not in Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_only_the_end_of_a_long_output_is_kept() -> None:
    script = "print('x' * 300_000); print('off')"
    answer = await command([sys.executable, "-c", script], 20)("n1")
    assert (answer.done, answer.output[-5:], len(answer.output) < 600) == (True, "x off", True)
