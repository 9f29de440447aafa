"""Extracts disks from container images (KubeVirt's containerDisks), layer by layer.

Each layer is fetched into its own partial download (part), so that the fetch can resume. After the
layer's digest is verified, the layer is decompressed, and its tar is read entry by entry. Only the
disk file's bytes are written, to the image's part.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from virtbus.imaged.core import manifests
from virtbus.imaged.core.archive import Archive, DamagedError
from virtbus.imaged.core.decoding import decoded
from virtbus.imaged.core.layers import Search
from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.manifests import Blob, Index, Manifest, architecture_of
from virtbus.imaged.core.sources import Validators, shown
from virtbus.imaged.edge.decoding_work import DecodingWork, chunks
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.download import Downloads
from virtbus.imaged.edge.local_files import Fetched, OnBytes, too_large
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.imaged.edge.partial_downloads import open_part
from virtbus.imaged.edge.registry import Document, Registry
from virtbus.imaged.edge.store import ImageStore
from virtbus.schemas.container import ContainerRef, parse_locator
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.registry_login import Login, login_for


class Transfer(Protocol):
    """The pull that fetches the image: `single_flight.Flight`."""

    @property
    def abandoned(self) -> bool: ...
    def on_bytes(self, done_bytes: int, total_bytes: int | None) -> None: ...
    def worked(self, more_bytes: int) -> None: ...


MAX_AUTH_FILE_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Registries:
    """The node's configuration of registries."""

    insecure: frozenset[str] = frozenset()
    """`host[:port]` of registries that use plain http."""
    auth_file: Path | None = None
    pull_secret: str = field(default="", repr=False)
    """A VM's own logins, in the format of `auth_file`. If set, `auth_file` is not read."""
    realms: tuple[tuple[str, str], ...] = ()
    """Pairs of a registry and the host of its token server, which may get the login's password."""
    mirrors: tuple[tuple[str, str], ...] = ()
    """Pairs of a registry and the mirror that replaces it. The mirror has its own login."""
    architecture: str = field(default_factory=lambda: architecture_of(os.uname().machine))
    """Go's name of the node's architecture, as in image manifests, such as amd64."""

    @property
    def login_from(self) -> str:
        return "the VM's image_pull_secret" if self.pull_secret else "the node's registry-auth.json"

    def asked(self, ref: ContainerRef) -> ContainerRef:
        return ref._replace(registry=dict(self.mirrors).get(ref.registry, ref.registry))

    def login(self, ref: ContainerRef) -> Login | None:
        """Return the login for `ref`, or None; reads `auth_file` each time. Blocks on the disk.

        Raises:
            VirtbusError: 503 `registry_auth_invalid`.
        """
        if self.pull_secret:
            return login_for(ref.image, self.pull_secret.encode())
        if self.auth_file is None:
            return None
        try:
            with self.auth_file.open("rb") as file:
                text = file.read(MAX_AUTH_FILE_BYTES)
            return login_for(ref.image, text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise VirtbusError(
                Code.UNAVAILABLE,
                "registry_auth_invalid",
                f"the logins for registries in {self.auth_file} cannot be read: {error}; "
                "repair that file; imaged retries",
            ) from error


class Containers:
    """Fetches the disks of `docker://` images into parts."""

    def __init__(
        self,
        store: ImageStore,
        threads: DiskThreads,
        downloads: Downloads,
        limits: TransferLimits,
        registries: Registries,
    ) -> None:
        self._store = store
        self._threads = threads
        self._downloads = downloads
        self._limits = limits
        self._registries = registries

    def of_pull(self, downloads: Downloads, pull_secret: str) -> "Containers":
        """Return a copy for one pull. `pull_secret` has the VM's own logins; empty if none."""
        registries = replace(self._registries, pull_secret=pull_secret)
        return Containers(self._store, self._threads, downloads, self._limits, registries)

    async def fetch(
        self,
        locator: str,
        pin: str | None,
        part: PartialDownload,
        known: Validators,
        transfer: Transfer,
    ) -> Fetched:
        """Fill `part` with the disk of the image; the result's ETag is the manifest's digest.

        The tag is resolved once. All further requests are by digest (SRC-15).

        Raises:
            VirtbusError: 413 `image_too_large`. 422 `container_disk_missing`,
                `container_disk_many`, `container_disk_irregular`, `layer_invalid`,
                `manifest_invalid`, `wrong_architecture`. 503 `registry_auth_invalid`,
                `layer_digest_mismatch`. The errors of `Registry.document` and `Downloads.fetch`.
        """
        if pin is not None and known.etag == pin:
            return Fetched(known, unchanged=True)
        ref = self._registries.asked(parse_locator(locator, pinned=pin is not None))
        registry = Registry(
            self._downloads.http,
            ref,
            insecure=ref.registry in self._registries.insecure,
            login=await self._threads.run(self._registries.login, ref),
            login_from=self._registries.login_from,
            realms=dict(self._registries.realms),
        )
        document = await self._manifest(registry, pin or ref.tag)
        if known.etag == document.digest:
            return Fetched(known, unchanged=True)
        manifest = await self._choose(registry, document)
        total = manifests.check_sizes(registry.what, manifest.layers, self._limits.max_bytes)
        search = Search(shown(registry.what), ref.path)
        reading = DecodingWork(self._limits, transfer.worked)
        done = 0
        # A part that closes without an error is removed. All parts stay open until the end, so that
        # after a failed layer the next attempt finds the layers before it.
        async with contextlib.AsyncExitStack() as parts:
            for layer in reversed(manifest.layers):
                key = f"{part.key}\n{layer.digest}"
                blob = await parts.enter_async_context(
                    open_part(self._store, self._threads, key, lambda: transfer.abandoned)
                )
                await self._layer(registry, layer, blob, _shifted(transfer.on_bytes, done, total))
                await self._stream(blob, search, part, reading)
                done += layer.size_bytes
                search.next_layer()
                if search.closed:
                    break
            if not search.found:
                raise search.missing()
        return Fetched(Validators(etag=document.digest))

    async def _manifest(self, registry: Registry, name: str) -> Document:
        return await registry.document(
            "manifests", name, manifests.ACCEPT, manifests.MAX_MANIFEST_BYTES
        )

    async def _choose(self, registry: Registry, document: Document) -> Manifest:
        what, ours = shown(registry.what), self._registries.architecture
        found = manifests.parse(what, document.body, document.content_type)
        if isinstance(found, Index):
            blob = manifests.choose(what, found, ours)
            document = await self._manifest(registry, blob.digest)
            found = manifests.parse(what, document.body, document.content_type)
        if isinstance(found, Index):
            manifests.invalid(what, "it is an index of indexes")
        config = await registry.document(
            "blobs", found.config.digest, "*/*", manifests.MAX_MANIFEST_BYTES
        )
        manifests.check_config(what, config.body, ours)
        return found

    async def _layer(
        self, registry: Registry, layer: Blob, blob: PartialDownload, on_bytes: OnBytes
    ) -> None:
        url = registry.url_of("blobs", layer.digest)
        await self._downloads.fetch(
            url,
            blob,
            Validators(),
            on_bytes,
            pinned=True,
            site=registry,
            size_bytes=layer.size_bytes,
        )
        if f"sha256:{blob.hex_digest}" != layer.digest:
            await self._threads.run(blob.restart, None)
            raise VirtbusError(
                Code.UNAVAILABLE,
                "layer_digest_mismatch",
                f"the registry delivers other bytes than the layer {layer.digest} of "
                f"{shown(registry.what)}; if that stays so, push the image again",
            )

    async def _stream(
        self, blob: PartialDownload, search: Search, part: PartialDownload, reading: DecodingWork
    ) -> None:
        steps = self._steps(blob, search, part, reading)
        try:
            more = True
            while more:
                more = await self._threads.run(reading.run_steps, steps)
                reading.check()
        except DamagedError as error:
            raise VirtbusError(
                Code.UNSUPPORTED,
                "layer_invalid",
                f"a layer of {search.what} cannot be used: {error}",
            ) from None

    def _steps(
        self, blob: PartialDownload, search: Search, part: PartialDownload, reading: DecodingWork
    ) -> Iterator[None]:
        """Yield after each small piece of work. Runs in disk threads."""
        limits = self._limits
        pieces = decoded(chunks(blob), limits.max_bytes, limits.max_expansion)
        archive = Archive(reading.counted(pieces))
        while (entry := archive.entry()) is not None:
            wanted = search.is_disk(entry)
            if wanted and entry.size_bytes > limits.max_bytes:
                raise too_large(f"{search.what}{search.found}", entry.size_bytes, limits.max_bytes)
            if wanted:
                part.restart(None)
            for piece in archive.data():
                if wanted:
                    part.write(piece)
                yield
            yield
        yield from archive.drain()


def _shifted(on_bytes: OnBytes, done: int, total: int) -> OnBytes:
    return lambda more, _: on_bytes(done + more, total)
