"""Resolves the image names in specs to image targets, by reads from the stream's leader."""

from collections.abc import Iterable

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.image_name_changes import target_of
from virtbus.controller.edge.key_states import stored_in
from virtbus.schemas.image import ImageTarget, parse_image_ref
from virtbus.schemas.image_name import FLEET, MAX_NAME_CHARS
from virtbus.schemas.records import read_image_name
from virtbus.schemas.subjects import image_name
from virtbus.schemas.vm import VmSpec


class ImageNameReads:
    """Finds image targets. A namespace's own image name precedes the fleet's image name."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    async def of_spec(self, spec: VmSpec, namespace: str) -> dict[str, ImageTarget]:
        """Return the targets of the image names in a spec, by name without digest.

        Names that the bus lacks are left out: the node resolves them by its `images.d`.

        Raises:
            VirtbusError: 422 `unreadable`: the record of an image name is unreadable.
        """
        refs = (volume.image.ref for volume in spec.volumes if volume.image is not None)
        return await self._all(refs, namespace)

    async def of_ref(self, ref: str, namespace: str) -> ImageTarget | None:
        """Return the target of the image name in a reference; raises as `of_spec`.

        Return None if the reference is a URL, or if the bus lacks the name.
        """
        return next(iter((await self._all((ref,), namespace)).values()), None)

    async def _all(self, refs: Iterable[str], namespace: str) -> dict[str, ImageTarget]:
        names = {parse_image_ref(ref).locator for ref in refs if "://" not in ref}
        found = {name: await self._find(name, namespace) for name in sorted(names)}
        return {name: target for name, target in found.items() if target is not None}

    async def _find(self, name: str, namespace: str) -> ImageTarget | None:
        if len(name) > MAX_NAME_CHARS:
            return None
        for scope in (namespace, FLEET):
            key = image_name(scope, name)
            # saves a round trip: most names are not on the bus, and the cache knows the others
            if self._fleet.images.names.at(key) or self._fleet.damaged.has(key):
                held = stored_in(await self._bus.get(key), read_image_name)
                if held is not None:
                    return target_of(held.record)
        return None
