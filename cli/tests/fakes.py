"""A controller and an agent with canned answers, and the command as a process next to them."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Request
from virtbus.bus.provisioning import server
from virtbus.schemas.api import WatchReply
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import Event, EventKind
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.states import VmState
from virtbus.schemas.subjects import event
from virtbus.schemas.vm import ImageVolume, VmSpec, Volume
from virtbus.schemas.vm_status import Condition, VmView

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
VERBS = [
    *(
        ("vm", verb)
        for verb in (
            *("create", "get", "list", "update", "delete", "start", "stop", "move", "events"),
            *("restart", "pause", "unpause", "reset", "soft-reboot", "freeze", "thaw"),
        )
    ),
    ("vm", "watch"),
    *(
        ("node", verb)
        for verb in ("list", "get", "audit", "cordon", "uncordon", "drain", "fence", "unfence")
    ),
    ("node", "forget"),
    ("node", "quarantine"),
    ("image", "list"),
    ("image", "pull"),
    ("image", "delete"),
    *(("network", verb) for verb in ("create", "get", "list", "offers", "update", "delete")),
    *(("backup", verb) for verb in ("create", "get", "list", "verify", "delete")),
    *(("backup", verb) for verb in ("serve", "finish")),
    *(("backup-schedule", verb) for verb in ("create", "get", "list", "update", "delete")),
    *(("security-group", verb) for verb in ("create", "get", "list", "update", "delete")),
    *(
        ("volume", verb)
        for verb in (
            "create",
            "get",
            "list",
            "update",
            "adopt",
            "move",
            "attach",
            "detach",
            "delete",
            "fill",
        )
    ),
    *(
        ("snapshot", verb)
        for verb in ("create", "get", "list", "update", "restore", "adopt", "delete")
    ),
    *(("imagename", verb) for verb in ("set", "get", "list", "delete")),
    *(("operation", verb) for verb in ("export", "flatten", "get", "list", "cancel", "delete")),
    ("bus", "status"),
    ("bus", "rebuild"),
]
Handler = Callable[[Request], Awaitable[Any]]


def vm_view(**changes: Any) -> VmView:
    """The VM `web` on node n1, Running by default."""
    known: dict[str, Any] = {
        "uid": UID,
        "namespace": "default",
        "name": "web",
        "node": "n1",
        "epoch": 1,
        "generation": 1,
        "observed_generation": 1,
        "revision": 7,
        "created_ns": 1,
        "state": VmState.RUNNING,
        "spec": VmSpec(volumes=(Volume(name="root", image=ImageVolume(ref="tiny")),)),
        "interfaces": (
            InterfaceStatus(name="default", mac="02:00:5e:10:00:01", addresses=("10.77.0.5/16",)),
        ),
    }
    return VmView(**(known | changes))


READY = Condition(type="Ready", status=True, reason="GuestSaysReady")


@dataclass
class Script:
    """The fake services' answers; tests set them and read the received requests."""

    bus: NatsBus
    node: NatsBus
    files: server.ServerFiles
    handlers: dict[tuple[str, str], Handler] = field(default_factory=dict)
    asked: list[tuple[str, Any, Request]] = field(default_factory=list)
    replies: list[WatchReply] = field(default_factory=list)
    more: asyncio.Condition = field(default_factory=asyncio.Condition)

    def answer(self, resource: str, verb: str, value: Any) -> None:
        """Answer with a value, or raise it if it is an error."""

        async def handle(_: Request) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        self.handlers[resource, verb] = handle

    def data(self, subject_end: str) -> list[Any]:
        """Return the data of the requests to a verb."""
        return [data for subject, data, _ in self.asked if subject.endswith(subject_end)]

    async def dispatch(self, request: Request) -> Any:
        self.asked.append((request.subject, request.data, request))
        resource, verb = request.subject.split(".")[3:5]
        if (resource, verb) == ("vm", "watch"):
            return await self._watch(request)
        handler = self.handlers.get((resource, verb))
        if handler is None:
            raise VirtbusError(Code.NOT_FOUND, "unscripted", f"{resource}.{verb} has no answer")
        return await handler(request)

    async def _watch(self, request: Request) -> None:
        told = 0
        while True:
            async with self.more:
                while told >= len(self.replies):
                    await self.more.wait()
            await request.stream(self.replies[told])
            told += 1

    async def see(self, *replies: WatchReply) -> None:
        """Send these replies at the start of every watch, also of later ones."""
        async with self.more:
            self.replies += replies
            self.more.notify_all()

    async def happen(self, kind: EventKind, **more: Any) -> None:
        """Publish an event as the node would."""
        fact = Event(kind=kind, uid=UID, node="n1", name="web", namespace="default", **more)
        await self.node.publish(event("n1", UID, kind), fact)


@dataclass(frozen=True)
class Ended:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(files: server.ServerFiles | None = None) -> dict[str, str]:
    """The environment of a command that knows only the test's bus."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTBUS_", "XDG_"))}
    env |= {"COLUMNS": "100", "HOME": "/nonexistent", "VIRTBUS_RUN_DIR": "/nonexistent"}
    if files is not None:
        env["VIRTBUS_CREDS"] = str(files.creds("client"))
    return env


async def start(*arguments: str, env: dict[str, str], **pipes: Any) -> asyncio.subprocess.Process:
    """Start the command as its own process."""
    streams = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "virtbus.cli",
        *arguments,
        env=env,
        **({**streams, "stderr": asyncio.subprocess.PIPE} | pipes),
    )


async def run(*arguments: str, env: dict[str, str], stdin: str = "") -> Ended:
    """Run the command to its end."""
    process = await start(*arguments, env=env)
    out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


Cli = Callable[..., Awaitable[Ended]]
