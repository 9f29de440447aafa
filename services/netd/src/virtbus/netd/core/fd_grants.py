"""One-time grants to fetch tap descriptors, valid for 30 s."""

from virtbus.schemas.node_rpc import Arm

ARM_LIFETIME_S = 30.0


class FdGrants:
    """The grants (`Arm`) by uid. `now_s` is the caller's monotonic clock."""

    def __init__(self) -> None:
        self._arms: dict[str, tuple[Arm, float]] = {}

    def put(self, arm: Arm, now_s: float) -> None:
        """Add a grant in place of an earlier grant of the same uid. Drop expired grants."""
        self._arms = {
            uid: kept for uid, kept in self._arms.items() if kept[1] > now_s and uid != arm.uid
        }
        self._arms[arm.uid] = (arm, now_s + ARM_LIFETIME_S)

    def peek(self, uid: str, now_s: float) -> Arm | None:
        arm, until_s = self._arms.get(uid, (None, 0.0))
        return arm if until_s > now_s else None

    def use(self, uid: str) -> None:
        self._arms.pop(uid, None)
