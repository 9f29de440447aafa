"""Stores images by content: files named by their SHA-256, links from names, and partial files.

    <root>/data/<hex>              an image, 0444, never changed after its rename into place
    <root>/links/<sha256(name)>    a name (`core.links.NameLink`), replaced atomically
    <root>/part/<key>[.json]       a partial download

The index in memory is read from the files at the start. An addition changes the files first, and a
removal changes the index first, so the index never names a missing file. Complete files appear by
a rename, so a crash at any instruction loses at most partial downloads.
"""

import contextlib
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from virtbus.imaged.core.expiry import NameUse, is_plain
from virtbus.imaged.core.header import inspect
from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.core.links import NameLink, file_name, hex_of, is_hex_digest
from virtbus.imaged.core.listing import keys_of, listing, page_of
from virtbus.imaged.core.qcow2 import ImageHeader
from virtbus.imaged.edge import openat2
from virtbus.imaged.edge.link_files import read_link
from virtbus.imaged.edge.partial_download import (
    CHECKPOINT_BYTES,
    PartialDownload,
    read_head_and_tail,
    store_error,
)
from virtbus.imaged.edge.store_space import StoreSpace, lock_store
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageInfo, sealed_ref
from virtbus.schemas.node_rpc import HeldImages
from virtbus.schemas.wire import encode_json

log = logging.getLogger(__name__)

LANDING_NS = 60 * 1_000_000_000
"""Time within which a new image gets its name, if its request is not cancelled."""
_ANY_VIRTUAL_SIZE = 1 << 63
"""No limit, so that stored images stay usable when the setting max_virtual_bytes is lowered."""


