r"""Matches image names with RE2, whose time is linear in the name's length for every expression.

No other module imports re2. A pattern must match a complete name. A pattern from a file of Virtlet
may match a part of the name. A template is a URL with groups of the pattern: `$1`, `${1}`,
`${name}`, and `$$` for a dollar. Files of version 0.1 may have groups in the form `\1` or
`\g<name>`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import re2

MAX_PATTERN_CHARS = 1000
_MAX_PATTERN_BYTES = 128 * 1024
"""Memory limit of one pattern. RE2 refuses a pattern that needs more memory, such as one with
nested repetitions."""
_GROUP = re.compile(
    r"\$(?P<dollar>\$)|\$(?P<short>\d{1,2})|\$\{(?P<braced>\w{1,64})\}"
    r"|\\(?P<old>\d{1,2})|\\g<(?P<named>\w{1,64})>"
)


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A regular expression, and a template of the URL that is made from its groups."""

    text: str
    template: str
    _regexp: "re2._Regexp" = field(repr=False, compare=False)
    in_part: bool = False
    """True if a match of a part of a name is enough."""

    @classmethod
    def of(cls, text: str, template: str) -> "NamePattern":
        """Compile a pattern.

        Raises:
            ValueError: the pattern is invalid or too large, or lacks a group of the template.
        """
        regexp = _compiled(text)
        known = {str(number) for number in range(regexp.groups + 1)} | set(regexp.groupindex)
        unknown = [group for group in _groups_of(template) if group not in known]
        if unknown:
            msg = f"the regular expression has no group {unknown[0]!r}, which url names"
            raise ValueError(msg)
        return cls(text, template, regexp)

    def of_parts(self) -> "NamePattern":
        return replace(self, in_part=True)

    def url(self, name: str) -> str | None:
        match = self._regexp.search(name) if self.in_part else self._regexp.fullmatch(name)
        if match is None:
            return None
        return _filled(self.template, lambda group: match[_key(group)] or "")

    def example(self) -> str:
        """Return the URL with `1` for each group, so that the URL's form can be checked."""
        return _filled(self.template, lambda _: "1")


def _compiled(text: str) -> "re2._Regexp":
    if len(text) > MAX_PATTERN_CHARS:
        msg = f"a regular expression has at most {MAX_PATTERN_CHARS} characters"
        raise ValueError(msg)
    options = re2.Options()
    options.max_mem = _MAX_PATTERN_BYTES
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        why = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        msg = f"RE2 does not accept this regular expression: {why}"
        raise ValueError(msg) from None


def _key(group: str) -> int | str:
    return int(group) if group.isdecimal() else group


def _groups_of(template: str) -> list[str]:
    found: list[str] = []

    def note(group: str) -> str:
        found.append(group)
        return ""

    _filled(template, note)
    return found


def _filled(template: str, value_of: Callable[[str], str]) -> str:
    def value(found: re.Match[str]) -> str:
        if found.lastgroup == "dollar":
            return "$"
        group = str(found[found.lastgroup or 0])
        return value_of(str(int(group)) if group.isdecimal() else group)

    return _GROUP.sub(value, template)
