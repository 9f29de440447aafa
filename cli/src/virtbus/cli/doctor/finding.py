"""Defines the result of a check, and a function for each level of a result."""

import sys
from typing import Any, NamedTuple

from virtbus.cli import output

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"


class CheckResult(NamedTuple):
    """The result of a check. `what` is its text, `mend` the command that repairs the problem.

    `level` is ok, warn (VMs can run with a drawback), fail (no VM can run) or unknown (doctor
    cannot see the resource).
    """

    level: str
    name: str
    what: str
    mend: str = ""

    def as_map(self) -> dict[str, Any]:
        return {key: value for key, value in self._asdict().items() if value}

    def as_text(self) -> str:
        level = output.paint_state(f"{self.level:<7}", sys.stdout)
        text = f"{level}  {self.name:<18}  {output.safe(self.what)}"
        return f"{text}\n         {'':<18}  mend: {self.mend}" if self.mend else text


def ok(name: str, what: str) -> CheckResult:
    """Return a result without a problem."""
    return CheckResult(OK, name, what)


def warn(name: str, what: str, mend: str = "") -> CheckResult:
    """Return a problem with which VMs can run."""
    return CheckResult(WARN, name, what, mend)


def fail(name: str, what: str, mend: str = "") -> CheckResult:
    """Return a problem with which no VM can run."""
    return CheckResult(FAIL, name, what, mend)


def unknown(name: str, what: str, mend: str = "") -> CheckResult:
    """Return the result of a check that is impossible here."""
    return CheckResult(UNKNOWN, name, what, mend)
