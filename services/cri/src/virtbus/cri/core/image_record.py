"""Defines an image that virtbus-cri pulled, and finds images by name, digest or id."""

import json
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from virtbus.cri.core import image_refs
from virtbus.cri.core.stored_record import StoredRecord
from virtbus.schemas.errors import Code, VirtbusError


class PulledImage(StoredRecord):
    """A pulled image under one name. imaged stores the image's file.

    `name` is the pod's image name without its digest. `digest` is the image's id in CRI. `ref` is
    the image reference for the spec of a VM.
    """

    name: str
    digest: str
    ref: str
    pinned: str = ""
    """The digest in the pod's image name; empty without a digest. The digest is that of the
    manifest for a container image, and that of the file for other images."""
    size_bytes: int
    virtual_bytes: int
    """The virtual size of the disk in the image."""
    pulled_ns: int


def find(images: Iterable[PulledImage], text: str) -> Iterator[PulledImage]:
    """Yield the images that match `text`: a name, a `name@digest`, a digest, or an id.

    A name without a digest does not match an image that was pulled with a digest.

    Raises:
        VirtbusError: 400 `image_invalid`.
    """
    wanted = image_refs.parse(text)
    for image in images:
        if wanted.digest and wanted.digest not in {image.digest, image.pinned}:
            continue
        if wanted.name and not _has_name(image, wanted):
            continue
        yield image


def _has_name(image: PulledImage, wanted: image_refs.ImageName) -> bool:
    if not image.name or (image.pinned and not wanted.digest):
        return False
    return image_refs.parse(image.name).plain == wanted.plain


def known(images: Iterable[PulledImage], text: str) -> PulledImage:
    """Return the first image that matches `text`.

    Raises:
        VirtbusError: 400 `image_invalid`. 404 `image_not_pulled`: no image matches.
    """
    found = next(find(images, text), None)
    if found is None:
        message = f"the image {text!r:.200} was not pulled here; PullImage fetches it"
        raise VirtbusError(Code.NOT_FOUND, "image_not_pulled", message)
    return found


def listed(images: Iterable[PulledImage]) -> list[dict[str, Any]]:
    """Return images in the shape of ListImages: one item for each digest, with all names.

    An image that was pulled with a digest has no tag. All other names get a tag, because crictl
    shows only names with a tag.
    """
    by_digest: dict[str, list[PulledImage]] = {}
    for image in images:
        by_digest.setdefault(image.digest, []).append(image)
    return [
        {
            "id": digest,
            "repo_tags": sorted({image_refs.tagged(one.name) for one in same if _has_tag(one)}),
            "repo_digests": sorted({f"{one.name}@{one.pinned or digest}" for one in same}),
            "size": max(one.size_bytes for one in same),
            "spec": {"image": same[0].name},
        }
        for digest, same in sorted(by_digest.items())
    ]


def info(same: Iterable[PulledImage]) -> dict[str, str]:
    """Return the `info` of a verbose status: the records of all names of an image, as JSON."""
    told = sorted((one.model_dump(mode="json") for one in same), key=itemgetter("name"))
    return {"info": json.dumps({"virtbusImages": told}, sort_keys=True)}


def _has_tag(image: PulledImage) -> bool:
    return bool(image.name) and not image.pinned
