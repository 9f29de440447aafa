"""Fields of placement, readiness and termination: the rest of the VMI's spec."""

from virtbus.kubebridge.core.fields.row import Kind, below, ignored, mapped, refused
from virtbus.schemas.vm import EvictionStrategy

EVERY_NODE = {
    "kubevirt.io/schedulable": "true",
    "kubernetes.io/arch": "amd64",
    "kubernetes.io/os": "linux",
}
"""Labels of a Kubernetes node that any node of virtbus which takes VMs has, unsaid."""


def virtbus_labels(value: dict[str, str]) -> dict[str, str]:
    """A node selector without what every node of virtbus fulfils."""
    return {key: want for key, want in value.items() if EVERY_NODE.get(key) != want}


NAMES = "names are given by who asks for addresses; virtbus serves no DNS"
PROBES = "guests are not probed"

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
TERMS = f"affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[]"
OTHERS = "placement knows nodes, and not what runs there"
AFFINITY = (
    below("affinity"),
    below("affinity.nodeAffinity"),
    below(f"affinity.nodeAffinity.{REQUIRED}", "the same as nodeSelector"),
    below(TERMS),
    below(f"{TERMS}.matchExpressions[]"),
    mapped(f"{TERMS}.matchExpressions[].key", Kind.TEXT, "", "a label of virtbus nodes"),
    mapped(
        f"{TERMS}.matchExpressions[].operator",
        Kind.TEXT,
        values=("In",),
        instead="write In with one value, or label the nodes and use nodeSelector",
    ),
    mapped(f"{TERMS}.matchExpressions[].values", Kind.ANY, "", "one value"),
    refused(
        f"{TERMS}.matchFields[]",
        "nodes are chosen by their labels",
        "give the nodes a label, and use nodeSelector",
    ),
    ignored(f"affinity.nodeAffinity.{PREFERRED}[]", "a wish; the emptiest node is taken"),
    *(
        row
        for other in ("podAffinity", "podAntiAffinity")
        for row in (
            below(f"affinity.{other}"),
            refused(f"affinity.{other}.{REQUIRED}[]", OTHERS, "use nodeSelector"),
            ignored(f"affinity.{other}.{PREFERRED}[]", "a wish; the emptiest node is taken"),
        )
    ),
)

PLACEMENT = (
    mapped("architecture", Kind.TEXT, "", "the nodes'", values=("amd64",), instead="write amd64"),
    mapped(
        "nodeSelector",
        Kind.MAP,
        "spec.node_selector",
        "labels of virtbus nodes; "
        + ", ".join(f"`{k}={v}`" for k, v in EVERY_NODE.items())
        + " hold for each of them",
        make=virtbus_labels,
    ),
    *AFFINITY,
    refused(
        "topologySpreadConstraints[]",
        "placement prefers the emptiest node, whatever runs there",
        "use nodeSelector; several nodes fill evenly by themselves",
    ),
    ignored("tolerations[]", "they only permit; nodes of virtbus have no taints"),
    mapped(
        "schedulerName",
        Kind.TEXT,
        "",
        values=("default-scheduler",),
        instead="leave it out: virtbus places VMs itself",
    ),
    ignored("priorityClassName", "no VM is stopped for the sake of another"),
    ignored("serviceAccountName", "the identity of a pod; there is none"),
    refused("resourceClaims[]", "no device is passed through", "leave it out"),
    mapped(
        "evictionStrategy",
        Kind.TEXT,
        "spec.eviction_strategy",
        values=tuple(str(one) for one in EvictionStrategy),
        instead="write " + ", ".join(EvictionStrategy),
    ),
)

LIFE = (
    mapped(
        "startStrategy",
        Kind.TEXT,
        "spec.start_strategy",
        values=("Paused",),
        instead="write Paused, or leave it out",
    ),
    mapped(
        "terminationGracePeriodSeconds",
        Kind.NUMBER,
        "spec.termination_grace_s",
        "seconds for a guest to shut down; 0: none",
    ),
    refused("livenessProbe", PROBES, "leave it out; watch the guest from outside"),
    refused("readinessProbe", PROBES, "leave it out; a VM is Ready once its guest runs"),
)

NAMING = (
    mapped(
        "hostname",
        Kind.TEXT,
        "",
        "the seed's host name; without it the VMI's name",
        pattern=r"(?!-)[a-z0-9-]{1,63}(?<!-)",
        instead="write 1-63 characters of a-z, 0-9 and '-'",
    ),
    refused("subdomain", NAMES, "leave it out"),
    mapped(
        "dnsPolicy",
        Kind.TEXT,
        "",
        "DHCP brings the node's own name servers",
        values=("Default",),
        instead="leave it out, and name servers in cloud-init's network data",
    ),
    refused("dnsConfig", NAMES, "name servers in cloud-init's network data"),
)

ALL = (below(""), *PLACEMENT, *LIFE, *NAMING)
