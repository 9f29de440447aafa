"""Translates an image name such as `tiny` or `debian/12` to a URL.

Rules have a fixed order: files of `images.d` by file name, then settings, then defaults. Exact
names precede regular expressions. So a name always has the same URL.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageSource, parse_image_ref

MAX_RULES = 10_000


@dataclass(frozen=True, slots=True)
class AliasRule:
    """A rule with `name`, or with `pattern`, which must match a whole name.

    `url` may refer to groups of `pattern`.
    """

    url: str
    digest: str | None = None
    name: str = ""
    pattern: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class ImageAliases:
    """The translation table, rules in order of precedence."""

    rules: tuple[AliasRule, ...]

    def resolve(self, name: str) -> ImageSource:
        """Return the URL of `name`, and the digest that its rule pins.

        Raises:
            VirtbusError: 404 `image_unknown` with similar names and the next step.
        """
        for rule in self.rules:
            if rule.name == name:
                return ImageSource(rule.url, rule.digest)
        for rule in self.rules:
            match = rule.pattern.fullmatch(name) if rule.pattern else None
            if match:
                return ImageSource(_expanded(match, rule.url), rule.digest)
        raise self._unknown(name)

    def _unknown(self, name: str) -> VirtbusError:
        known = sorted({rule.name for rule in self.rules if rule.name})
        near = difflib.get_close_matches(name, known, n=5, cutoff=0.5) or known[:5]
        return VirtbusError(
            Code.NOT_FOUND,
            "image_unknown",
            f"no image is named {name!r} on this node; "
            + (f"known names: {', '.join(near)}; " if near else "")
            + "give an http(s)://, docker:// or file:// URL, or add the name to "
            "/etc/virtbus/images.d/*.toml",
        )


def _expanded(match: re.Match[str], url: str) -> str:
    try:
        source = parse_image_ref(match.expand(url))
    except (ValueError, re.error, IndexError) as error:
        raise VirtbusError(
            Code.UNAVAILABLE,
            "image_names_invalid",
            f"the rule regexp={match.re.pattern!r} gives no URL for {match[0]!r} ({error}); "
            "mend it in /etc/virtbus/images.d",
        ) from None
    return source.locator


def read_rules(text: str, origin: str) -> tuple[AliasRule, ...]:
    """Return the `[[image]]` tables of a TOML text: `name` or `regexp`, `url`, optional `digest`.

    Raises:
        ValueError: names `origin` and the invalid entry.
    """
    try:
        entries = tomllib.loads(text).get("image", [])
    except tomllib.TOMLDecodeError as error:
        msg = f"{origin}: {error}"
        raise ValueError(msg) from None
    if not isinstance(entries, list) or len(entries) > MAX_RULES:
        msg = f"{origin}: [[image]] must be a list of at most {MAX_RULES} tables"
        raise ValueError(msg)
    return tuple(_rule(entry, f"{origin}: image {n}") for n, entry in enumerate(entries, start=1))


def rules_of(names: Iterable[tuple[str, str]]) -> tuple[AliasRule, ...]:
    """Return exact rules from (name, `url[@sha256:…]`) pairs."""
    return tuple(_rule({"name": name, "url": url}, f"image {name!r}") for name, url in names)


def _rule(entry: object, where: str) -> AliasRule:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        msg = f"{where}: must be a table of strings"
        raise ValueError(msg)
    unknown = set(entry) - {"name", "regexp", "url", "digest"}
    if unknown or "url" not in entry or ("name" in entry) == ("regexp" in entry):
        msg = f"{where}: needs url, and either name or regexp (and may have digest)"
        raise ValueError(msg)
    pin = f"@{entry['digest']}" if "digest" in entry else ""
    try:
        source = parse_image_ref(entry["url"] + pin)
        pattern = re.compile(entry["regexp"]) if "regexp" in entry else None
        name = parse_image_ref(entry["name"]) if "name" in entry else None
    except (ValueError, re.error) as error:
        msg = f"{where}: {error}"
        raise ValueError(msg) from None
    if not source.is_url or (name is not None and (name.is_url or name.digest)):
        msg = f"{where}: url must be a URL, and name a plain name"
        raise ValueError(msg)
    return AliasRule(source.locator, source.digest, name.locator if name else "", pattern)
