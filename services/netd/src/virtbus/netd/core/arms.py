"""Which domains may fetch their tap descriptors now: each arm once, for 30 s."""

from virtbus.schemas.nodework import Arm

ARM_LIFETIME_S = 30.0


class Arms:
    """Arms by uid; `now_s` is the caller's monotonic clock."""

    def __init__(self) -> None:
        self._arms: dict[str, tuple[Arm, float]] = {}

    def put(self, arm: Arm, now_s: float) -> None:
        """Arm, in place of an earlier arm of the same uid; forget those that ran out."""
        self._arms = {
            uid: kept for uid, kept in self._arms.items() if kept[1] > now_s and uid != arm.uid
        }
        self._arms[arm.uid] = (arm, now_s + ARM_LIFETIME_S)

    def peek(self, uid: str, now_s: float) -> Arm | None:
        """The live arm of `uid`."""
        arm, until_s = self._arms.get(uid, (None, 0.0))
        return arm if until_s > now_s else None

    def use(self, uid: str) -> None:
        """End the arm of `uid`."""
        self._arms.pop(uid, None)
