"""Generates the pages of docs/reference about subjects, errors, models and settings."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from virtbus.bus.runtime.settings import ServiceSettings
from virtbus.controller import settings as controller
from virtbus.cri import settings as cri
from virtbus.criproxy import settings as criproxy
from virtbus.documents.wire import FOLDER, models
from virtbus.imaged import settings as imaged
from virtbus.kubebridge import settings as kubebridge
from virtbus.netd import settings as netd
from virtbus.nodeagent import settings as nodeagent
from virtbus.schemas.catalogue import CHANNELS, FILTERS, Plane
from virtbus.schemas.channel_parameters import PARAMETERS
from virtbus.schemas.errors import Code, VirtbusError


def subjects() -> str:
    """Return the page of subjects, by kind of use."""
    lines = [
        "# Subjects",
        "",
        "Braces mark variable tokens. Only `virtbus.schemas.subjects` makes subjects.",
        "",
    ]
    for plane in Plane:
        lines += [f"## {plane.capitalize()}", ""]
        lines += _table(
            ("Subject", "Message", "Reply", "From → to", "Purpose"),
            (
                (
                    f"`{channel.subject}`",
                    _link(channel.message),
                    _link(channel.reply) if plane in {Plane.REQUEST, Plane.STREAM} else "",
                    f"{channel.sender} → {channel.receiver}",
                    channel.about,
                )
                for channel in CHANNELS
                if channel.plane is plane
            ),
        )
    lines += ["## Filters", ""]
    lines += _table(
        ("Filter", "Matches"), ((f"`{subject}`", matches) for subject, matches in FILTERS)
    )
    lines += ["## Parameters", ""]
    lines += _table(("Parameter", "Meaning"), ((f"`{k}`", v) for k, v in PARAMETERS.items()))
    return "\n".join(lines)


def _link(model: type[BaseModel] | None) -> str:
    return f"[{model.__name__}](models.md#{model.__name__.lower()})" if model else "map"


# --- errors ----------------------------------------------------------------------------------
class Raised(NamedTuple):
    """The reason and code of an error, and the package that raises it."""

    reason: str
    code: int
    package: str


def errors(root: Path) -> str:
    """Return the page of error codes and reasons, from the source files below `root`."""
    lines = [
        "# Errors",
        "",
        "Every refusal is `{code, reason, message, retry, after_ms, details[]}`. `code` and "
        "`reason` are stable, `message` is for people; `details` holds every problem "
        "with its field's path.",
        "",
        "## Codes",
        "",
    ]
    lines += _table(
        ("Code", "Name", "Retry, unless the answer says otherwise"),
        ((str(int(c)), c.name, VirtbusError(c, "", "").body.retry) for c in Code),
    )
    lines += ["## Reasons", ""]
    found = sorted({one for path in _sources(root) for one in _raised(path)})
    where: dict[tuple[str, int], list[str]] = {}
    for one in found:
        where.setdefault((one.reason, one.code), []).append(one.package)
    lines += _table(
        ("Reason", "Code", "From"),
        ((f"`{reason}`", str(code), ", ".join(by)) for (reason, code), by in where.items()),
    )
    return "\n".join(lines)


def _sources(root: Path) -> list[Path]:
    return sorted(
        path
        for folder in ("schemas", "bus", "services/*", "simulator")
        for path in root.glob(f"{folder}/src/**/*.py")
    )


def _raised(path: Path) -> list[Raised]:
    """Return the errors that a module raises, directly or by its subclasses of VirtbusError.

    The function finds calls `VirtbusError(Code.X, "reason", …)`, calls of `__init__` with such
    arguments, and the reasons of `check_version`.
    """
    package = path.parts[path.parts.index("virtbus", path.parts.index("src")) + 1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(
                func=ast.Name("VirtbusError") | ast.Attribute(attr="__init__"),
                args=[ast.Attribute(ast.Name("Code"), name), ast.Constant(str(reason)), *_],
            ):
                found.append(Raised(reason, int(Code[name]), package))
            case ast.keyword(
                "reasons", ast.Tuple([ast.Constant(str(older)), ast.Constant(str(newer))])
            ):
                found += [Raised(r, int(Code.UNSUPPORTED), package) for r in (older, newer)]
            case _:
                continue
    return found


# --- models ----------------------------------------------------------------------------------
def all_models() -> tuple[type[BaseModel], ...]:
    """Return every message, and every model inside one, by name."""
    found: set[type[BaseModel]] = set()
    waiting = list(models())
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            waiting += [
                inner
                for field in model.model_fields.values()
                for inner in _inside(field.annotation)
            ]
    return tuple(sorted(found, key=lambda model: model.__name__))


def _inside(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for one in getattr(annotation, "__args__", ()) for found in _inside(one)]


def model_pages() -> str:
    """Return the page of all models with their fields."""
    lines = [
        "# Models",
        "",
        f"JSON Schemas and golden bytes are in `schemas/wire/{FOLDER}/`. Fields without a default "
        "must be given; on the wire a default is left out.",
        "",
    ]
    for model in all_models():
        schema = model.model_json_schema(by_alias=True)
        required = set(schema.get("required", ()))
        lines += [f"## {model.__name__}", "", inspect.cleandoc(model.__doc__ or ""), ""]
        properties = schema.get("properties", {})
        if properties:
            lines += _table(
                ("Field", "Type", "Default", ""),
                (
                    (
                        f"`{name}`",
                        _type(one),
                        _default(name, one, required),
                        one.get("description", ""),
                    )
                    for name, one in properties.items()
                ),
            )
    return "\n".join(lines)


def _default(name: str, schema: dict[str, Any], required: set[str]) -> str:
    if name in required:
        return "required"
    value = schema.get("default", "")
    return f"`{value}`" if value not in ("", None, [], {}) and not isinstance(value, dict) else ""


def _type(schema: Any) -> str:
    match schema:
        case {"$ref": str(reference)}:
            name = reference.rsplit("/", maxsplit=1)[-1]
            shown = f"[{name}](#{name.lower()})"
        case {"anyOf": list(ones)}:
            shown = " or ".join(_type(one) for one in ones)
        case {"enum": list(values)}:
            shown = " or ".join(f"`{one}`" for one in values)
        case {"const": value}:
            shown = f"`{value}`"
        case {"type": "array"}:
            shown = f"list of {_type(schema.get('items'))}"
        case {"type": "object"}:
            shown = f"map of {_type(schema.get('additionalProperties'))}"
        case {"type": str(kind)}:
            shown = f"{kind}{_bounds(schema)}"
        case _:
            shown = "anything"
    return shown


_BOUNDS = {"minimum": "≥", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}


def _bounds(schema: dict[str, Any]) -> str:
    said = [f"{sign} {schema[key]}" for key, sign in _BOUNDS.items() if key in schema]
    said += [f"`{schema['pattern']}`"] if "pattern" in schema else []
    return f" ({', '.join(said)})" if said else ""


# --- settings --------------------------------------------------------------------------------
SETTINGS: dict[str, type[BaseModel]] = {
    "controller": controller.Settings,
    "cri": cri.Settings,
    "criproxy": criproxy.Settings,
    "imaged": imaged.Settings,
    "kubebridge": kubebridge.Settings,
    "netd": netd.Settings,
    "nodeagent": nodeagent.Settings,
}
"""The settings of each service, by its name."""


def settings() -> str:
    """Return the page of each service's settings."""
    common = ServiceSettings.model_fields
    lines = [
        "# Settings",
        "",
        "Default < `/etc/virtbus/<service>.toml` < environment < flags. The variable of `run_dir` "
        "is `VIRTBUS_RUN_DIR`, its flag `--run-dir`; `virtbus-<service> --check-config` shows what "
        "is in force.",
        "",
        "## Every service",
        "",
        *_fields(common),
    ]
    for name, model in SETTINGS.items():
        own = {
            key: field
            for key, field in model.model_fields.items()
            if _told(field) != _told(common.get(key))
        }
        lines += [f"## {name}", "", *_fields(own)]
    return "\n".join(lines)


def _told(field: FieldInfo | None) -> tuple[object, str | None] | None:
    return field and (field.default, field.description)


def _fields(fields: dict[str, FieldInfo]) -> list[str]:
    return _table(
        ("Setting", "Default", ""),
        ((f"`{name}`", _shown(field), field.description or "") for name, field in fields.items()),
    )


def _shown(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return ""
    match field.default:
        case None | "" | ():
            return ""
        case tuple() as many:
            return ", ".join(f"`{one}`" for one in many)
        case value:
            return f"`{value}`"


def _table(heads: tuple[str, ...], rows: Any) -> list[str]:
    """Return a Markdown table and an empty line."""
    cells = [heads, tuple("---" for _ in heads), *rows]
    return [*("| " + " | ".join(_cell(one) for one in row) + " |" for row in cells), ""]


def _cell(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text).replace("|", "\\|").strip()
