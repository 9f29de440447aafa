"""Implements the table's actions; each can be repeated, and interrupted at any step."""

import asyncio
import hashlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from virtbus.bus import tracing
from virtbus.bus.backoff import delays
from virtbus.bus.ports import BusError
from virtbus.nodeagent.core.lifecycle import UP, Event, Phase
from virtbus.nodeagent.core.recovery import FOUND
from virtbus.nodeagent.pausing import follow
from virtbus.nodeagent.repeating import RETRY_S, Work, until_done
from virtbus.nodeagent.starting import arm, define, has_nics
from virtbus.nodeagent.tools import Tools
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError
from virtbus.schemas.events import Kind
from virtbus.schemas.nodework import NetReady, Release, Released
from virtbus.schemas.quarantine import Keep
from virtbus.schemas.records import read_stored
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.wire import validate

if TYPE_CHECKING:
    from virtbus.nodeagent.guest import Guest

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0
ADOPT_LIMIT_S = 60.0
WRITING = frozenset({"prepare", "save"})
"""Tasks that write files of the VM in threads, which a cancellation does not end."""
LEAVING = frozenset({Phase.RELEASING, Phase.RELEASED, Phase.GONE})
"""Phases in which no file of the VM may be created again."""


class Doing:
    """The long actions of one VM, as child tasks of its task group."""

    def __init__(self, guest: "Guest", tools: Tools) -> None:
        self._guest = guest
        self._tools = tools
        self.group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._prepared = 0
        self._saved: VmRecord | None = None
        self._saving = asyncio.Lock()
        self._down = asyncio.Event()
        """Set once the guest that is being destroyed has ended for any reason."""

    @property
    def _record(self) -> VmRecord:
        return self._guest.record

    def _spawn(self, name: str, work: Work, on_error: Event | None = None) -> None:
        """Run `work` as the VM's child of that name; replace an earlier one.

        An unexpected error is logged with traceback and becomes `on_error`, so that it affects no
        other VM and leaves this one in a defined phase.
        """
        assert self.group is not None  # noqa: S101  set before the first event is taken
        earlier = self._tasks.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        task = self._tasks[name] = self.group.create_task(self._guarded(work, on_error))
        if name in WRITING:
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _guarded(self, work: Work, on_error: Event | None) -> None:
        try:
            await work()
        except Exception:
            extra = {"code": "action_failed", "uid": self._record.uid}
            log.exception("an action failed unexpectedly", extra=extra)
            if on_error is not None:
                self._guest.post(on_error)

    def cancel(self) -> None:
        """Cancel all children."""
        for task in self._tasks.values():
            task.cancel()

    def _stop(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()

    # --- the record on disk ---------------------------------------------------------------
    def save(self) -> None:
        """Write the latest record to disk in the background."""
        running = self._tasks.get("save")
        if self.group is None or self._guest.phase in LEAVING:
            return
        if self._saved != self._record and (running is None or running.done()):
            self._spawn("save", self._save_soon)

    async def _save_soon(self) -> None:
        try:
            await self._save()
        except VirtbusError as error:
            extra = {"code": error.reason, "uid": self._record.uid}
            log.warning("cannot write the record to disk: %s", error, extra=extra)

    async def _save(self) -> None:
        """Durable on return; raises VirtbusError."""
        async with self._saving:
            while self._saved != self._record:
                record = self._record
                await self._tools.files.write(record)
                self._saved = record

    # --- start -------------------------------------------------------------------------------
    def prepare(self) -> None:
        self._spawn("prepare", self._prepare, Event.PARTS_FAILED)

    async def _prepare(self) -> None:
        """Write record and seed, wait for image and network; then PARTS_*."""
        guest, record, tools = self._guest, self._record, self._tools
        again = self._prepared > 0 or guest.resumed
        self._prepared += 1
        if self._prepared > 1:
            guest.image.forget()
            guest.net.forget()
        after_s = 0.0 if again else tools.settings.ask_after_s
        with tracing.span("virtbus prepare vm", uid=record.uid, parent=record.traceparent):
            try:
                await self._save()
                net = await guest.net.get(record, ask_after_s=after_s) if has_nics(record) else None
                secrets = await self._seed(record, net)
                logins = secrets.image_pull if secrets is not None else {}
                await guest.image.get(record, ask_after_s=after_s, image_pull=logins)
            except VirtbusError as error:
                guest.failed(error, Kind.VM_FAILED)
                final = error.body.retry is Retry.NEVER
                guest.post(Event.PARTS_IMPOSSIBLE if final else Event.PARTS_FAILED)
                return
        if guest.phase is Phase.PREPARING and guest.record.powered:
            guest.post(Event.PARTS_READY)

    async def _seed(self, record: VmRecord, net: NetReady | None) -> VmSecrets | None:
        """Write the seeds; if the bus lost the secrets, use the existing seeds.

        Returns the secrets, if there are any.
        """
        secrets: VmSecrets | None = None
        if record.sec_digest is not None:
            secrets = await self._secrets(record)
            if secrets is None and self._tools.seeds.stand(record):
                extra = {"code": "secrets_lost", "uid": record.uid}
                log.warning("the bus has lost the secrets; the existing seed is kept", extra=extra)
                return None
            if secrets is None:  # or the replica we read from lags
                message = (
                    "the bus does not have the VM's secrets, and this host has no seed of it; it "
                    "is asked again. If they are lost, create the VM again with its cloud-init"
                )
                raise VirtbusError(Code.UNAVAILABLE, "secrets_lost", message)
        await self._tools.seeds.write(record, secrets, net.interfaces if net else ())
        return secrets

    async def _secrets(self, record: VmRecord) -> VmSecrets | None:
        try:
            entry = await self._tools.bus.get(subjects.vm_secret(record.node, record.uid))
        except BusError as error:
            message = "the bus does not give the VM's secrets now; it is asked again"
            raise VirtbusError(Code.UNAVAILABLE, "bus_unavailable", message) from error
        if entry is None or hashlib.sha256(entry.value).hexdigest() != record.sec_digest:
            return None  # none, or those of another create of this uid
        return read_stored(VmSecrets, entry.key, entry.value)

    @property
    def starting(self) -> bool:
        """Return True while a start is in flight: the guest may appear at any moment."""
        task = self._tasks.get("start")
        return task is not None and not task.done()

    def start(self) -> None:
        """Start after any call that ends the previous run; it would end this one."""
        before = [self._tasks[name] for name in ("shutdown", "destroy") if name in self._tasks]
        self._spawn("start", partial(self._start, before), Event.START_FAILED)

    async def _start(self, before: list[asyncio.Task[None]]) -> None:
        """Define, arm, create; then STARTED or START_*."""
        guest, record, tools = self._guest, self._record, self._tools
        loop = asyncio.get_running_loop()
        if before:
            await asyncio.wait(before)
        begun_s = loop.time()
        with tracing.span("virtbus start domain", uid=record.uid, parent=record.traceparent):
            try:
                await define(record, guest, tools)
                await arm(record, guest, tools)
                await tools.files.new_boot(record.uid)
                with tracing.span("libvirt create", uid=record.uid):
                    still = guest.record.paused
                    await tools.hypervisor.start(record.uid, paused=still)
            except VirtbusError as error:
                if guest.phase is Phase.STARTING:  # otherwise we ended it
                    guest.failed(error, Kind.DOMAIN_FAILED)
                later = error.code == Code.UNAVAILABLE
                guest.post(Event.START_LATER if later else Event.START_FAILED)
                return
        guest.seen.domain_hash = guest.wanted_hash
        guest.started(record, paused=still)
        took_ms = round((loop.time() - begun_s) * 1000, 1)
        tools.facts.emit(Kind.DOMAIN_STARTED, record, took_ms=took_ms)

    def await_start(self) -> None:
        self._spawn("start", self._await_start, Event.START_LATER)

    async def _await_start(self) -> None:
        """Wait for the result of a start that an earlier agent began."""
        loop = asyncio.get_running_loop()
        limit_s = loop.time() + ADOPT_LIMIT_S
        while loop.time() < limit_s:
            facts = await self._tools.hypervisor.facts(self._record.uid)
            if facts is None or not facts.starting:
                came = FOUND[facts.state] if facts is not None and facts.active else None
                self._guest.post(came or Event.START_LATER)
                return
            await asyncio.sleep(RETRY_S[0])
        self._guest.post(Event.START_LATER)

    def confirm(self) -> None:
        self._spawn("confirm", self._confirm)

    async def _confirm(self) -> None:
        """Check a guest that should be running, because its end may have been missed."""
        uid = self._record.uid
        for delay_s in delays(*RETRY_S, self._tools.bus.sources):
            try:
                self._guest.confirmed(await self._tools.hypervisor.facts(uid))
            except VirtbusError as error:
                log.info(
                    "check failed, will be retried: %s",
                    error,
                    extra={"code": error.reason, "uid": uid},
                )
                await asyncio.sleep(delay_s)
            else:
                return

    # --- while it runs --------------------------------------------------------------------
    def running(self) -> None:
        """Wait until the running guest is ready."""
        self._stop("prepare")
        self._spawn("ready", self._await_ready)

    def follow_pause(self) -> None:
        running = self._tasks.get("pause")
        if running is None or running.done():
            work = partial(follow, self._guest, self._tools)
            self._spawn("pause", lambda: until_done(self._guest, work))

    def moved(self, before: Phase, now: Phase) -> None:
        """Start and stop the tasks of a phase."""
        if now is Phase.RUNNING and before is not Phase.RUNNING:
            self.running()
        if before in UP and now not in UP:
            for name in ("ready", "confirm", "pause"):
                self._stop(name)

    async def _await_ready(self) -> None:
        guest = self._guest
        if guest.net.latest is None or guest.image.latest is None:
            await self._learn_parts()
        if guest.seen.ready:
            return  # adopted, and it was ready before
        record = guest.record
        with tracing.span("virtbus await guest", uid=record.uid, parent=record.traceparent):
            guest.seen.ready = await self._tools.reach.answers(
                record.uid,
                lambda: guest.net.latest.interfaces if guest.net.latest else (),
                rebooted=guest.seen.boots_anew,
            )
        guest.seen.ready_ns = self._tools.bus.sources.time_ns()
        self._tools.facts.emit(Kind.GUEST_READY, record, reason=guest.seen.ready)
        guest.report()

    async def _learn_parts(self) -> None:
        """Ask netd and imaged for an adopted guest's resources, which also restores DHCP."""
        record = self._record
        try:
            if has_nics(record):
                await self._guest.net.get(record, ask_after_s=0.0)
            await self._guest.image.get(record, ask_after_s=0.0)
        except VirtbusError as error:
            if error.reason == "network_lost":
                self._guest.cut_off(error.body.message)
            log.warning(
                "adopted with missing resources: %s",
                error,
                extra={"code": error.reason, "uid": record.uid},
            )
        self._guest.report()

    # --- end ---------------------------------------------------------------------------------
    def shutdown(self) -> None:
        self._spawn("shutdown", self._shutdown)

    async def _shutdown(self) -> None:
        """Ask by ACPI. If there is no guest or no libvirt, the timer handles it."""
        try:
            if not await self._tools.hypervisor.shutdown(self._record.uid):
                self._guest.post(Event.ENDED)
        except VirtbusError as error:
            log.info("ACPI shutdown: %s", error, extra={"uid": self._record.uid})

    def destroy(self) -> None:
        over = self._down = asyncio.Event()
        self._spawn("destroy", lambda: until_done(self._guest, self._destroy, over))

    def ended(self) -> None:
        """Stop ending the guest: it has ended."""
        self._down.set()

    async def _destroy(self) -> None:
        with tracing.span("virtbus end guest", uid=self._record.uid):
            await self._end()
        self._guest.post(Event.ENDED)

    async def _end(self) -> None:
        """Return once no guest runs and no start in flight can create one."""
        starting = self._tasks.get("start") if self.starting else None
        await self._tools.hypervisor.destroy(self._record.uid)
        if starting is not None:
            await asyncio.wait({starting})
            await self._tools.hypervisor.destroy(self._record.uid)

    def release(self) -> None:
        for name in ("prepare", "shutdown", "ready"):
            self._stop(name)
        self._spawn("release", lambda: until_done(self._guest, self._release))

    async def _release(self) -> None:
        """Remove the domain first, then its resources, then our files."""
        record, tools = self._record, self._tools
        with tracing.span("virtbus release vm", uid=record.uid, parent=record.traceparent):
            await self._end()
            await tools.hypervisor.undefine(record.uid)
            why = self._guest.keeps
            keep = Keep(why=why, record=record) if why else None
            async with asyncio.TaskGroup() as group:
                group.create_task(self._let_go("netd", record))
                disks = group.create_task(self._let_go("imaged", record, keep))
            if self._writing:
                await asyncio.wait(self._writing)
            if kept := disks.result():
                await tools.files.keep_work(record.uid, kept)
            await tools.files.remove_work(record.uid)
            # Before anybody is notified: an agent that is killed after the purge must not find the
            # record of a deleted VM on disk and start it again (I3).
            epoch = record.epoch if self._guest.refused else 0
            await tools.files.forget(record.uid, refused_epoch=epoch)
        self._guest.post(Event.RELEASED)

    async def _let_go(self, service: str, record: VmRecord, keep: Keep | None = None) -> str:
        """Release the service's resources; return the quarantine's entry, if any."""
        try:
            answer = await self._tools.bus.request(
                subjects.rpc(record.node, service, "release"),
                Release(uid=record.uid, epoch=record.epoch, keep=keep),
                timeout_s=RELEASE_TIMEOUT_S,
            )
            return validate(Released, answer).kept
        except VirtbusError as error:
            # stale_epoch: a newer assignment owns these resources
            if error.reason != "stale_epoch":
                raise
            return ""

    async def forget(self) -> None:
        """Purge the status after the record was purged; retry until done."""
        record = self._record
        key = subjects.vm_status(record.node, record.uid)
        for delay_s in delays(*RETRY_S, self._tools.bus.sources):
            try:
                await self._tools.bus.purge(key, marker_ttl_s=86_400)
            except BusError as error:
                log.info(
                    "cannot purge the status: %s",
                    error,
                    extra={"code": "status_left", "uid": record.uid},
                )
                await asyncio.sleep(delay_s)
            else:
                return
