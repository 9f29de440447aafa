"""Translates an image name such as `tiny` or `prod/debian/12` to a URL.

Rules have a fixed order, so a name always has the same URL:

- Exact names precede regular expressions.
- Of exact rules for one name, the lowest layer (`name_rules.Layer`) wins, then the longest prefix.
- Of regular expressions, the longest prefix wins, then the lowest layer, then the first file by
  name, then the first entry.

Two exact rules for one name with the same layer and prefix are a problem, and the name is refused.
The same holds for two equal expressions. Controllers translate image names of the bus (ADR 0046).
For such names, this table has only transports.
"""

import bisect
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from virtbus.imaged.core.name_rules import KnownTransport, NameRule, RuleFile
from virtbus.imaged.core.transports import PLAIN, Transport, refusal
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.image import ImageSource, parse_image_ref

MAX_REGEXPS = 500
"""Limit of the regular expressions of all files together."""
_SORTED, _BESIDE, _COMPARED = 20_000, 50, 64
"""Limits of the search for names that resemble an unknown name. The first _COMPARED characters of
the unknown name are compared with the _BESIDE known names on each side of it, in sorted order.

A node with more than _SORTED names suggests none, because the sort would block the event loop.
"""


class Target(NamedTuple):
    """The source that a name denotes, and its transport."""

    source: ImageSource
    transport: Transport = PLAIN
    pin: bool = False
    where: str = ""
    """The file of the rule, and the rule's entry in the file."""


@dataclass(frozen=True, slots=True)
class ImageAliases:
    """The translation table of a node."""

    exact: dict[str, NameRule]
    """The rules without a regular expression, by the whole name."""
    patterns: tuple[NameRule, ...]
    """The rules with a regular expression, in order of precedence."""
    problems: tuple[Detail, ...] = ()
    transports: Mapping[str, KnownTransport] = field(default_factory=dict)
    """The transports of all files, by name."""

    def transport(self, name: str, url: str) -> KnownTransport:
        """Return a transport for an image name of the bus.

        Raises:
            VirtbusError: 503 `image_transport_invalid`: no file has the transport, two files have
                it, or the transport has a problem or does not permit the server of `url`.
        """
        found = self.transports.get(name)
        if found is None:
            problem = f"no file in images.d of this node has the transport {name!r}"
        elif found.problem:
            problem = f"{found.where}: {found.problem}"
        else:
            problem = refusal(found.transport, url, found.where)
        if found is None or problem:
            raise VirtbusError(
                Code.UNAVAILABLE,
                "image_transport_invalid",
                f"{problem}; mend images.d, which is read again for each pull, or the image name",
            )
        return found

    def resolve(self, name: str) -> Target:
        """Return the target of `name`.

        Raises:
            VirtbusError: 404 `image_unknown`, with similar names and the next step. 503
                `image_names_invalid`: the rule of the name has a problem, or no rule has the name
                and any rule has a problem.
        """
        rule = self.exact.get(name)
        if rule is not None:
            if rule.problem:
                raise names_invalid(self._first(rule.problem))
            return _target(rule, ImageSource(rule.url, rule.digest))
        for rule in self.patterns:
            target = _matched(rule, name)
            if target is not None:
                return target
        if self.problems:
            raise names_invalid(self.problems)
        raise self._unknown(name)

    def pins(self, name: str) -> bool:
        """Return True if a rule pins the image of a plain name.

        Also return True if the rules have a problem that may hide such a rule.
        """
        try:
            return self.resolve(name).pin
        except VirtbusError as error:
            return error.reason == "image_names_invalid"

    def _first(self, problem: str) -> tuple[Detail, ...]:
        mine = [one for one in self.problems if f"{one.path}: {one.message}" == problem]
        return (*mine, *(one for one in self.problems if one not in mine))

    def _unknown(self, name: str) -> VirtbusError:
        known = sorted(self.exact) if len(self.exact) <= _SORTED else []
        at = bisect.bisect(known, name)
        beside = known[max(0, at - _BESIDE) : at + _BESIDE]
        near = difflib.get_close_matches(name[:_COMPARED], beside, n=5, cutoff=0.5) or known[:5]
        return VirtbusError(
            Code.NOT_FOUND,
            "image_unknown",
            f"no image is named {name!r} on this node; "
            + (f"known names: {', '.join(near)}; " if near else "")
            + "give an http(s)://, docker:// or file:// URL, upload a file with 'virtbus image "
            "upload', or add the name to /etc/virtbus/images.d/*.toml",
        )


