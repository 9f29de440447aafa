"""Reads the parts of CRI's messages that routes and lists need.

No other module of the proxy uses protobuf.

Messages of either side pass through the proxy as bytes. A message is read here for a decision, and
encoded again only if it is merged, changed or kept. protobuf keeps fields that these stubs do not
know.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from cri_api.v1 import api_pb2
from google.protobuf.message import DecodeError, Message

from virtbus.criproxy.core.conditions import Condition
from virtbus.criproxy.core.entries import Entry, Wanted
from virtbus.criproxy.core.routing import ImageAsked, PodAsked
from virtbus.schemas.errors import Code, VirtbusError

STALE = "virtbus.io/stale"
"""A key in the `info` of a status. It marks the last known status of a runtime that is away."""


class ContainerAsked(NamedTuple):
    """The part of CreateContainer that the proxy reads."""

    sandbox_id: str
    image: ImageAsked


class UnreadableError(Exception):
    """A runtime's answer is not a message of the type that CRI defines for it."""


# --- requests ------------------------------------------------------------------------------------
def asked_id(call: str, field: str, body: bytes) -> str:
    """Return the id in a request; raises VirtbusError 400 if the request has no readable id."""
    found: str = getattr(_request(call, body), field)
    if not found:
        message = f"{call}: {field} is empty; name a sandbox or container"
        raise VirtbusError(Code.INVALID, "id_missing", message)
    return found


def asked_pod(body: bytes) -> PodAsked:
    """Return the pod of RunPodSandbox; raises VirtbusError 400 if the request is unreadable."""
    request = _request("RunPodSandbox", body)
    return _pod(request.config, request.runtime_handler)


def asked_container(body: bytes) -> ContainerAsked:
    """Return sandbox and image of CreateContainer; raises the error of `asked_pod`."""
    request = _request("CreateContainer", body)
    return ContainerAsked(request.pod_sandbox_id, _image_spec(request.config.image))


def asked_image(call: str, body: bytes) -> tuple[ImageAsked, PodAsked]:
    """Return the image and the pod of a call; raises the error of `asked_pod`."""
    request = _request(call, body)
    config = request.sandbox_config if call == "PullImage" else api_pb2.PodSandboxConfig()
    return _image_spec(request.image), _pod(config, "")


def asked_filter(call: str, body: bytes) -> Wanted:
    """Return the filter of a list call; raises the error of `asked_pod`."""
    request = _request(call, body)
    asked = getattr(request, "filter", None)
    if asked is None:
        return Wanted()
    if call == "ListImages":
        return Wanted(asked.image.image)
    stated = "state" in asked.DESCRIPTOR.fields_by_name and asked.HasField("state")
    return Wanted(
        asked.id,
        asked.state.state if stated else None,
        getattr(asked, "pod_sandbox_id", ""),
        dict(asked.label_selector),
    )


def by_id(call: str, key: str) -> bytes:
    """Return the request of ListPodSandbox or ListContainers for one id."""
    made: bytes = _type(f"{call}Request")(filter={"id": key}).SerializeToString()
    return made


def status_of(call: str, field: str, key: str) -> bytes:
    """Return the request of PodSandboxStatus or ContainerStatus for one id."""
    made: bytes = _type(f"{call}Request")(**{field: key}).SerializeToString()
    return made


def _pod(config: Any, handler: str) -> PodAsked:
    return PodAsked(handler, dict(config.annotations), config.metadata.uid)


def _image_spec(spec: Any) -> ImageAsked:
    handler, annotations = spec.runtime_handler, dict(spec.annotations)
    return ImageAsked(spec.image, spec.user_specified_image, handler, annotations)


def _request(call: str, body: bytes) -> Any:
    try:
        return _type(f"{call}Request").FromString(body)
    except DecodeError:
        message = f"the request is no {call}Request of runtime.v1; compare the versions of the CRI"
        raise VirtbusError(Code.INVALID, "request_unreadable", message) from None


def _type(name: str) -> type[Any]:
    found: type[Any] = getattr(api_pb2, name)
    return found


# --- entries of lists ----------------------------------------------------------------------------
def entries(call: str, body: bytes) -> dict[str, Entry]:
    """Return the entries of a list by key; raises UnreadableError."""
    field, _, read = _LISTS[call]
    found = (read(one) for one in getattr(_answer(call, body), field))
    return {one.key: one for one in found}


def digest(call: str, body: bytes) -> int:
    """Return a digest of a list. Lists with the same elements in any order have equal digests.

    Runtimes in Go write the elements, and the maps in them, in another order each time. The list is
    encoded as a whole, and hashed by Python's own hash, which has 64 bits and a secret key of this
    process. Encoding each element and a cryptographic hash would take twice the CPU time.

    Raises:
        UnreadableError: `body` is no answer of `call`.
    """
    message = _answer(call, body)
    field, key, _ = _LISTS[call]
    getattr(message, field).sort(key=key)
    return hash(_canonical(message))


def stored(call: str, raw: bytes) -> Entry:
    """Return the entry of one stored element of a list; raises DecodeError."""
    field, _, read = _LISTS[call]
    element = _type(f"{call}Response").DESCRIPTOR.fields_by_name[field].message_type
    return read(_type(element.name).FromString(raw))


def new_sandbox(body: bytes, answer: bytes, now_ns: int) -> Entry:
    """Return the entry of a sandbox that RunPodSandbox made; raises UnreadableError."""
    request = _request("RunPodSandbox", body)
    config = request.config
    return _sandbox(
        api_pb2.PodSandbox(
            id=_answer("RunPodSandbox", answer).pod_sandbox_id,
            metadata=config.metadata,
            created_at=now_ns,
            labels=dict(config.labels),
            annotations=dict(config.annotations),
            runtime_handler=request.runtime_handler,
        )
    )


