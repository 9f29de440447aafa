"""Matches subjects with NATS filters: `*` is one token, a final `>` is one or more tokens."""


def matches(subject_filter: str, subject: str) -> bool:
    """Return True if NATS would deliver `subject` to a subscription on `subject_filter`."""
    if "*" not in subject_filter:
        if not subject_filter.endswith(".>"):
            return subject_filter in {subject, ">"}
        return subject.startswith(subject_filter[:-1])
    wanted = subject_filter.split(".")
    tokens = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(
        want in {"*", token} for want, token in zip(wanted, tokens, strict=True)
    )
