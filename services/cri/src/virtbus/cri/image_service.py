"""Connects CRI's ImageService with the images that virtbus-cri pulled."""

from pathlib import Path

from virtbus.bus.runtime.sources import Sources
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.configs import AuthConfig
from virtbus.cri.edge.grpc_server import Call, Offer
from virtbus.cri.images import Images
from virtbus.schemas.wire import validate


class ImageService:
    """The handlers of ImageService. `folder` has imaged's images on this node."""

    def __init__(self, images: Images, folder: Path, sources: Sources) -> None:
        self._images = images
        self._folder = folder
        self._sources = sources

    @property
    def offer(self) -> Offer:
        return Offer(
            {
                "ListImages": self._list,
                "ImageStatus": self._status,
                "PullImage": self._pull,
                "RemoveImage": self._remove,
                "ImageFsInfo": self._filesystem,
            },
            {},
        )

    async def _list(self, call: Call) -> Plain:
        wanted = _image(call.request.get("filter", {}))
        return {"images": self._images.listed(wanted)}

    async def _status(self, call: Call) -> Plain:
        verbose = call.request.get("verbose", False)
        return self._images.status(_image(call.request), verbose=verbose)

    async def _pull(self, call: Call) -> Plain:
        sandbox = call.request.get("sandbox_config", {})
        namespace = sandbox.get("metadata", {}).get("namespace", "")
        auth = validate(AuthConfig, call.request.get("auth", {}))
        return {"image_ref": await self._images.pull(_image(call.request), namespace, auth)}

    async def _remove(self, call: Call) -> Plain:
        await self._images.remove(_image(call.request))
        return {}

    async def _filesystem(self, _: Call) -> Plain:
        usage = {
            "timestamp": self._sources.time_ns(),
            "fs_id": {"mountpoint": str(self._folder)},
            "used_bytes": {"value": self._images.used_bytes},
            "inodes_used": {"value": self._images.files},
        }
        return {"image_filesystems": [usage], "container_filesystems": [usage]}


def _image(holder: Plain) -> str:
    return str(holder.get("image", {}).get("image", ""))