def new_container(body: bytes, answer: bytes, now_ns: int) -> Entry:
    """Return the entry of a container that CreateContainer made; raises UnreadableError."""
    request = _request("CreateContainer", body)
    config = request.config
    return _container(
        api_pb2.Container(
            id=_answer("CreateContainer", answer).container_id,
            pod_sandbox_id=request.pod_sandbox_id,
            metadata=config.metadata,
            image=config.image,
            image_ref=config.image.image,
            created_at=now_ns,
            labels=dict(config.labels),
            annotations=dict(config.annotations),
        )
    )


def restated(call: str, entry: Entry, status: Entry) -> Entry:
    """Return an entry of ListPodSandbox or ListContainers with the state of a newer status."""
    *_, read = _LISTS[call]
    kind = api_pb2.PodSandbox if call == "ListPodSandbox" else api_pb2.Container
    message: Any = kind.FromString(entry.raw)
    message.state = status.state
    return read(message)


def status_entry(call: str, body: bytes) -> Entry:
    """Return the answer of PodSandboxStatus or ContainerStatus as an entry.

    The `info` of a verbose answer is left out, because it may be large and is never used again.

    Raises:
        UnreadableError: the answer is no status.
    """
    message = _answer(call, body)
    message.ClearField("info")
    return Entry(message.status.id, _canonical(message), message.status.state)


def stale(call: str, entry: Entry, why: str) -> bytes:
    """Return the last known status as an answer; STALE and the reason `why` are in its `info`."""
    message = _answer(call, entry.raw)
    message.info[STALE] = why
    made: bytes = message.SerializeToString()
    return made


def whole(call: str, body: bytes) -> Entry:
    """Return a complete answer as one entry, without its `info`; raises UnreadableError."""
    message = _answer(call, body)
    if "info" in message.DESCRIPTOR.fields_by_name:
        message.ClearField("info")
    return Entry(call, _canonical(message))


def _sandbox(one: Any) -> Entry:
    labels, raw = dict(one.labels), _canonical(one)
    return Entry(one.id, raw, one.state, pod_uid=one.metadata.uid, labels=labels)


def _container(one: Any) -> Entry:
    return Entry(one.id, _canonical(one), one.state, one.pod_sandbox_id, labels=dict(one.labels))


def _image(one: Any) -> Entry:
    untagged = (tag.removesuffix(":latest") for tag in one.repo_tags)
    return Entry(one.id, _canonical(one), names=(*one.repo_tags, *untagged, *one.repo_digests))


def _statistics(one: Any) -> Entry:
    return Entry(one.attributes.id, _canonical(one))


def _descriptor(one: Any) -> Entry:
    return Entry(one.name, _canonical(one))


def _metrics(one: Any) -> Entry:
    return Entry(one.pod_sandbox_id, _canonical(one))


_ID = attrgetter("id")
_OWNER = attrgetter("attributes.id")
_LISTS: dict[str, tuple[str, Callable[[Any], str], Callable[[Any], Entry]]] = {
    "ListPodSandbox": ("items", _ID, _sandbox),
    "ListContainers": ("containers", _ID, _container),
    "ListImages": ("images", _ID, _image),
    "ListContainerStats": ("stats", _OWNER, _statistics),
    "ListPodSandboxStats": ("stats", _OWNER, _statistics),
    "ListMetricDescriptors": ("descriptors", attrgetter("name"), _descriptor),
    "ListPodSandboxMetrics": ("pod_metrics", attrgetter("pod_sandbox_id"), _metrics),
}
"""By list call: the answer's field that has the list, and functions that return an element's key
and an element's entry."""


def _canonical(message: Message) -> bytes:
    """Return a message's bytes with sorted maps, because runtimes write maps in any order."""
    return message.SerializeToString(deterministic=True)


def _answer(call: str, body: bytes) -> Any:
    try:
        return _type(f"{call}Response").FromString(body)
    except DecodeError as error:
        text = f"the answer is no {call}Response of runtime.v1"
        raise UnreadableError(text) from error


# --- answers -------------------------------------------------------------------------------------
def has_image(answer: bytes) -> bool:
    """Return True if the answer of ImageStatus has an image; raises UnreadableError."""
    found: bool = _answer("ImageStatus", answer).HasField("image")
    return found


def conditions(answer: bytes) -> dict[str, Condition]:
    """Return the conditions in the answer of Status by type; raises UnreadableError."""
    told = _answer("Status", answer).status.conditions
    return {one.type: Condition(one.type, one.status, one.reason, one.message) for one in told}


def status_answer(first: bytes, others: Iterable[bytes], merged: Iterable[Condition]) -> bytes:
    """Return the answer of Status with the merged conditions.

    `first` is the answer of the runtime of containers; empty if that runtime has not answered. The
    features are those of `first`. Of several handlers or infos with the same name, the first is
    kept.

    Raises:
        UnreadableError: an answer is no status.
    """
    made = _answer("Status", first)
    for part in (_answer("Status", one) for one in others):
        known = {one.name for one in made.runtime_handlers}
        made.runtime_handlers.extend(one for one in part.runtime_handlers if one.name not in known)
        _add(made.info, part.info)
    del made.status.conditions[:]
    made.status.conditions.extend(
        api_pb2.RuntimeCondition(**condition._asdict()) for condition in merged
    )
    answer: bytes = made.SerializeToString()
    return answer


def _add(info: Any, more: Mapping[str, str]) -> None:
    for key, text in more.items():
        if key not in info:
            info[key] = text
