"""Decides which backups of a schedule to remove (ADR 0068)."""

from collections.abc import Iterable, Mapping

from virtbus.schemas.backup import BackupManifest, HeldBackup


def unneeded(held: Iterable[HeldBackup], schedule: str, namespace: str, keep: int) -> list[str]:
    """Return the ids of the backups to remove, each increment before its parent.

    Nodes accept removals in this order only. The newest backup is the one with the highest number,
    because a node's clock may be set back. These backups stay:

    - the newest `keep` backups of the schedule, and its newest backup that passed a check
    - backups of other schedules, and backups that a person started
    - damaged and unreadable backups, so that a person can look at them
    - each ancestor of a backup that stays or is unreadable
    - all backups of a VM, if one of them stays and has an unreadable parent
    """
    there = {one.id: one for one in held}
    known = {id_: one.manifest for id_, one in there.items() if one.manifest is not None}
    own = [
        id_
        for id_, made in known.items()
        if (made.schedule, made.namespace) == (schedule, namespace) and not _damaged(there[id_])
    ]
    own.sort(key=lambda id_: _age(known[id_]), reverse=True)
    verified = (id_ for id_ in own if _verified(there[id_]))
    stays = {*(known.keys() - set(own)), *own[:keep], *(id_ for id_ in [next(verified, "")] if id_)}
    stays |= there.keys() - known.keys()
    stays |= {id_ for id_, one in there.items() if set(one.children) - known.keys()}
    _add_parents(stays, known)
    unread = there.keys() - known.keys()
    cut = {known[id_].uid for id_ in stays & known.keys() if known[id_].parent in unread}
    stays |= {id_ for id_, made in known.items() if made.uid in cut}
    _add_parents(stays, known)
    gone = [id_ for id_ in own if id_ not in stays]
    return sorted(gone, key=lambda id_: (known[id_].depth, id_), reverse=True)


def _age(made: BackupManifest) -> tuple[int, int, str]:
    return made.number, made.created_ns, made.id


def _add_parents(stays: set[str], known: Mapping[str, BackupManifest]) -> None:
    waiting = list(stays)
    while waiting:
        made = known.get(waiting.pop())
        if made is not None and made.parent in known and made.parent not in stays:
            stays.add(made.parent)
            waiting.append(made.parent)


def _damaged(one: HeldBackup) -> bool:
    return one.check is not None and bool(one.check.problem)


def _verified(one: HeldBackup) -> bool:
    return one.check is not None and not one.check.problem
