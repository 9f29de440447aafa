"""Defines an image that the CRI pulled, and finds images by name, digest or id."""

import json
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from virtbus.cri.core import image_refs
from virtbus.cri.core.stored_record import StoredRecord
from virtbus.schemas.errors import Code, VirtbusError


class PulledImage(StoredRecord):
    """The CRI's reference to an image of imaged's store. `digest` is the image's id in CRI.

    `name` is the name in the pod, without a digest; empty for a pull by digest only. `ref` is the
    reference for the VM.
    """

    name: str
    digest: str
    ref: str
    pinned: str = ""
    """The digest that the pod names: that of the file, or of a container image's manifest."""
    size_bytes: int
    virtual_bytes: int
    """The size of the disk in the image."""
    pulled_ns: int


def find(images: Iterable[PulledImage], text: str) -> Iterator[PulledImage]:
    """Yield the images that a name, `name@digest`, digest or id means.

    Raises:
        VirtbusError: 400 `image_invalid`.
    """
    wanted = image_refs.parse(text)
    for image in images:
        if wanted.digest and wanted.digest not in {image.digest, image.pinned}:
            continue
        if wanted.name and wanted.plain != image_refs.parse(image.name).plain:
            continue
        yield image


def known(images: Iterable[PulledImage], text: str) -> PulledImage:
    """Return the image for a container.

    Raises:
        VirtbusError: 404 `image_not_pulled`.
    """
    found = next(find(images, text), None)
    if found is None:
        message = f"the image {text!r:.200} was not pulled here; PullImage fetches it"
        raise VirtbusError(Code.NOT_FOUND, "image_not_pulled", message)
    return found


def listed(images: Iterable[PulledImage]) -> list[dict[str, Any]]:
    """Return images as ListImages has them: one for each digest, with all its names.

    A pull by digest gives no tag. Other names have one, as clients expect: crictl shows no name
    without a tag.
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
    """Return the `info` of a verbose status: JSON about each name of an image."""
    told = sorted((one.model_dump(mode="json") for one in same), key=itemgetter("name"))
    return {"info": json.dumps({"virtbusImages": told}, sort_keys=True)}


def _has_tag(image: PulledImage) -> bool:
    return bool(image.name) and not image.pinned
