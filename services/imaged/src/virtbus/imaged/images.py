"""Turns an image reference into a stored image: resolves, fetches once, verifies, links."""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import urlsplit

from virtbus.bus.client.tracing import SpanFactory, no_span
from virtbus.bus.runtime.keyed_lock import KeyedLock
from virtbus.imaged.contents import Contents
from virtbus.imaged.core.image_aliases import Target
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.links import NameLink, refs_of
from virtbus.imaged.core.sources import Validators, shown
from virtbus.imaged.core.transports import PLAIN
from virtbus.imaged.edge.alias_files import AliasFiles
from virtbus.imaged.edge.containers import Containers
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.download import Downloads
from virtbus.imaged.edge.local_files import Fetched, LocalFiles
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.imaged.edge.partial_downloads import open_part
from virtbus.imaged.edge.routes import route_of
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.pull_slots import PullSlots, Seat
from virtbus.imaged.running_pulls import RunningPulls
from virtbus.imaged.single_flight import Asker, Flight, Flights
from virtbus.schemas.container import SCHEME as CONTAINER_SCHEME
from virtbus.schemas.container import ImagePullPolicy
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import is_id
from virtbus.schemas.image import ImageInfo, ImageSource, is_sealed, sealed_ref
from virtbus.schemas.node_rpc import HeldImages
from virtbus.schemas.wire import spec_hash

log = logging.getLogger(__name__)

NOBODY = Asker()
"""The asker for a request without a VM. It gets no progress."""
Remove = Callable[[frozenset[str], tuple[str, ...]], Awaitable[tuple[int, tuple[str, ...]]]]
"""Removes names and unused images, as `Disks.forget_images` does."""


class _Way(NamedTuple):
    """The connections of one pull, and its login for a registry or the query of its URL."""

    http: Downloads
    pull_secret: str


