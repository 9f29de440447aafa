"""Runs an operator's command that turns a Down node off; exit code 0 is the proof.

Only the holder of the fleet lease runs the command, for one node at a time. While the brake is on
(many nodes are silent at once), no node is turned off.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.lease import LeaderTerm
from virtbus.controller.edge.node_api import NodeApi
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import check_id
from virtbus.schemas.node import NodeState

log = logging.getLogger(__name__)

LOOK_S = 1.0
RETRY_S = 30.0
SAID_BYTES = 500
EXIT_S = 0.05
"""The interval at which the command's exit code is polled."""
OUTPUT_S = 1.0
"""Time limit for the rest of the output, after the command and its children have ended."""


class FenceResult(NamedTuple):
    """The command's result; `output` is its exit code and the end of its output, or an error."""

    done: bool
    output: str


Command = Callable[[str], Awaitable[FenceResult]]
"""Takes a node's id and turns the node off; a failure is in the result."""


def command(argv: Sequence[str], timeout_s: float) -> Command:
    """Return a Command that runs `argv` without a shell; the node's id replaces `{node}`."""

    async def run(node: str) -> FenceResult:
        words = [word.replace("{node}", check_id(node)) for word in argv]
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return FenceResult(False, f"{words[0]}: {error.strerror}")
        kept = bytearray()
        async with background() as tasks:
            tasks.start(_keep_end(process, kept))
            try:
                async with asyncio.timeout(timeout_s):
                    code = await _exit_code(process)
            except TimeoutError:
                return FenceResult(False, f"did not end in {timeout_s:g} s")
            finally:  # the command's child processes have to end, too
                with suppress(ProcessLookupError, PermissionError, TimeoutError):
                    os.killpg(process.pid, signal.SIGKILL)
                    async with asyncio.timeout(OUTPUT_S):  # the kernel may hold it in a call
                        await _exit_code(process)
                await tasks.settle(OUTPUT_S)
        output = " ".join(kept.decode("utf-8", "replace").split())
        return FenceResult(code == 0, f"exit code {code}" + (f": {output}" if output else ""))

    return run


async def _exit_code(process: asyncio.subprocess.Process) -> int:
    """Wait for the exit code only. `Process.wait` also waits for children that hold the pipe."""
    while process.returncode is None:  # noqa: ASYNC110  asyncio has no event for this
        await asyncio.sleep(EXIT_S)
    return process.returncode


async def _keep_end(process: asyncio.subprocess.Process, kept: bytearray) -> None:
    assert process.stdout is not None  # noqa: S101  it is a pipe
    while chunk := await process.stdout.read(4096):
        kept.extend(chunk)
        del kept[:-SAID_BYTES]


class FenceAgent:
    """Fences Down nodes that have VMs, while the fleet lease is held."""

    def __init__(self, fleet: Fleet, nodes: NodeApi, turn_off: Command) -> None:
        self._fleet = fleet
        self._nodes = nodes
        self._turn_off = turn_off
        self._tried_s: dict[str, float] = {}

    async def run(self, tenure: LeaderTerm) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for node in self._fleet.known_nodes():
                if not self._due(node):
                    continue
                self._tried_s[node] = asyncio.get_running_loop().time()
                tenure.check()
                try:
                    await self._fence(node, tenure)
                except (BusError, VirtbusError) as error:
                    log.warning("%s: %s", node, error, extra={"code": "fence_retry", "node": node})

    def _down(self, node: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        return not self._fleet.braked and self._fleet.node_state(node, now_s) is NodeState.DOWN

    def _due(self, node: str) -> bool:
        """Return True for an unfenced Down node with VMs, if RETRY_S passed since the last try."""
        now_s = asyncio.get_running_loop().time()
        return (
            self._down(node)
            and node in self._fleet.promises.on
            and self._fleet.node_spec_of(node).fenced is None
            and now_s - self._tried_s.get(node, -RETRY_S) >= RETRY_S
        )

    async def _fence(self, node: str, tenure: LeaderTerm) -> None:
        seen = self._fleet.nodes.get(node)
        log.warning("%s is down: fencing it", node, extra={"code": "fencing", "node": node})
        answer = await self._turn_off(node)
        if not answer.done:
            extra = {"code": "fence_failed", "node": node}
            log.error(
                "%s is not fenced: %s; retry in %.0f s, or declare it off: `virtbus node "
                "fence %s --confirm HOW`",
                node,
                answer.output,
                RETRY_S,
                node,
                extra=extra,
            )
            return
        if not self._down(node):
            extra = {"code": "fence_void", "node": node}
            log.warning("%s is back, or many nodes are silent: not fenced", node, extra=extra)
            return
        revision = tenure.check()
        await self._nodes.prove(node, self._nodes.proof(seen, "agent", answer.output), revision)
