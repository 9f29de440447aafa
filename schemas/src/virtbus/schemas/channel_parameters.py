"""The parameters of subjects: a sample value of each, and what it is."""

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
}
PARAMETERS = {
    "uid": "the VM's UUID",
    "name": "lower-case base32 of the VM's name, without padding",
    "namespace": "the VM's namespace",
    "node": "a node's id; `_` where there is none",
    "service": "netd, imaged or nodeagent; of a dead letter, who gave it up",
    "part": "`image` or `net`",
    "step": "the long step, such as `image`",
    "verb": "a verb of the agent that opens a stream, such as `console`",
    "kind": "a kind of `virtbus.schemas.events.Kind`; its dot makes two tokens",
    "role": "a singleton's role",
    "session": "the stream's own id, which the agent told its client alone",
    "instance": "the controller that serves the watch",
    "token": "the watch's own, random; only its client was told",
    "bucket": "a KV bucket, such as `vm`",
}
