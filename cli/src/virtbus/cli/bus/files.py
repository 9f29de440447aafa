"""Implements `virtbus bus backup` and `virtbus bus restore`."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import click

from virtbus.cli import units
from virtbus.cli.failures import CliError, Exit
from virtbus.cli.invocation import Invocation, verb
from virtbus.cli.lazy import examples

if TYPE_CHECKING:
    from virtbus.bus.client.nats_bus import NatsBus
    from virtbus.bus.provisioning.backup import Backup

T = TypeVar("T")


@click.command(
    epilog=examples(
        """
        virtbus bus backup /var/backups/virtbus-$(date +%F)
        virtbus bus backup --without-secrets records
        """
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--without-secrets",
    is_flag=True,
    help="Leave out the VMs' secrets, and the keys that sign records.",
)
@verb
def backup(invocation: Invocation, *, file: Path, without_secrets: bool) -> None:
    """Write the desired state of the bus to FILE while the bus is running.

    Run it on the host with the bus's admin credentials. FILE has the VMs and their names, volumes,
    snapshots, networks, security groups, image names, backup schedules, recent deletes and the
    desired state of hosts. It also has the VMs' secrets (such as cloud-init user data) in plain
    text, and the keys by which controllers sign records. Only the owner of FILE can read it; keep
    its mode. An existing FILE is replaced at the end.
    """
    from virtbus.bus.provisioning.backup import take

    taken = _with_bus(invocation, lambda bus: take(bus, secrets=not without_secrets))
    size = _write(file, taken)
    value = {"file": str(file), "bytes": size, "vms": len(taken.records)}
    value |= {"secrets": len(taken.secrets), "deleted": len(taken.marked)}
    invocation.show(
        value,
        lambda: (
            f"{len(taken.records)} VM(s), {len(taken.secrets)} secret(s) in {units.size(size)}: "
            f"{file}"
        ),
    )
    if taken.is_secret:
        invocation.note("the file holds secrets in the clear; it is readable by its owner only")


@click.command(
    epilog=examples(
        """
        virtbus bus restore /var/backups/virtbus-2026-11-21
        virtbus bus rebuild                  then: restore newer records from hosts
        """
    )
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@verb
def restore(invocation: Invocation, *, file: Path) -> None:
    """Write FILE into an empty bus.

    Run it on the host with the bus's admin credentials; it may be repeated. The agents of hosts
    that had joined the lost bus do nothing to VMs until `virtbus bus rebuild`. A VM may have been
    moved, changed or deleted after the backup. Then a host's copy of the VM's record is newer, and
    `virtbus bus rebuild` uses it.
    """
    from virtbus.bus.provisioning.backup import parse, put_back

    with opened(file) as content:
        kept = parse(content)
        done = _with_bus(invocation, lambda bus: put_back(bus, kept))
    value: dict[str, object] = {"vms": done.vms, "written": done.written, "present": done.present}
    value["deleted"] = done.deleted
    invocation.show(value, lambda: f"{len(done.vms)} VM(s) restored, {done.present} key(s) there")
    if done.deleted:
        invocation.note(f"{len(done.deleted)} object(s) were deleted on this bus and stay deleted")
    invocation.note("now start all hosts, then: virtbus bus rebuild")


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a backup file. A BackupError of the context's body becomes a CliError."""
    from virtbus.bus.provisioning.backup import BackupError

    try:
        with file.open("rb") as content:
            yield content
    except BackupError as error:
        raise CliError(Exit.REFUSED, "backup", f"{file}: {error}") from error


def _with_bus(invocation: Invocation, work: "Callable[[NatsBus], Awaitable[T]]") -> T:
    from virtbus.bus.client.connection import connect
    from virtbus.bus.errors import BusError

    async def run() -> T:
        async with connect(invocation.admin(), name="backup") as bus:
            return await work(bus)

    try:
        return asyncio.run(run())
    except BusError as error:
        hint = "run it as root where the bus runs, or name the admin's file with --creds"
        raise CliError(Exit.UNAVAILABLE, "bus", str(error), hint=hint) from error


def _write(path: Path, taken: "Backup") -> int:
    from virtbus.bus.provisioning.backup import lines

    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(lines(taken))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size
