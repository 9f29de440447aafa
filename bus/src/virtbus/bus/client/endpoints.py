"""Answers requests as a NATS service (ADR-32), with bounded concurrency.

nats-py's own services run one request at a time per endpoint and cannot omit the queue group. So
this module uses plain subscriptions.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from virtbus.bus.client.answers import Answers, refusal_of
from virtbus.bus.client.discovery import Discovery, Tally
from virtbus.bus.client.fair_shares import FairQueue, FairShares
from virtbus.bus.client.link import Link, Raw, Subscription
from virtbus.bus.client.message_format import TRACEPARENT
from virtbus.bus.client.owners import UNKNOWN, account_of
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.client.tracing import continued
from virtbus.bus.errors import UnavailableError
from virtbus.bus.runtime.tasks import Background, background
from virtbus.schemas.envelope import Envelope, open_envelope
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_MS = 30_000
STOP_S = 1.0
"""Time limit for running requests to finish when the service stops."""
HELD_BYTES = 64 * 1024 * 1024
"""Maximum bytes of all requests that a service processes or queues at one time.

Decoded requests need a few times as much memory.
"""
ASKED_BYTES = 1024
"""Bytes counted for a request in addition to its body."""


def open_request(body: bytes, most_values: int) -> Envelope:
    """Return the envelope of a request.

    Raises:
        VirtbusError: 400 if the request is malformed, 413 if it is too large.
    """
    try:
        return open_envelope(body, most_values)
    except VirtbusError:
        raise
    except ValueError as error:
        raise VirtbusError(
            Code.INVALID, "malformed", "the envelope's attributes are not CloudEvents'"
        ) from error


def refuse_late(deadline_s: float) -> None:
    """Raise VirtbusError 504 if a request's deadline has passed."""
    if asyncio.get_running_loop().time() > deadline_s:
        raise _late()


