"""Parses a registry's indexes and manifests, and chooses the manifest of an architecture.

The formats are those of the OCI image specification 1.1 and of Docker's schema 2. This module
ignores fields that it does not need (SRC-14, SRC-18, SRC-20).
"""

import json
import re
from typing import Any, NamedTuple, NoReturn

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.quantity import format_bytes

MAX_MANIFEST_BYTES = 1024**2
MAX_LAYERS = 256
MAX_MANIFESTS = 1024
MAX_SIZE_BYTES = (1 << 63) - 1
"""A descriptor's size is an int64. A larger number could be too long for an error text."""
_OCI = "application/vnd.oci.image."
_DOCKER = "application/vnd.docker."
INDEXES = frozenset(
    {f"{_OCI}index.v1+json", f"{_DOCKER}distribution.manifest.list.v2+json"},
)
MANIFESTS = frozenset({f"{_OCI}manifest.v1+json", f"{_DOCKER}distribution.manifest.v2+json"})
ACCEPT = ", ".join(sorted(MANIFESTS | INDEXES))
_LAYER = re.compile(
    r"application/vnd\.(?:oci\.image\.layer\.(?:nondistributable\.)?v1\.tar(?:\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(?:foreign\.)?diff\.tar(?:\.gzip|\.zstd)?)"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "i686": "386",
    "loongarch64": "loong64",
}
"""Go's name of an architecture by its name in `uname -m`, if the two names differ."""


class Blob(NamedTuple):
    """A blob in the registry: its digest and its size."""

    digest: str
    size_bytes: int


class Manifest(NamedTuple):
    """An image: its configuration, and its layers from the lowest to the uppermost."""

    config: Blob
    layers: tuple[Blob, ...]


class Index(NamedTuple):
    """The manifests of images: the OS, the architecture, and the blob of each.

    The OS and the architecture are empty if the index does not name them.
    """

    manifests: tuple[tuple[str, str, Blob], ...]


def architecture_of(machine: str) -> str:
    """Return Go's name of the architecture that `uname -m` calls `machine`."""
    return _ARCHITECTURES.get(machine, machine)


def parse(what: str, body: bytes, content_type: str) -> Manifest | Index:
    """Return the manifest or index in `body` of type `content_type`.

    Raises:
        VirtbusError: 422 `manifest_invalid`. 422 `container_disk_missing`: the media type of a
            layer is not that of an image's layer.
    """
    value = _json(what, body)
    kind = str(value.get("mediaType") or content_type.partition(";")[0].strip().lower())
    if value.get("schemaVersion") != 2 or ("manifests" in value and "layers" in value):
        invalid(what, "it is no image of schema 2, or it is ambiguous")
    if kind in INDEXES and "manifests" in value:
        return Index(tuple(_entry(what, e) for e in _items(what, value, "manifests")))
    if kind in MANIFESTS and "layers" in value:
        layers = _items(what, value, "layers")
        return Manifest(
            _blob(what, value.get("config")), tuple(_layer(what, layer) for layer in layers)
        )
    return invalid(what, f"its type is {kind[:100]!a}")


def choose(what: str, index: Index, architecture: str) -> Blob:
    """Return the first manifest for Linux on `architecture`.

    If there is none, return the first manifest without a platform.

    Raises:
        VirtbusError: 422 `wrong_architecture`.
    """
    for platform in (("linux", architecture), ("", "")):
        for os, cpu, blob in index.manifests:
            if (os, cpu) == platform:
                return blob
    known = {cpu for os, cpu, _ in index.manifests if os == "linux"}
    raise _architecture(what, known, architecture)


def check_config(what: str, body: bytes, architecture: str) -> None:
    """Refuse an image whose configuration names another architecture.

    Raises:
        VirtbusError: 422 `wrong_architecture`, `manifest_invalid`.
    """
    found = _json(what, body).get("architecture") or architecture
    if found != architecture:
        raise _architecture(what, {str(found)[:32]}, architecture)


def _architecture(what: str, known: set[str], architecture: str) -> VirtbusError:
    has = f"is for {', '.join(sorted(known))}" if known else "is for no architecture of Linux"
    return VirtbusError(
        Code.UNSUPPORTED,
        "wrong_architecture",
        f"{what} {has}; this node is {architecture}: use an image for it, or place the VM by "
        "node_selector on a node that fits",
    )


def _json(what: str, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        invalid(what, "its JSON cannot be read")
    return value


def _items(what: str, value: dict[str, Any], key: str) -> list[Any]:
    items = value[key]
    most = MAX_LAYERS if key == "layers" else MAX_MANIFESTS
    if not isinstance(items, list) or not 0 < len(items) <= most:
        invalid(what, f"it has no {key}, or more than {most}")
    return items


def _blob(what: str, value: Any) -> Blob:
    digest, size = (value.get("digest"), value.get("size")) if isinstance(value, dict) else (0, 0)
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        invalid(what, "a digest in it is not sha256")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_SIZE_BYTES:
        invalid(what, "a size in it is invalid")
    return Blob(digest, size)


def _layer(what: str, value: Any) -> Blob:
    blob = _blob(what, value)
    kind = value.get("mediaType")
    if not isinstance(kind, str) or _LAYER.fullmatch(kind) is None:
        raise VirtbusError(
            Code.UNSUPPORTED,
            "container_disk_missing",
            f"{what} is no containerDisk: it holds {str(kind)[:100]!a} where an image has layers; "
            "name an image that is built with the disk in /disk",
        )
    return blob


def _entry(what: str, value: Any) -> tuple[str, str, Blob]:
    blob = _blob(what, value)
    if str(value.get("mediaType")) not in MANIFESTS:
        return "index", "", blob  # an index in an index is never followed
    platform = value.get("platform")
    if not isinstance(platform, dict):
        return "", "", blob
    return str(platform.get("os", ""))[:32], str(platform.get("architecture", ""))[:32], blob


def invalid(what: str, why: str) -> NoReturn:
    """Raise 422 `manifest_invalid`."""
    raise VirtbusError(
        Code.UNSUPPORTED,
        "manifest_invalid",
        f"the registry's answer for {what} is no image that can be used: {why}; "
        "push the image again, in OCI's or Docker's present format",
    )


def check_sizes(what: str, layers: tuple[Blob, ...], max_bytes: int) -> int:
    """Return the total size of all layers.

    Raises:
        VirtbusError: 413 `image_too_large`.
    """
    total = sum(layer.size_bytes for layer in layers)
    if total > max_bytes:
        raise VirtbusError(
            Code.TOO_LARGE,
            "image_too_large",
            f"{what} has layers of {format_bytes(total)}; at most {format_bytes(max_bytes)} "
            "are fetched (setting max_bytes)",
        )
    return total
