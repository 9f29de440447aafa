"""Renders accounts and users for nats-server's configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from virtbus.bus.provisioning.accounts import QUIET, Account, Export, Import, RequestExport
from virtbus.bus.provisioning.permissions import ANSWER_HOURS, SYSTEM_ACCOUNT, Role

CONTROL_LIMITS = "{ max_streams: 32, max_consumers: 20000 }"
"""JetStream limits of the account that owns the streams. Each node has three consumers."""


@dataclass(frozen=True, slots=True)
class ServerLogin:
    """A user's credentials on the server: the public key of an nkey, or a password."""

    nkey: str = ""
    password: str = ""

    def fields(self, user: str) -> str:
        if self.nkey:
            return f"nkey: {self.nkey}"
        return f'user: "{user}", password: "{self.password}"'


def _listed(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def _user(role: Role, login: ServerLogin, renamed: Mapping[str, str]) -> str:
    head = f"      {{ {login.fields(role.user)}"
    if not role.publish:
        return head + " }"
    # The server renames a subject before it checks permissions.
    publish = [renamed.get(subject, subject) for subject in role.publish]
    return (
        f"{head}, permissions: {{\n"
        f"        publish: {{ allow: {_listed(publish)} }}\n"
        f"        subscribe: {{ allow: {_listed(role.subscribe)} }}{_answers(role)} }} }}"
    )


def _answers(role: Role) -> str:
    """Return the permission to answer requests; empty if the role lacks it.

    The server then remembers each request's reply subject, and accepts one answer.
    """
    expires = f'"{ANSWER_HOURS}h"'
    return f", allow_responses: {{ max: 1, expires: {expires} }}" if role.answers else ""


def _export(export: Export) -> str:
    to = f"accounts: {_listed(export.to)}"
    match export.what:
        case RequestExport(subject, streamed):
            many = f", response_type: stream{_threshold(subject)}" if streamed else ""
            return f'      {{ service: "{subject}"{many}, {to} }}'
        case subject:
            return f'      {{ stream: "{subject}", {to} }}'


def _threshold(subject: str) -> str:
    """Return the time limit between answers for a node's streams; empty for other services.

    Consoles and logs may pause for longer than the server's default of two minutes.
    """
    return f', response_threshold: "{QUIET}"' if ".rpc." in subject else ""


def _import(one: Import) -> str:
    kind, subject = (
        ("service", one.what.subject)
        if isinstance(one.what, RequestExport)
        else ("stream", one.what)
    )
    local = f', to: "{one.local}"' if one.local else ""
    return f'      {{ {kind}: {{ account: "{one.account}", subject: "{subject}" }}{local} }}'


def _account(account: Account, logins: Mapping[str, ServerLogin]) -> str:
    parts = [f'  "{account.name}" {{']
    if account.streams:
        parts.append(f"    jetstream: {CONTROL_LIMITS}")
    listed = (
        ("users", [_user(role, logins[role.user], account.renamed) for role in account.users]),
        ("exports", [_export(one) for one in account.exports]),
        ("imports", [_import(one) for one in account.imports]),
    )
    for name, lines in listed:
        if lines:
            parts += [f"    {name}: [", *lines, "    ]"]
    if account.renamed:
        pairs = (f'      "{old}": "{new}"' for old, new in account.renamed.items())
        parts += ["    mappings: {", *pairs, "    }"]
    return "\n".join([*parts, "  }"])


def accounts_block(accounts: Iterable[Account], logins: Mapping[str, ServerLogin]) -> str:
    """Return the settings `system_account` and `accounts`. `logins` needs all users."""
    blocks = "\n".join(_account(one, logins) for one in accounts)
    return f'system_account: "{SYSTEM_ACCOUNT}"\naccounts {{\n{blocks}\n}}\n'
