"""Container images made by hand, and a registry on loopback that serves them."""

import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from backports import zstd
from services.imaged.tests.site_under_test import Web

from virtbus.imaged.edge.containers import Registries

OCI = "application/vnd.oci.image."
INDEX, MANIFEST = f"{OCI}index.v1+json", f"{OCI}manifest.v1+json"
LAYER = f"{OCI}layer.v1.tar"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def tar(*members: tuple[str, bytes | str], kind: bytes = tarfile.REGTYPE) -> bytes:
    """A layer: (name, bytes) is a file, (name, text) a symlink, a name with a final `/` a folder.

    `kind` is the type of files.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name.rstrip("/") if len(name) > 1 else name)
            if isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
            elif name.endswith("/"):
                info.type = tarfile.DIRTYPE
            else:
                info.type = kind
                info.size = len(data) if kind == tarfile.REGTYPE else 0
            archive.addfile(
                info, io.BytesIO(data) if info.size and isinstance(data, bytes) else None
            )
    return out.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def descriptor(data: bytes, kind: str, **more: Any) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data), **more}


@dataclass
class Registry:
    """Serves its content below `<site>/v2/`; `login` is the required Authorization."""

    site: Web
    blobs: dict[str, bytes] = field(default_factory=dict)
    """By `<repository>/blobs/<digest>` and `<repository>/manifests/<name>`."""
    kinds: dict[str, str] = field(default_factory=dict)
    challenge: str = ""
    login: str = ""

    def __post_init__(self) -> None:
        self.site.prefixes["v2/"] = self._answer

    @property
    def host(self) -> str:
        return self.site.base.removeprefix("http://")

    @property
    def known(self) -> Registries:
        """The node's settings for it."""
        return Registries(insecure=frozenset({self.host}), architecture="amd64")

    def ref(self, name: str) -> str:
        return f"docker://{self.host}/{name}"

    def asked(self, part: str) -> int:
        """Return the number of requests with `part` in their path."""
        return sum(part in request.path for request in self.site.requests)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.challenge and request.headers.get("Authorization") != self.login:
            return web.Response(status=401, headers={"WWW-Authenticate": self.challenge})
        path = request.path.removeprefix("/v2/")
        if path not in self.blobs:
            raise web.HTTPNotFound
        headers = {"Content-Type": self.kinds.get(path, "application/octet-stream")}
        return self.site.sent(request, self.blobs[path], headers)

    def put(self, path: str, data: bytes, kind: str = "") -> None:
        self.blobs[path] = data
        if kind:
            self.kinds[path] = kind

    def push_manifest(self, repository: str, tag: str, value: Mapping[str, Any], kind: str) -> str:
        """Store it; return its digest."""
        body = json.dumps(value).encode()
        for name in (tag, digest_of(body)):
            self.put(f"{repository}/manifests/{name}", body, kind)
        return digest_of(body)

    def manifest(
        self,
        repository: str,
        layers: Iterable[bytes],
        *,
        architecture: str = "amd64",
        kinds: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Store layers and configuration; return their descriptors."""
        config = json.dumps({"architecture": architecture, "os": "linux"}).encode()
        layers = tuple(layers)
        for data in (config, *layers):
            self.put(f"{repository}/blobs/{digest_of(data)}", data)
        types = tuple(kinds) or (LAYER,) * len(layers)
        return {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(config, f"{OCI}config.v1+json"),
            "layers": [descriptor(d, kind) for d, kind in zip(layers, types, strict=True)],
        }

    def push(self, repository: str, tag: str, *layers: bytes, architecture: str = "amd64") -> str:
        """Store an image, its layers from the lowest up; return the manifest's digest."""
        value = self.manifest(repository, layers, architecture=architecture)
        return self.push_manifest(repository, tag, value, MANIFEST)

    def push_index(self, repository: str, tag: str, images: Mapping[str, tuple[bytes, ...]]) -> str:
        """Store an image by architecture, as `buildx` pushes them, with an attestation."""
        entries = []
        for architecture, layers in images.items():
            value = self.manifest(repository, layers, architecture=architecture)
            self.push_manifest(repository, digest_of(json.dumps(value).encode()), value, MANIFEST)
            platform = {"os": "linux", "architecture": architecture}
            data = json.dumps(value).encode()
            entries.append(descriptor(data, MANIFEST, platform=platform))
        attestation = self.manifest(repository, [b"signed"], architecture="unknown")
        data = json.dumps(attestation).encode()
        self.push_manifest(repository, digest_of(data), attestation, MANIFEST)
        unknown = {"os": "unknown", "architecture": "unknown"}
        entries.insert(0, descriptor(data, MANIFEST, platform=unknown))
        value = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        return self.push_manifest(repository, tag, value, INDEX)


def gz(data: bytes) -> bytes:
    return gzip.compress(data, 1)


def zst(data: bytes) -> bytes:
    return zstd.compress(data)


def xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)
