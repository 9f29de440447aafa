"""Implements `virtbus backup serve|finish`: offers a running guest's disks to NBD clients.

A reading is the operation that serves the disks. A reader is the program that reads them.
"""

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from virtbus.bus.runtime.ids import uuid7
from virtbus.cli import completion_sources, durations, operation, output
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples
from virtbus.cli.progress import Steps
from virtbus.cli.vm.serial import node_subject, owner
from virtbus.cli.vm.target import namespace_option

SERVED = "serve"
"""The step of the operation in which readers can connect."""
VARIABLE = "VIRTBUS_NBD_SOCKET"
POLL_S = 1.0
AWAY = frozenset({Exit.UNAVAILABLE, Exit.UNKNOWN})
"""Exit codes of requests to repeat, because a controller or the bus does not answer."""


@click.command(
    epilog=examples(
        """
        virtbus backup serve web -- ./read-disks.sh
        virtbus backup serve web --since ID --socket /run/web.sock
        """
    )
)
@click.argument("vm", shell_complete=completion_sources.vms)
@click.argument("command", nargs=-1, metavar="[-- COMMAND...]")
@click.option(
    "--since", metavar="ID", help="Also report the blocks that were written since the reading ID."
)
@click.option(
    "--for",
    "within_s",
    default="1h",
    show_default=True,
    metavar="TIME",
    callback=durations.whole_seconds,
    help="Time limit of the reading. It fails if it is not finished by then.",
)
@click.option("--socket", "path", type=Path, metavar="PATH", help="The UNIX socket to listen on.")
@click.option(
    "--id", "id_", metavar="UUID", help="An id of your choice: the same command may be repeated."
)
@namespace_option
@verb
def serve(
    invocation: Invocation,
    *,
    vm: str,
    namespace: str,
    command: tuple[str, ...],
    path: Path | None,
    id_: str | None,
    **flags: Any,
) -> None:
    """Offer all disks of the running VM, as of one instant, to NBD clients on this computer.

    Each disk is a read-only NBD export with the disk's name. The bytes travel over the bus. COMMAND
    finds the socket in VIRTBUS_NBD_SOCKET. If COMMAND exits with 0, the reading is finished;
    otherwise the reading is cancelled. Without COMMAND, `virtbus backup finish ID` ends the
    reading, Ctrl-C or SIGTERM cancels it, and -o json prints only the id and the socket.

    --since takes the ID of the last finished reading. Each export then also has the metadata
    context qemu:dirty-bitmap:changes. The guest keeps running during a reading, but its snapshots
    and backups wait.
    """
    asked = {"vm": vm, "namespace": namespace, "id": id_ or uuid7()}
    asked |= {name: value for name, value in flags.items() if value is not None}
    until_s = time.monotonic() + flags["within_s"]
    with _cancelled_unless_done(invocation, str(asked["id"])), ExitStack() as undo:
        view = _until_served(invocation, invocation.call("backup", "serve", asked))
        if path is None:
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="virtbus-nbd-"))
            path = Path(folder, "nbd.sock")
        view = asyncio.run(_forward(invocation, view, path, command, until_s))
    if command:
        view = _ask(invocation, ("backup", "finish"), {"id": asked["id"]}, until_s)
    ended = operation.until_ended(invocation, view)
    if command or invocation.for_eyes:  # in the remaining case, `_tell` printed the only document
        invocation.show(ended, lambda: operation.table([ended]))
    operation.refuse_failed(ended)


@click.command(epilog=examples("virtbus backup finish 0192f0c1-2d3e-7abc-8def-0123456789ab"))
@click.argument("id_", metavar="ID")
@verb
def finish(invocation: Invocation, *, id_: str) -> None:
    """Finish the reading ID, whose reader has all data. The next reading may name it by --since."""
    view = operation.until_ended(invocation, invocation.call("backup", "finish", {"id": id_}))
    invocation.show(view, lambda: operation.table([view]))
    operation.refuse_failed(view)