class Images:
    """The images of a node. `changed` is called when the list of images may have changed."""

    def __init__(  # noqa: PLR0913  all collaborators are named here once
        self,
        group: asyncio.TaskGroup,
        *,
        store: ImageStore,
        threads: DiskThreads,
        names: AliasFiles,
        files: LocalFiles,
        http: Downloads,
        containers: Containers,
        limits: TransferLimits,
        max_pulls: int = 4,
        changed: Callable[[], None] = lambda: None,
        span: SpanFactory = no_span,
    ) -> None:
        self._span = span
        self._store = store
        self._threads = threads
        self._names = names
        self._files = files
        self._http = http
        self._containers = containers
        self._contents = Contents(store, threads, limits)
        self._changed = changed
        self._turns = PullSlots(limits, max_pulls)
        self._pulls: RunningPulls[tuple[ImageInfo, Fetched]] = RunningPulls(Flights(group))
        self._part_locks = KeyedLock()

    def stop(self) -> None:
        """Record that the service stops, so that partial downloads are kept."""
        self._pulls.flights.stop()

    def cached(self, source: ImageSource) -> ImageInfo | None:
        """Return the image of a reference if the store has it; uses no network.

        The call counts as a use of the name and so delays its expiry.
        """
        self._store.used(source.name)
        if source.file_digest is not None:
            return self._store.pinned(source.file_digest)
        link = self._store.link(source.name)
        return self._store.cached(link.digest) if link is not None else None

    def page(self, after: str) -> HeldImages:
        return self._store.page(after)

    async def ensure(
        self,
        source: ImageSource,
        asker: Asker = NOBODY,
        policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT,
    ) -> ImageInfo:
        """Return the image, fetched if it is missing or the policy is Always; errors as `refresh`.

        Raises:
            VirtbusError: 404 `image_not_present`: the image is missing, and the policy is Never.
        """
        image = self.cached(source) if policy is not ImagePullPolicy.ALWAYS else None
        if image is None and policy is ImagePullPolicy.NEVER:
            raise VirtbusError(
                Code.NOT_FOUND,
                "image_not_present",
                f"{shown(source.ref)} is not on this node and the pull policy is Never; fetch it "
                f"with 'virtbus image pull {source.ref}{_namespace_flag(source)}', or use "
                "IfNotPresent",
            )
        return image or await self.refresh(source, asker)

    async def restore(self, source: ImageSource, digest: str, asker: Asker) -> None:
        """Fetch the image `digest` of an existing disk again; errors as `refresh`."""
        target = await self._resolve(source)
        url, pin, _ = target.source
        if not target.source.is_container and pin in {None, digest}:
            await self.ensure(source._replace(digest=digest), asker)
            return
        link = self._store.link(source.name)
        if pin is None and link is not None and link.digest == digest:
            pin = link.etag
        exact = ImageSource(url, pin)
        image = await self._pull(exact, target._replace(source=exact), asker)
        if image.digest != digest:
            raise _mismatch(url, digest, f"its disk is {image.digest} by now")

    async def refresh(self, source: ImageSource, asker: Asker = NOBODY) -> ImageInfo:
        """Return the source's current image; an unchanged image is not transferred.

        Concurrent requests with one URL, digest, transport and `pull_secret` share one transfer.
        Another `pull_secret` means another transfer, so that no user gets content through the login
        of another user. Transfers of the same pinned file run one after another, and later
        transfers take the file from the store. If all requests of a transfer are cancelled, the
        transfer ends and its bytes are removed.

        Raises:
            VirtbusError: 400 `container_name_pinned`. 404 `image_unknown`. 409 `digest_mismatch`.
                409 `image_deleted`: a request deleted the image meanwhile. 503 `image_lost`,
                `image_names_invalid`, `image_query_missing`, `image_transport_invalid`,
                `image_unreachable`. The errors of `contents`, `edge.download`, `edge.local_files`
                and `edge.containers`.
        """
        try:
            target = await self._resolve(source)
        except VirtbusError as error:
            uploaded = self._uploaded(source) if error.reason == "image_unknown" else None
            if uploaded is None:
                raise
            return uploaded
        return await self._pull(source, target, asker)

    def _uploaded(self, source: ImageSource) -> ImageInfo | None:
        link = self._store.link(source.locator)
        if link is None or not link.uploaded_by:
            return None
        here = source.digest in {None, link.digest, link.fetched}
        return self._store.cached(link.digest) if here else None

    async def received(self, what: str, key: str, part: PartialDownload) -> ImageInfo:
        """Make an image of the bytes that a client sent, and store it without a name.

        Raises the errors of `contents` and of `PullSlots.run`.
        """
        flight = Flight()

        async def in_turn(seat: Seat) -> ImageInfo:
            seat.settle()
            async with self._contents.of(flight, what, key, part) as content:
                return await self._adopt(what, (None, ""), content)

        return await self._turns.run("", flight, in_turn, self._http.http.limits.total_timeout_s)

    async def _pull(self, source: ImageSource, target: Target, asker: Asker) -> ImageInfo:
        url, query = sealed_ref(target.source.locator)  # a rule in images.d may contain a query
        pin, transport = target.source.digest, target.transport
        secret = asker.pull_secret or query
        known = self._known(source, url)
        route = await self._threads.run(route_of, transport, target.where, self._names.directory)
        way = _Way(self._http.of_pull(transport, route), secret)

        async def work(flight: Flight) -> tuple[ImageInfo, Fetched]:
            with self._span("virtbus pull image", uid=asker.uid):
                return await self._transfer(flight, url, pin, known, way)

        login = hashlib.sha256(secret.encode()).hexdigest() if secret else ""
        by = "" if transport == PLAIN else spec_hash(transport)
        key = f"{url}\n{pin or ''}\n{login}\n{by}"
        with self._pulls.running(key, refs_of(source.name, url), asker):
            image, fetched = await self._pulls.flights.join(key, work, asker)
            with self._store.lease(image.digest):
                await self._threads.run(self._store.write_link, _link(source, url, image, fetched))
        self._changed()
        return image

    async def forget(
        self, ref: str, remove: Remove
    ) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
        """Let `remove` remove the names and images that `ref` denotes, and end their pulls.

        Return the freed bytes, the uids whose disks keep images from removal, and the names.

        Raises:
            VirtbusError: 404 `image_unknown`. 409 `image_wanted`.
        """
        ended = await self._pulls.end(sealed_ref(ref)[0])
        digests, names = self._store.named(ref)
        if not digests and not ended:
            message = f"no image {shown(ref)} is stored here; `virtbus image list` shows what is"
            raise VirtbusError(Code.NOT_FOUND, "image_unknown", message)
        freed_bytes, used_by = await remove(digests, names)
        self._changed()
        return freed_bytes, used_by, names

    async def _resolve(self, source: ImageSource) -> Target:
        if source.is_url:
            return Target(source)
        if source.target is not None:
            target = await self._threads.run(self._names.of_bus, source.locator, source.target)
        else:
            target = await self._threads.run(self._names.resolve, source.locator)
        rule = target.source
        if source.digest and rule.is_container:
            raise VirtbusError(
                Code.INVALID,
                "container_name_pinned",
                f"{source.locator!r} stands for the container image {shown(rule.locator)}; pin "
                "that one by its manifest's digest, here or in images.d",
            )
        if source.digest and rule.digest and source.digest != rule.digest:
            raise _mismatch(
                source.locator, source.digest, f"the rule of its name pins {rule.digest}"
            )
        return target._replace(source=rule._replace(digest=source.digest or rule.digest))

    def _known(self, source: ImageSource, url: str) -> Validators:
        link = self._store.link(source.name)
        if link is None or link.url != url or self._store.cached(link.digest) is None:
            return Validators()
        return Validators(link.etag, link.last_modified)

    async def _transfer(
        self, flight: Flight, url: str, pin: str | None, known: Validators, way: "_Way"
    ) -> tuple[ImageInfo, Fetched]:
        of_file = None if url.startswith(CONTAINER_SCHEME) else pin
        key = f"{url.partition('?')[0] if of_file else url}\n{pin or ''}"

        async def in_turn(seat: Seat) -> tuple[ImageInfo, Fetched]:
            stored = self._store.pinned(of_file) if of_file is not None else None
            if stored is not None:  # another transfer has fetched it meanwhile
                return stored, Fetched(known, digest=of_file or "")
            parts = open_part(self._store, self._threads, key, lambda: flight.abandoned)
            async with parts as part:
                fetched = await self._fetch(flight, url, pin, (part, known), way)
                if fetched.unchanged:
                    seat.settle()
                    return self._unchanged(url, of_file, known, fetched)
                fetched = replace(fetched, digest=f"sha256:{part.hex_digest}")
                async with self._contents.of(flight, url, key, part) as content:
                    seat.settle()
                    # A container's pin is its manifest's digest, which `_fetch` has verified.
                    pins = (of_file, fetched.digest)
                    return await self._adopt(url, pins, content), fetched

        async with self._part_locks.of(key):  # an abandoned transfer may still be ending
            total_s = way.http.http.limits.total_timeout_s
            return await self._turns.run(_host_of(url), flight, in_turn, total_s)

    async def _fetch(
        self,
        flight: Flight,
        url: str,
        pin: str | None,
        into: tuple[PartialDownload, Validators],
        way: "_Way",
    ) -> Fetched:
        part, known = into
        log.info("fetching %s", shown(url), extra={"code": "image_pulling"})
        if url.startswith("file://"):
            return await self._files.fetch(url, part, known, flight.on_bytes)
        if url.startswith(CONTAINER_SCHEME):
            containers = self._containers.of_pull(way.http, way.pull_secret)
            return await containers.fetch(url, pin, part, known, flight)
        whole = _with_query(url, way.pull_secret)
        return await way.http.fetch(whole, part, known, flight.on_bytes, pinned=pin is not None)

    async def _adopt(
        self, url: str, pins: tuple[str | None, str], part: PartialDownload
    ) -> ImageInfo:
        """Check and store a part; `pins` are the wanted digest, and that of the fetched bytes."""
        pin, fetched = pins
        digest = f"sha256:{part.hex_digest}"
        if pin not in {None, fetched, digest}:
            content = f", their content {digest}" if digest != fetched else ""
            raise _mismatch(url, pin or "", f"the bytes have {fetched}{content}")
        header = await self._contents.inspect(part)
        image = await self._threads.run(self._store.adopt, part, header)
        log.info("image %s is %s", shown(url), image.digest, extra={"code": "image_ready"})
        return image

    def _unchanged(
        self, url: str, pin: str | None, known: Validators, fetched: Fetched
    ) -> tuple[ImageInfo, Fetched]:
        for link in self._store.links_of(url):
            image = self._store.cached(link.digest)
            if image is not None and Validators(link.etag, link.last_modified) == known:
                if pin not in {None, image.digest, link.fetched}:
                    raise _mismatch(url, pin or "", f"the bytes have {image.digest}")
                return image, replace(fetched, digest=link.fetched)
        raise VirtbusError(
            Code.UNAVAILABLE,
            "image_lost",
            f"the stored copy of {shown(url)} vanished meanwhile; ask again to fetch it",
        )


