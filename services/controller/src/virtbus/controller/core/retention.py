"""Decides which backups of a schedule are removed (ADR 0068)."""

from collections.abc import Iterable, Mapping

from virtbus.schemas.backup import BackupManifest, HeldBackup


def unneeded(held: Iterable[HeldBackup], schedule: str, namespace: str, keep: int) -> list[str]:
    """Return the backups that a schedule removes, in an order in which nodes accept the removals.

    An increment is returned before its parent. The order of backups is that of their numbers,
    because a node's clock may be set back. These backups stay:

    - the newest `keep` ones of the schedule, and the last one that was verified
    - those of other schedules, and those that were made by hand
    - damaged and unreadable ones, for a person to look at
    - those on which one of these backups, or an unreadable one, rests
    - all backups of a VM, while one that stays rests on an unreadable one
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
