"""Implements CRI's image calls by requests to imaged over the bus.

virtbus-cri keeps and lists only references to the images that it pulled. imaged owns the files, and
removes files to make room. A VM's create fetches an image again if imaged has removed the file.
"""

import asyncio
import hashlib
from collections.abc import Callable

from virtbus.cri.core import image_record, image_refs
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.configs import AuthConfig
from virtbus.cri.core.image_record import PulledImage
from virtbus.cri.edge.bus_link import BusLink
from virtbus.cri.edge.store import RecordFolder
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.image_api import ImagePull, PulledImages
from virtbus.schemas.wire import validate

PULL_S = 60.0
"""Time limit of one request. A longer pull continues in imaged, and the request is repeated."""
AGAIN_S = 1.0
NO_LOGIN = AuthConfig()


class Images:
    """The images that virtbus-cri pulled."""

    def __init__(
        self,
        folder: RecordFolder[PulledImage],
        link: BusLink,
        node: str,
        scheme: Callable[[], str] = lambda: "https",
    ) -> None:
        """`scheme` returns the URL scheme for disk images whose names are a host and a path."""
        self._folder = folder
        self._link = link
        self._node = node
        self._scheme = scheme
        self._all: dict[str, PulledImage] = {}

    def load(self) -> None:
        """Read all records from disk, before the first call."""
        self._all = self._folder.load()

    def known(self, text: str) -> PulledImage:
        """Return the image with this name or id.

        Raises the errors of `image_record.known`.
        """
        return image_record.known(self._all.values(), text)

    async def pull(self, text: str, namespace: str, auth: AuthConfig = NO_LOGIN) -> str:
        """Fetch an image to this node, without a time limit; return the image's id.

        Raises:
            VirtbusError: 400 `image_invalid`, `login_invalid`. 422 `login_unsupported`. 500
                `image_failed`, with the message of imaged. 503 `bus_away`. The errors of
                `image.pull`.
        """
        wanted = image_refs.parse(text)
        refs = image_refs.candidates(wanted, self._scheme())
        asks = [
            ImagePull(
                ref=ref,
                node=self._node,
                namespace=namespace or "default",
                pull_secret=image_refs.login(ref, auth),
            )
            for ref in refs
        ]
        ref, info = await self._fetch(asks)
        image = PulledImage(
            name=wanted.name,
            digest=info.digest,
            ref=image_refs.pinned(ref, info.digest),
            pinned=wanted.digest,
            size_bytes=info.size_bytes,
            virtual_bytes=info.virtual_size_bytes,
            pulled_ns=self._link.sources.time_ns(),
        )
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]
        self._all[key] = image
        await self._folder.put(key, image)
        return image.digest

    async def _fetch(self, asks: list[ImagePull]) -> tuple[str, ImageInfo]:
        """Fetch the first reference that exists. If none exists, raise the first error."""
        failure: VirtbusError | None = None
        for ask in asks:
            try:
                return ask.ref, await self._pull(ask)
            except VirtbusError as error:
                if error.code != Code.NOT_FOUND:
                    raise
                failure = failure or error
        assert failure is not None, "an image has at least one reference"  # noqa: S101
        raise failure

    async def _pull(self, want: ImagePull) -> ImageInfo:
        while True:
            try:
                answer = await self._link.ask("image", "pull", want, timeout_s=PULL_S)
            except VirtbusError as error:
                if error.code != Code.DEADLINE:
                    raise
                await asyncio.sleep(AGAIN_S)
                continue
            pulled = validate(PulledImages, answer)
            if self._node in pulled.images:
                return pulled.images[self._node]
            message = pulled.errors.get(self._node, "imaged did not answer")
            raise VirtbusError(Code.INTERNAL, "image_failed", message)

    async def remove(self, text: str) -> None:
        """Drop the image with this name or id, and all other names of its file, as in containerd.

        imaged keeps the file. An unknown image has no effect.
        """
        same = self._same(text)
        for key, image in tuple(self._all.items()):
            if image in same and self._all.pop(key, None) is not None:
                await self._folder.remove(key)

    def status(self, text: str, *, verbose: bool) -> Plain:
        same = self._same(text)
        if not same:
            return {}
        (image,) = image_record.listed(same)
        return {"image": image, "info": image_record.info(same) if verbose else {}}

    def listed(self, text: str) -> list[Plain]:
        if not text:
            return image_record.listed(self._all.values())
        return image_record.listed(self._same(text))

    def _same(self, text: str) -> list[PulledImage]:
        """Return the records with this name or id, and all other records of their digests."""
        digests = {one.digest for one in image_record.find(self._all.values(), text)}
        return [one for one in self._all.values() if one.digest in digests]

    @property
    def used_bytes(self) -> int:
        """Return the size of all pulled images. A file with several names counts once."""
        return sum({one.digest: one.size_bytes for one in self._all.values()}.values())

    @property
    def files(self) -> int:
        return len({one.digest for one in self._all.values()})