def _namespace_flag(source: ImageSource) -> str:
    namespace = source.target.namespace if source.target is not None else ""
    return f" -n {namespace}" if is_id(namespace) and namespace != "default" else ""


def _host_of(url: str) -> str:
    """Return the URL's host, which has a share of the pull slots; empty for a local file."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""  # such a URL is refused before any request


def _with_query(url: str, query: str) -> str:
    """Return the URL with its secret query.

    Raises:
        VirtbusError: 503 `image_query_missing`.
    """
    if not is_sealed(url):
        return url
    if not query:
        message = (
            f"the query of {shown(url)} is a secret of the VM, which its agent brings and imaged "
            "does not keep; if the bus has lost the VM's secrets, create it again"
        )
        raise VirtbusError(Code.UNAVAILABLE, "image_query_missing", message)
    return f"{url.partition('?')[0]}?{query}"


def _link(source: ImageSource, url: str, image: ImageInfo, fetched: Fetched) -> NameLink:
    """Return the link for a source.

    A pinned reference has a link of its own, so the link of the plain name does not change.
    """
    link = NameLink.of(source.name, image, fetched.digest)
    version = fetched.validators
    return link.model_copy(
        update={"url": url, "etag": version.etag, "last_modified": version.last_modified}
    )


def _mismatch(what: str, pin: str, why: str) -> VirtbusError:
    return VirtbusError(
        Code.CONFLICT,
        "digest_mismatch",
        f"{shown(what)} is not the pinned {pin}: {why}; nothing was stored: "
        "pin the digest of the image you mean, or have its server deliver that one",
    )
