"""Runs `virtbus up`: starts the bus and services in order, and stops them in reverse order."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Protocol

from virtbus.bus.provisioning.server import ServerFiles
from virtbus.bus.runtime import state_version
from virtbus.bus.runtime.process import notify, stop_signals
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.up import banner
from virtbus.cli.up.child import Child
from virtbus.cli.up.lock import make, only_one
from virtbus.cli.up.plan import BUS_ONLY, NODE_ONLY, Place
from virtbus.cli.up.terminal import Terminal
from virtbus.schemas.errors import VirtbusError

READY_S = 60.0
"""Time after which `up` reports the services that are not ready. Then `up` continues to wait."""


class Keeper(Protocol):
    """The bus while `up` runs: local (`BusKeeper`) or remote (`RemoteBus`)."""

    @property
    def url(self) -> str: ...

    async def keep(self) -> None:
        """Do the bus's background work; never returns by itself."""

    async def vms_here(self) -> int | None:
        """Return how many VMs this node has; None if unknown."""


async def up(
    place: Place,
    bus: AbstractAsyncContextManager[Keeper],
    terminal: Terminal,
    environ: Mapping[str, str],
) -> None:
    """Run the bus and the services until SIGINT or SIGTERM.

    Raises:
        CliError: another `up` uses the state directory, its content is of another version, or the
            bus fails.
    """
    make(*place.folders)
    try:
        state_version.check(place.state_dir)
    except VirtbusError as error:
        raise CliError(Exit.REFUSED, error.reason, str(error)) from error
    with only_one(place.state_dir), ExitStack() as stack:
        stop_signal = stack.enter_context(stop_signals())
        reader, writer = os.pipe()
        stack.callback(os.close, reader)
        # `writer` is open while `up` lives. When `up` ends, the services read EOF and stop.
        stack.callback(os.close, writer)
        what = "bus and controller" if place.runs == BUS_ONLY else f"node {place.node}"
        terminal.say(f"starting {what} in {place.state_dir}")
        async with bus as keeper:
            terminal.say(f"bus ready at {keeper.url}")
            children = [
                Child(place, service, terminal, environ, parent_fd=reader)
                for service in place.services
            ]
            await _serve(place, keeper, children, terminal, stop_signal)
    terminal.say("stopped")


async def _serve(
    place: Place,
    keeper: Keeper,
    children: list[Child],
    terminal: Terminal,
    stop_signal: "asyncio.Future[str]",
) -> None:
    async with asyncio.TaskGroup() as group:
        watching = [
            group.create_task(keeper.keep()),
            group.create_task(_announce(place, children, terminal)),
        ]
        for child in children:
            group.create_task(child.run())
        why = await stop_signal
        last = "" if place.runs == NODE_ONLY else ": services first, the bus last"
        terminal.say(f"stopping ({why}){last}")
        notify("STOPPING=1")
        count = await keeper.vms_here()
        for child in reversed(children):
            await child.stop()
        for task in watching:
            task.cancel()
    if place.runs == BUS_ONLY:
        return
    if count is None:
        terminal.say("VMs of this node, if any, keep running")
    else:
        terminal.say(f"{count} VM{'' if count == 1 else 's'} of this node keep running")


async def _announce(place: Place, children: list[Child], terminal: Terminal) -> None:
    try:
        async with asyncio.timeout(READY_S):
            for child in children:
                await child.readiness.wait()
                terminal.say(f"{child.service} ready")
    except TimeoutError:
        late = [child.service for child in children if not child.readiness.is_ready]
        hint = "" if place.runs != NODE_ONLY else "; does a controller run on that bus?"
        terminal.say(
            f"not ready after {READY_S:g} s: {', '.join(late)}; see above{hint}", "WARNING"
        )
        for child in children:
            await child.readiness.wait()
    text = banner.node_lines(place) if place.runs == NODE_ONLY else _bus_lines(place)
    columns = shutil.get_terminal_size().columns
    terminal.plain(banner.box(text, drawn=sys.stdout.isatty(), columns=columns))
    notify("READY=1")


def _bus_lines(place: Place) -> list[str]:
    creds = json.loads(place.client_creds.read_text(encoding="utf-8"))
    return banner.lines(place, creds, ServerFiles(place.state_dir, place.run_dir).log)