@asynccontextmanager
async def in_time(deadline_s: float) -> AsyncIterator[None]:
    """Cancel the body of the context at a request's deadline, and raise VirtbusError 504.

    Use it for work that must not complete late. After the deadline, the requester may repeat the
    request to another instance. A refusal there makes the requester believe that nothing was done.
    """
    limit = asyncio.timeout_at(deadline_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise _late() from None
        raise


def _late() -> VirtbusError:
    return VirtbusError(
        Code.DEADLINE, "deadline", "the time limit passed before the request was done; try again"
    )


def _given_up() -> VirtbusError:
    """Return the error of a request that waited for shared work, if that work was cancelled."""
    message = "the work that the request waited for was abandoned; repeat it"
    return VirtbusError(Code.UNAVAILABLE, "given_up", message)


def _no_account() -> VirtbusError:
    message = "the header block of the request is malformed, so its account is not known"
    return VirtbusError(Code.DENIED, "account_unknown", message)


_INBOXES = ("_INBOX", "_R_.")


def is_confined(reply: str) -> bool:
    """Return True if the reply subject is an inbox or empty.

    A service has more rights than its requesters. An answer to `$KV…` would write a key (BUS-06).
    """
    return not reply or reply.startswith(_INBOXES)


@dataclass(slots=True)
class _Asked:
    """A request with its arrival time (on the loop's clock), account and size.

    Decoding empties `raw`: a parked request (see `EndpointServer`) may wait for hours, and its body
    would occupy memory.
    """

    raw: Raw
    received_s: float
    account: str
    size_bytes: int


class EndpointServer:
    """Serves one endpoint: `limit` requests have a slot, `backlog` wait, further requests get 429.

    Accounts share slots, queue and bytes fairly. If a handler returns a Future, the request is
    parked: it needs no task, and keeps its slot until the Future is done.
    """

    def __init__(
        self, link: Link, endpoint: Endpoint, tasks: Background, held: FairShares | None = None
    ) -> None:
        self._link = link
        self._endpoint = endpoint
        self._tasks = tasks
        self._held = held or FairShares(HELD_BYTES)
        self._slots = FairShares(endpoint.limit)
        self._places = FairShares(endpoint.backlog)
        self._backlog: FairQueue[_Asked] = FairQueue()
        self._runnable: FairQueue[_Asked] = FairQueue()
        """Requests that have a slot, and wait until fewer handlers run."""
        self._running = 0
        self.tally = Tally(endpoint.name, endpoint.subject, endpoint.queue or "")

    def receive(self, raw: Raw) -> None:
        if not is_confined(raw.reply):
            self.tally.done(0.0, "403: no inbox")
            log.warning(
                "dropped a request on %s: invalid reply subject %s",
                raw.subject,
                raw.reply,
                extra={"code": "reply_refused"},
            )
            return
        account = account_of(raw.headers)
        if account == UNKNOWN:
            self.tally.done(0.0, "403: account_unknown")
            self._tasks.start(self._refuse(Answers(self._link, raw), _no_account()))
            return
        now_s, size_bytes = asyncio.get_running_loop().time(), ASKED_BYTES + len(raw.body)
        asked = _Asked(raw, now_s, account, size_bytes)
        if not self._accept(asked):
            self.tally.done(0.0, "429: over backlog")
            after_ms = max(100, int(self.tally.mean_s * 1000 * self._endpoint.backlog))
            self._tasks.start(self._busy(raw, min(after_ms, 10_000)))

    def _accept(self, asked: _Asked) -> bool:
        """Start or queue a request; return False if the limits allow neither."""
        account, size_bytes = asked.account, asked.size_bytes
        if not self._held.take(account, size_bytes):
            return False
        if self._slots.take(account):
            self._start(asked)
        elif self._endpoint.displace(account):
            self._slots.exceed(account)
            self._start(asked)
        elif self._places.take(account):
            self._backlog.add(account, asked)
        else:
            self._held.release(account, size_bytes)
            return False
        return True

    def _start(self, asked: _Asked) -> None:
        if self._running < (self._endpoint.running or self._endpoint.limit):
            self._running += 1
            self._tasks.start(self._work(asked))
        else:
            self._runnable.add(asked.account, asked)

    async def _busy(self, raw: Raw, after_ms: int) -> None:
        error = VirtbusError(
            Code.EXHAUSTED,
            "busy",
            f"too many requests wait; try again in {after_ms} ms",
            after_ms=after_ms,
        )
        await self._refuse(Answers(self._link, raw), error)

    async def _work(self, first: _Asked) -> None:
        asked: _Asked | None = first
        try:
            while asked is not None:
                parked = False
                try:
                    parked = await self._one(asked)
                finally:
                    if not parked:
                        self._release(asked)
                asked = self._runnable.next() or self._next()
        finally:
            self._running -= 1

    def _release(self, asked: _Asked) -> None:
        self._slots.release(asked.account)
        self._held.release(asked.account, asked.size_bytes)

    def _next(self) -> _Asked | None:
        """Return the next waiting request, with a slot; None if no request can get a slot."""
        for account in self._backlog.callers() if self._backlog else ():
            if self._slots.take(account):
                self._places.release(account)
                return self._backlog.take(account)
        return None

    async def _one(self, asked: _Asked) -> bool:
        """Answer one request; return True if it is parked. Raises only CancelledError."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        answers = Answers(self._link, asked.raw)
        failure = ""
        try:
            parked = await self._handle(asked, answers)
            if parked is not None:
                parked.add_done_callback(partial(self._unpark, asked, answers, started_s))
                return True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failure = await self._failed(answers, _given_up())
        except Exception as error:  # noqa: BLE001  boundary: answered or logged
            failure = await self._failed(answers, error)
        self.tally.done(loop.time() - started_s, failure)
        return False

    def _unpark(
        self, asked: _Asked, answers: Answers, started_s: float, parked: "asyncio.Future[None]"
    ) -> None:
        self._release(asked)
        took_s = asyncio.get_running_loop().time() - started_s
        error = _given_up() if parked.cancelled() else parked.exception()
        if error is None:
            self.tally.done(took_s, "")
        with suppress(RuntimeError):  # after the server's end, requesters repeat their requests
            if isinstance(error, Exception):
                self._tasks.start(self._unparked(answers, error, took_s))
            waiting = self._next()
            if waiting is not None:
                self._start(waiting)

    async def _unparked(self, answers: Answers, error: Exception, took_s: float) -> None:
        self.tally.done(took_s, await self._failed(answers, error))

    async def _handle(self, asked: _Asked, answers: Answers) -> "asyncio.Future[None] | None":
        request = _request(asked, answers, self._endpoint.most_values)
        asked.raw = Raw(request.subject)
        with continued(request.traceparent):
            value = await self._endpoint.handler(request)
        if isinstance(value, asyncio.Future):
            return value
        try:
            await answers.last(value)
        except UnavailableError as error:  # a requester without an answer repeats its request
            log.debug("answer of %s lost: %s", self._endpoint.name, error)
        return None

    async def _failed(self, answers: Answers, error: Exception) -> str:
        refusal = refusal_of(error, self._endpoint.subject)
        await self._refuse(answers, refusal)
        return f"{refusal.code}: {refusal.reason}"

    async def _refuse(self, answers: Answers, refusal: VirtbusError) -> None:
        """Send an error; if that fails, send a short internal error. Never raises."""
        brief = VirtbusError(Code.INTERNAL, "internal", "the refusal could not be sent")
        for error_answer in (refusal, brief):
            try:
                await answers.refuse(error_answer)
            except UnavailableError as error:  # a requester without an answer repeats its request
                log.debug("answer of %s lost: %s", self._endpoint.name, error)
            except Exception:
                log.exception(
                    "error for %s could not be sent",
                    self._endpoint.name,
                    extra={"code": "answer_failed"},
                )
                continue
            return


def _request(asked: _Asked, answers: Answers, most_values: int) -> Request:
    raw = asked.raw
    frame = open_request(raw.body, most_values)
    deadline_s = asked.received_s + (frame.timeout_ms or DEFAULT_TIMEOUT_MS) / 1000
    refuse_late(deadline_s)
    return Request(
        raw.subject,
        frame.data,
        frame.id,
        deadline_s,
        raw.reply,
        raw.headers.get(TRACEPARENT),
        answers.as_json,
        answers.stream,
        asked.account,
        asked.received_s,
    )


@asynccontextmanager
async def serving(
    link: Link, info: ServiceInfo, endpoints: Sequence[Endpoint]
) -> AsyncIterator[None]:
    """Answer requests while the context is open. Then wait up to STOP_S for running requests."""
    async with background() as tasks:
        held = FairShares(HELD_BYTES)
        served = [EndpointServer(link, endpoint, tasks, held) for endpoint in endpoints]
        discovery = Discovery(link, info, [one.tally for one in served], tasks)
        subscriptions: list[Subscription] = []
        try:
            for endpoint, one in zip(endpoints, served, strict=True):
                subscriptions.append(
                    await link.open(endpoint.subject, one.receive, queue=endpoint.queue or "")
                )
            subscriptions += await discovery.open()
            yield
        finally:
            for subscription in subscriptions:
                await subscription.close()
            await tasks.settle(STOP_S)