class ImageStore:
    """The images of a node.

    Methods that change files block on the disk. All other methods at most check the size of a file.
    Any thread may change the index, so each loop over the index runs over a copy.
    """

    def __init__(
        self,
        root: Path,
        limits: SpaceLimits = SpaceLimits(),  # noqa: B008  frozen
        *,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        """Open the store at `root`, create missing folders, and read its content.

        Raises:
            VirtbusError: 409 `store_in_use`: another imaged has the store open.
        """
        openat2.make_passable(root)
        self.data_dir = root / "data"
        self._checkpoint_bytes = checkpoint_bytes
        self._fds: list[int] = []
        self._root_fd = self._keep(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            lock_store(self._root_fd, root)
        except VirtbusError:
            self.close()
            raise
        self._data_fd = self._keep(openat2.open_directory("data", self._root_fd, openat2.PASSABLE))
        self._links_fd = self._keep(openat2.open_directory("links", self._root_fd, 0o700))
        self._parts_fd = self._keep(openat2.open_directory("part", self._root_fd, 0o700))
        self.space = StoreSpace(self._data_fd, self._parts_fd, limits)
        self._linking = threading.Lock()
        self._adopting = threading.Lock()
        self._images: dict[str, ImageInfo] = {}
        self._links: dict[str, NameLink] = {}
        self._leases: Counter[str] = Counter()
        self._used_ns: dict[str, int] = {}
        self._landed_ns: dict[str, int] = {}
        """By digest: the end of the transfer of an image that has no name yet."""
        self._names_used_s: dict[str, float] = {}
        """Unix time of each name's last use; at the start, the modification time of its file."""
        self._fresh: set[str] = set()
        """Names used since their files were last updated."""
        self._scan()

    def _keep(self, descriptor: int) -> int:
        self._fds.append(descriptor)
        return descriptor

    def close(self) -> None:
        for descriptor in self._fds:
            os.close(descriptor)
        self._fds.clear()

    # --- content -----------------------------------------------------------------------------
    def _scan(self) -> None:
        there = frozenset(openat2.names(self._data_fd))
        for name in there:
            if (image := self._read_image(name)) is not None:
                self._images[image.digest] = image
        for name in openat2.names(self._links_fd):
            if (link := read_link(name, self._links_fd, there)) is not None:
                self._names_used_s[link.name] = self._age_mark(name)
                if link.digest in self._images:
                    self._links[link.name] = link
        self._drop_changed()
        self.space.sweep_parts()

    def _drop_changed(self) -> None:
        """Drop images whose size differs from the size in their link (I11).

        Only the size can show the damage of a raw image, which has no header. A dropped image is
        pulled again on demand.
        """
        for name, link in tuple(self._links.items()):
            image = self._images.get(link.digest)
            if image is None or image.size_bytes != link.size_bytes:
                extra = {"code": "image_damaged"}
                log.error("image %s has changed since it was fetched", link.digest, extra=extra)
                self._images.pop(link.digest, None)
                del self._links[name]

    def _read_image(self, name: str) -> ImageInfo | None:
        if not is_hex_digest(name):
            return None
        try:
            descriptor = openat2.open_file(name, self._data_fd)
            try:
                size = os.fstat(descriptor).st_size
                header = inspect(*read_head_and_tail(descriptor, size), size, _ANY_VIRTUAL_SIZE)
            finally:
                os.close(descriptor)
        except (OSError, VirtbusError) as error:
            extra = {"code": "image_damaged"}
            log.warning("image data/%s is not usable: %s", name, error, extra=extra)
            return None
        return _info(name, size, header)

    def cached(self, digest: str) -> ImageInfo | None:
        """Return the image of a digest and mark it as used; None if its file is gone or changed.

        The check costs one fstatat.
        """
        image = self._images.get(digest)
        if image is None:
            return None
        try:
            status = os.stat(hex_of(digest), dir_fd=self._data_fd, follow_symlinks=False)
        except FileNotFoundError:
            status = None
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != image.size_bytes:
            log.warning("image %s vanished or changed", digest, extra={"code": "image_lost"})
            self._images.pop(digest, None)
            return None
        self._used_ns[digest] = time.monotonic_ns()
        return image

    def pinned(self, digest: str) -> ImageInfo | None:
        """Return the image `digest`, or an image that was made from bytes with this digest."""
        made = [link.digest for link in list(self._links.values()) if link.fetched == digest]
        return self.cached(digest) or next(filter(None, map(self.cached, made)), None)

    def may_be(self, pin: str, digest: str) -> bool:
        """Return False if the image `digest` is certainly not the image of the pin."""
        links = [one.fetched for one in list(self._links.values()) if one.digest == digest]
        return pin == digest or pin in links or not (links or pin in self._images)

    def _age_mark(self, file: str) -> float:
        return os.stat(file, dir_fd=self._links_fd, follow_symlinks=False).st_mtime

    def now_s(self) -> float:
        return time.time()

    def used(self, name: str) -> None:
        """Record a use of a name; written to disk by the next `save_uses`."""
        if name in self._links:
            self._names_used_s[name] = time.time()
            self._fresh.add(name)

    def link(self, name: str) -> NameLink | None:
        return self._links.get(name)

    def links_of(self, url: str) -> tuple[NameLink, ...]:
        return tuple(link for link in list(self._links.values()) if link.url == url)

    def named(self, ref: str) -> tuple[frozenset[str], tuple[str, ...]]:
        """Return the digests and the names that `ref` denotes.

        A name denotes itself and its pinned forms. A digest or a URL denotes all names of its
        image. A URL without a query, as lists show it, denotes that URL with any query.
        """
        ref = sealed_ref(ref)[0]
        links = [link for link in list(self._links.values()) if ref in link.refs]
        digests = {link.digest for link in links} | ({ref} & set(self._images))
        return frozenset(digests), tuple(sorted(link.name for link in links))

    def images(self) -> tuple[ImageInfo, ...]:
        return listing(self._images.copy(), list(self._links.values()))

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(self._images)

    def page(self, after: str) -> HeldImages:
        return page_of(self._images.copy(), list(self._links.values()), after)

    def keys(self) -> tuple[str, ...]:
        return keys_of(list(self._links.values()), self._names_used_s, frozenset(self._images))

    @property
    def names(self) -> int:
        return len(self._links)

    def uses(self, held: frozenset[str]) -> list[NameUse]:
        """Return when each name was last used; `held` are the digests of images with disks."""
        held |= set(+self._leases)
        return [
            NameUse(name, self._names_used_s.get(name, 0.0), link.digest in held)
            for name, link in list(self._links.items())
        ]

    def path(self, digest: str) -> Path:
        return self.data_dir / hex_of(digest)

    @contextlib.contextmanager
    def lease(self, digest: str) -> Iterator[None]:
        """Protect an image from `garbage` while a disk is made from it (IMG-22)."""
        self._leases[digest] += 1
        try:
            yield
        finally:
            self._leases[digest] -= 1
            self._used_ns[digest] = time.monotonic_ns()

    # --- change ----------------------------------------------------------------------------
    def part(self, key: str) -> PartialDownload:
        """Return the part file of `key`; one user at a time."""
        file = file_name(key)
        room = self.space.room(file)
        try:
            return PartialDownload(file, self._parts_fd, room, self._checkpoint_bytes)
        except OSError as error:
            room.release()
            raise store_error(error) from error

    def adopt(self, part: PartialDownload, header: ImageHeader) -> ImageInfo:
        """Move a complete, verified part into `data/`; return the new image.

        Raises:
            VirtbusError: 503 `image_quota`, `disk_full`, `store_error`.
        """
        image = _info(part.hex_digest, part.offset, header)
        if image.digest not in self._images:
            part.expect(0)  # nothing has checked the room of a reflink, or of a program's writes
        with self._adopting:
            if self.cached(image.digest) is None:
                part.publish(self._data_fd, part.hex_digest)
            self._used_ns[image.digest] = self._landed_ns[image.digest] = time.monotonic_ns()
            self._images[image.digest] = image
        self.space.changed()
        return image

    def write_link(self, link: NameLink) -> None:
        """Point a name to an image, atomically. If the link exists already, only record a use."""
        self._landed_ns.pop(link.digest, None)
        with self._linking:  # all requests of a transfer call this method at once
            if self._links.get(link.name) == link:
                self.used(link.name)
                return
            try:
                openat2.replace(file_name(link.name), encode_json(link), self._links_fd)
                os.fsync(self._links_fd)
            except OSError as error:
                raise store_error(error) from error
            self._links[link.name] = link
            self._names_used_s[link.name] = time.time()

    def save_uses(self, max_age_s: float) -> None:
        """Write the times of last use to the link files.

        Also remove link files without a name in the index, if they are older than `max_age_s`.
        """
        with self._linking:
            fresh, self._fresh = self._fresh, set()
            for name in fresh & set(self._links):
                at_s = self._names_used_s.get(name, time.time())  # may be forgotten now
                with contextlib.suppress(FileNotFoundError):
                    os.utime(file_name(name), (at_s, at_s), dir_fd=self._links_fd)
            known = {file_name(name) for name in list(self._links)}
            for file in set(openat2.names(self._links_fd)) - known:
                if time.time() - self._age_mark(file) > max_age_s:
                    openat2.remove(file, self._links_fd)

    def remove_links(self, names: tuple[str, ...]) -> None:
        """Remove names. Their images stay until `garbage` finds them."""
        self.forget_names(names)
        self._remove_files(names)

    def forget_names(self, names: tuple[str, ...]) -> None:
        """Take names out of the index. The caller then passes them to `discard`."""
        for name in names:
            self._links.pop(name, None)
            self._names_used_s.pop(name, None)

    def _remove_files(self, names: Iterable[str]) -> None:
        """Remove the files of names. A name that denotes an image again keeps its file."""
        with self._linking:
            for name in names:
                if name not in self._links:
                    openat2.remove(file_name(name), self._links_fd)
            os.fsync(self._links_fd)

    # --- garbage collection ------------------------------------------------------------------
    def garbage(
        self, used: frozenset[str], grace_s: float, among: frozenset[str] | None = None
    ) -> tuple[str, ...]:
        """Remove unused images from the index; return their digests for `discard`.

        An image is unused if it has no name, no disk (`used`), no lease, and no use in the last
        `grace_s`. `among` limits the search. Call this method on the event loop, so that no task is
        between `cached` and `lease`.
        """
        now_ns = time.monotonic_ns()
        held = used | {one.digest for one in list(self._links.values())} | set(+self._leases)
        found = []
        for digest in (set(self._images) if among is None else set(self._images) & among) - held:
            # An image without a use since the start counts as used at the first check.
            if self._used_ns.setdefault(digest, now_ns) <= now_ns - int(grace_s * 1e9):
                self._images.pop(digest, None)
                found.append(digest)
        return tuple(sorted(found))

    def plain_names(self) -> tuple[str, ...]:
        return tuple(filter(is_plain, list(self._links)))

    def busy(self, since_ns: int) -> frozenset[str]:
        """Return the images with a lease, a transfer that just ended, or a use since `since_ns`."""
        from_ns, landed = time.monotonic_ns() - LANDING_NS, list(self._landed_ns.items())
        landing = {digest for digest, at_ns in landed if at_ns > from_ns}
        return self.used_since(since_ns) | landing | set(+self._leases)

    def used_since(self, since_ns: int) -> frozenset[str]:
        """Return the images with a use since `since_ns`, by time.monotonic_ns()."""
        return frozenset(at for at, at_ns in list(self._used_ns.items()) if at_ns >= since_ns)

    def forget(self, digests: tuple[str, ...]) -> None:
        """Take images out of the index. The caller then passes them to `discard`."""
        for digest in digests:
            self._images.pop(digest, None)

    def discard(self, digests: tuple[str, ...], names: tuple[str, ...] = ()) -> None:
        """Unlink the images of `garbage` or `forget`, then their links and the links `names`.

        An image that a transfer has brought back meanwhile stays. Links are removed last: after a
        crash, the start of imaged removes links without an image. Images without a link would stay
        until `garbage`.
        """
        gone = set(digests) - set(self._images)
        lost = tuple(link.name for link in list(self._links.values()) if link.digest in gone)
        self.forget_names(lost)
        for digest in digests:
            with self._adopting:
                if digest not in self._images:
                    openat2.remove(hex_of(digest), self._data_fd)
                    self._landed_ns.pop(digest, None)
        if names or lost:
            os.fsync(self._data_fd)
            self._remove_files({*names, *lost})
        self.space.changed()


def _info(hex_digest: str, size_bytes: int, header: ImageHeader) -> ImageInfo:
    return ImageInfo(
        digest=f"sha256:{hex_digest}",
        format=header.format,
        size_bytes=size_bytes,
        virtual_size_bytes=header.virtual_size_bytes,
    )
