"""Makes subject templates such as `$KV.vm.{node}.{uid}`, and describes their parameters."""

import inspect
from collections.abc import Callable

from virtbus.schemas.ids import name_token

SAMPLES = {
    "uid": "0192f0c1-2d3e-7abc-8def-0123456789ab",
    "name": "sample-name",
    "namespace": "sample-namespace",
    "node": "sample-node",
    "service": "sample-service",
    "part": "sample-part",
    "step": "sample-step",
    "kind": "sample-kind",
    "role": "sample-role",
    "session": "sample-session",
    "verb": "sample-verb",
    "instance": "sample-instance",
    "token": "sample-token",
    "bucket": "sample-bucket",
    "key": "sample-key",
    "network": "0192f0c1-2d3e-7abc-8def-0123456789ac",
    "address": "10.0.0.1",
    "peer": "sample-peer",
}
PARAMETERS = {
    "uid": "the UUID of the VM, the object or the operation",
    "name": "lower-case base32 of the name of a VM or object, without padding",
    "namespace": "the namespace of a VM or object",
    "node": "a node's id; `_` for VMs without a node",
    "service": "netd, imaged or nodeagent; of a dead letter, the service that wrote it",
    "part": "`image` or `net`",
    "step": "the operation, such as `image`",
    "verb": "a verb of the agent that opens a stream, such as `console`",
    "kind": "a kind of `virtbus.schemas.events.Kind`; its dot makes two tokens",
    "role": "a singleton's role",
    "session": "the stream's own id, known only to the agent and its client",
    "instance": "the controller that serves the watch",
    "token": "the watch's own random token, known only to its client",
    "key": "the id of a key: the digest of its public half",
    "network": "the uid of a network object",
    "address": "lower-case base32 of an IPv4, IPv6 or MAC address, without padding",
    "peer": "the id of another node that has guests of the network",
    "bucket": "a KV bucket, such as `vm`",
}


ASKERS = {
    "list": "controller",
    "pull": "controller",
    "delete": "controller",
    "records": "controller",
    "groups": "controller",
    "join": "controller",
    "audit": "controller",
    "guest": "client",
    "exec": "client",
    "upload": "client",
    "export-link": "client",
    "counters": "client",
    "network": "client",
    "command": "controller",
    "freeze": "controller",
    "volume-release": "controller",
    "snapshot-release": "controller",
    "backups": "controller",
    "inspect": "controller, tools and tests",
    "quarantine": "controller, nodeagent",
}
"""The callers of verbs of a node's services. Of the verbs that are not listed, clients call the
verbs that open streams, and nodeagent calls all others."""


def template(make: Callable[..., str], **fixed: str) -> str:
    """Return the subject of `make`, with `{name}` for each argument that is not in `fixed`."""
    names = [name for name in inspect.signature(make).parameters if name not in fixed]
    subject = make(**fixed, **{name: SAMPLES[name] for name in names})
    for name in names:
        sample = SAMPLES[name]
        token = name_token(sample)
        subject = subject.replace(token if token in subject else sample, f"{{{name}}}")
    return subject
