"""Generates docs/reference/kubevirt-states.md: phases, run strategies and verbs."""

from virtbus.documents.kubevirt_fields import table
from virtbus.kubebridge.core.api.subresources import GROUP, VERBS
from virtbus.kubebridge.core.vm.run_strategies import TABLE, Decision, PendingRequest, VmiPresence
from virtbus.kubebridge.core.vm.status import PRINTABLE
from virtbus.kubebridge.core.vmi.phases import PHASE_OF
from virtbus.schemas.vm import RunStrategy


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        [
            "# KubeVirt's states and verbs",
            "",
            "## The phase of a VirtualMachineInstance",
            "",
            "The phase follows from the state of the VM in virtbus. `Succeeded` and `Failed` are"
            " final, and from `Pending` to `Running` no phase leads back, except from `Unknown`."
            " The phase is not `Failed` if the guest never ran: the start is retried, and the"
            " condition `Synchronized` has the reason of the failure.",
            "",
            *table(
                ("State of the VM", "Phase"),
                ((str(state), str(phase or "as before")) for state, phase in PHASE_OF.items()),
            ),
            "## printableStatus of a VirtualMachine",
            "",
            "The first status that applies, in this order: "
            + ", ".join(f"`{name}`" for name, _ in PRINTABLE)
            + ". If none applies, it is `Unknown`.",
            "",
            "## Run strategies",
            "",
            "The action follows from the run strategy, the state of the VirtualMachineInstance, and"
            " the first unmet request in `status.stateChangeRequests`. Other combinations need no"
            " action.",
            "",
            *table(("Strategy", "Instance", "Request", "Action"), _strategies()),
            "## Verbs",
            "",
            f"The verbs of `{GROUP}`. An unsupported verb answers 501 with the text in its row.",
            "",
            *table(
                ("Verb", "Method", "Answer"),
                (
                    (
                        f"`{verb.resource}/{verb.name}`",
                        verb.method,
                        f"501: {verb.missing}" if verb.missing else str(verb.success),
                    )
                    for verb in VERBS
                ),
            ),
        ]
    )


def _strategies() -> list[tuple[str, ...]]:
    return [
        (str(strategy), str(has), str(asked), str(do))
        for strategy in RunStrategy
        for has in VmiPresence
        for asked in PendingRequest
        if (do := TABLE.get((strategy, has, asked), Decision.NOTHING)) is not Decision.NOTHING
    ]
