"""Random walks over the table of a VM's life: invariants that hold for events in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from virtbus.nodeagent.vm.machine import REQUESTS, Action, MachineEvent, VmPhase, accepts, step
from virtbus.nodeagent.vm.status import VISIBLE
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import RunStrategy

WAY_UP = {"prepare", "start", "await start"}
GUEST_ENDS = st.sampled_from(["shut down", "ended", "crashed"])
PREPARED = ["dependencies ready", "dependencies failed", "dependencies impossible"]
ENOUGH = 20


class Life(RuleBasedStateMachine):
    """A VM and its guest; `doing` is the agent's unfinished work."""

    @initialize(strategy=st.sampled_from([str(one) for one in RunStrategy]))
    def begin(self, strategy: str) -> None:
        self.strategy = strategy
        self.phase: VmPhase = "new"
        self.guest = False
        self.doing: set[Action] = set()
        self.deleting = False

    def take(self, event: MachineEvent) -> None:
        self.phase, actions = step(self.phase, event, self.strategy)
        for action in actions:
            assert not (self.deleting and action in WAY_UP), "a deleted VM is on its way up"
            if action == "release":
                assert not self.guest, "disks are released under a guest"
                self.doing.clear()
            self.doing.add(action)

    # --- requests of users ----------------------------------------------------------------
    @precondition(lambda self: not self.deleting)
    @rule(event=st.sampled_from(sorted(REQUESTS - {"delete"})))
    def node_spec(self, event: MachineEvent) -> None:
        self.take(event)

    @rule()
    def delete(self) -> None:
        self.deleting = True
        self.take("delete")

    # --- results of actions ---------------------------------------------------------------
    @precondition(lambda self: "prepare" in self.doing)
    @rule(event=st.sampled_from(PREPARED))
    def prepared(self, event: MachineEvent) -> None:
        self.doing.discard("prepare")
        if accepts(self.phase, event, starting=False, powered=True):
            self.take(event)

    @precondition(lambda self: "start" in self.doing)
    @rule(event=st.sampled_from(["started", "start failed", "start later"]))
    def start_ended(self, event: MachineEvent) -> None:
        self.doing.discard("start")
        self.guest = event == "started"
        self.take(event)

    @precondition(lambda self: "destroy" in self.doing)
    @rule()
    def destroyed(self) -> None:
        self.doing -= {"destroy", "start"}
        self.guest = False
        self.take("ended")

    @precondition(lambda self: "release" in self.doing)
    @rule()
    def released(self) -> None:
        self.doing.discard("release")
        self.take("released")

    # --- spontaneous events ---------------------------------------------------------------
    @precondition(lambda self: self.guest)
    @rule(event=GUEST_ENDS)
    def guest_ends(self, event: MachineEvent) -> None:
        self.guest = False
        self.take(event)

    @precondition(lambda self: self.doing & {"retry soon", "retry backed off"})
    @rule()
    def retry(self) -> None:
        self.doing -= {"retry soon", "retry backed off"}
        self.take("retry")

    @precondition(lambda self: "shutdown" in self.doing)
    @rule()
    def grace_over(self) -> None:
        self.doing.discard("shutdown")
        self.take("grace expired")

    # --- guarantees -----------------------------------------------------------------------
    @invariant()
    def a_guest_that_runs_is_known(self) -> None:
        if getattr(self, "guest", False):
            assert self.phase in {"running", "stopping", "ending"}

    @invariant()
    def a_deleted_vm_is_shown_so(self) -> None:
        if getattr(self, "deleting", False):
            assert VISIBLE[self.phase] is VmState.DELETING

    def teardown(self) -> None:
        """From every end of a walk, a delete completes."""
        if not hasattr(self, "phase"):
            return
        self.delete()
        for _ in range(ENOUGH):
            if self.phase == "released":
                break
            if "destroy" in self.doing:
                self.destroyed()
            elif "release" in self.doing:
                self.released()
            elif "start" in self.doing:
                self.start_ended("started")
            else:
                self.grace_over()
        self.take("purged")
        assert str(self.phase) == "gone"


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30)
