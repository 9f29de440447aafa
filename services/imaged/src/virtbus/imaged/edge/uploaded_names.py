"""Lists the names of uploaded images. Only a request removes such a name (ADR 0047)."""

from virtbus.imaged.edge.store import ImageStore


def uploaded_names(store: ImageStore, owner: str = "") -> frozenset[str]:
    """Return the names that were uploaded by `owner`, or by anybody."""
    links = filter(None, map(store.link, store.plain_names()))
    return frozenset(
        link.name for link in links if link.uploaded_by and owner in {"", link.uploaded_by}
    )