def names_invalid(problems: tuple[Detail, ...]) -> VirtbusError:
    """Return the error 503 `image_names_invalid` with all problems."""
    first = f"{problems[0].path}: {problems[0].message}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return VirtbusError(
        Code.UNAVAILABLE,
        "image_names_invalid",
        f"the rules of image names have problems: {first}{more}; mend them, they are read again "
        "for each pull",
        details=problems,
    )


def table_of(files: Iterable[RuleFile]) -> ImageAliases:
    """Return the table of the rules in `files`.

    `files` begins with the files of `images.d`, in the order of their names. Other layers follow.
    """
    problems: list[Detail] = []
    exact: dict[str, NameRule] = {}
    transports: dict[str, KnownTransport] = {}
    patterns: dict[tuple[str, str], NameRule] = {}
    for file in files:
        problems += file.problems
        for name, known in file.transports.items():
            other = transports.setdefault(name, known)
            if other is not known:
                why = f"is ambiguous: {other.where} has the same name"
                transports[name] = replace(known, problem=why)
        for rule in file.rules:
            if rule.pattern is None:
                problems += _set_exact(exact, rule)
            else:
                problems += _set_pattern(patterns, rule)
    ordered = sorted(patterns.values(), key=lambda rule: (-len(rule.prefix), rule.layer))
    return ImageAliases(exact, tuple(ordered), tuple(problems), transports)


def _set_exact(exact: dict[str, NameRule], rule: NameRule) -> list[Detail]:
    name = rule.full_name
    other = exact.get(name)
    if other is None or (rule.layer, -len(rule.prefix)) < (other.layer, -len(other.prefix)):
        exact[name] = rule
        return []
    if (other.layer, other.prefix) != (rule.layer, rule.prefix):
        return []
    detail = _ambiguous(f"{rule.where}.name", other)
    exact[name] = replace(other, problem=f"{detail.path}: {detail.message}")
    return [detail]


def _set_pattern(patterns: dict[tuple[str, str], NameRule], rule: NameRule) -> list[Detail]:
    key = (rule.prefix, rule.pattern.text if rule.pattern is not None else "")
    other = patterns.get(key)
    if other is not None and other.layer != rule.layer:
        patterns[key] = min(other, rule, key=lambda one: one.layer)
        return []
    if other is not None:
        detail = _ambiguous(f"{rule.where}.regexp", other)
        patterns[key] = replace(other, problem=f"{detail.path}: {detail.message}")
        return [detail]
    if len(patterns) >= MAX_REGEXPS:
        message = f"is one of more than {MAX_REGEXPS} regular expressions; use exact names"
        return [Detail(path=f"{rule.where}.regexp", message=message)]
    patterns[key] = rule
    return []


def _ambiguous(path: str, other: NameRule) -> Detail:
    message = f"is ambiguous: {other.where} has the same"
    return Detail(path=path, message=message, hint="remove one of the two")


def _matched(rule: NameRule, name: str) -> Target | None:
    rest = rule.rest_of(name)
    url = rule.pattern.url(rest) if rule.pattern is not None and rest else None
    if url is None:
        return None
    if rule.problem:
        raise names_invalid((Detail(path=rule.where, message=rule.problem),))
    try:
        source = parse_image_ref(url)
        if not source.is_url or source.digest:
            msg = "that is no URL"
            raise ValueError(msg)  # noqa: TRY301  one translation for both
    except ValueError as error:
        message = f"gives no URL for {name!r}: {error}"
        raise names_invalid((Detail(path=rule.where, message=message),)) from None
    return _target(rule, ImageSource(source.locator, rule.digest))


def _target(rule: NameRule, source: ImageSource) -> Target:
    return Target(source, rule.transport, rule.pin, rule.where)