@contextmanager
def _cancelled_unless_done(invocation: Invocation, id_: str) -> Iterator[None]:
    """Cancel the reading if the body raises an exception, also after SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except BaseException as error:
        if isinstance(error, CliError) and error.reason == "id_taken":
            raise  # the id belongs to another operation
        try:
            invocation.call("operation", "cancel", {"id": id_})
        except CliError as failed:
            if failed.exit_code in AWAY:  # other refusals mean that the reading is not running
                _complain(f"it is not known to be cancelled: `virtbus operation cancel {id_}`")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _ask(
    invocation: Invocation, what: tuple[str, str], data: Mapping[str, Any], until_s: float
) -> dict[str, Any]:
    """Return a request's answer. Until `until_s`, repeat a request that gets no answer."""
    while True:
        try:
            return invocation.call(*what, data)
        except CliError as error:
            if error.exit_code not in AWAY or time.monotonic() > until_s:
                raise
        time.sleep(POLL_S)


def _until_served(invocation: Invocation, view: dict[str, Any]) -> dict[str, Any]:
    steps, pause_s = Steps(shown=invocation.for_eyes), operation.pauses_s()
    try:
        while view.get("phase") not in operation.ENDED and view.get("step") != SERVED:
            operation.show_progress(steps, view)
            time.sleep(next(pause_s))
            view = invocation.call("operation", "get", {"id": view.get("id")})
    finally:
        steps.close()
    if view.get("phase") in operation.ENDED:
        operation.refuse_failed(view)
    return view


async def _forward(
    invocation: Invocation,
    view: dict[str, Any],
    path: Path,
    command: tuple[str, ...],
    until_s: float,
) -> dict[str, Any]:
    """Serve the socket until COMMAND or the reading ends; return the reading.

    Raises:
        CliError: COMMAND failed.
        CliError: `local_socket`: this process cannot listen on `path`.
        CliError: as `_ask`.
    """
    from virtbus.bus.runtime.tasks import background
    from virtbus.cli.vm import forwarding  # loads slowly
    from virtbus.schemas.streams import DisksRead

    subject, uid = node_subject(view, "nbd"), str(view.get("id"))
    async with (
        forwarding.reaching(invocation.client(), subject, uid, owner()) as target,
        background() as tasks,
    ):
        want = DisksRead(uid=uid, owner=owner())
        try:
            await forwarding.listen_unix(target, tasks, path, want, _complain)
        except OSError as error:
            message = f"cannot listen on {path}: {error.strerror or error}"
            raise CliError(Exit.REFUSED, "local_socket", message) from None
        with ExitStack() as undo:
            undo.callback(path.unlink, missing_ok=True)
            if command:
                await _run(command, invocation.environ | {VARIABLE: str(path)}, uid)
                return view
            _tell(invocation, uid, path)
            what = "operation", "get"
            while view.get("phase") not in operation.ENDED:
                await asyncio.sleep(POLL_S)
                view = await asyncio.to_thread(_ask, invocation, what, {"id": uid}, until_s)
            return view


async def _run(command: tuple[str, ...], environ: Mapping[str, str], id_: str) -> None:
    try:
        process = await asyncio.create_subprocess_exec(*command, env=dict(environ))
    except OSError as error:
        message = f"cannot run {command[0]}: {error.strerror}"
        raise CliError(Exit.REFUSED, "no_command", message) from None
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        message = f"the command ended with {code}, so the reading {id_} is cancelled"
        raise CliError(Exit.REFUSED, "reader_failed", message)


def _tell(invocation: Invocation, id_: str, path: Path) -> None:
    value = {"id": id_, "socket": str(path)}
    if invocation.for_eyes:
        output.write(f"nbd+unix:///DISK?socket={path}")
        output.write(f"`virtbus backup finish {id_}` when the reader has everything", sys.stderr)
    else:
        output.write(output.render(value, invocation.style))
    sys.stdout.flush()


def _complain(text: str) -> None:
    output.write(output.safe(text), sys.stderr)
