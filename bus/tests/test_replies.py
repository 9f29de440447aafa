"""Tokens of answers are random: nobody can answer a request without seeing its reply subject."""

import asyncio

from virtbus.bus.client.link import Raw
from virtbus.bus.client.replies import Replies


async def test_one_reply_subject_does_not_reveal_the_next_one() -> None:
    replies, seen = Replies(), list[str]()

    async def ask(token: str) -> None:
        seen.append(token)
        if len(seen) == 2:  # a reader of the first guesses the second, as a counter would give it
            replies.came(f"{int(seen[0], 16) + 1:x}", Raw("forged"))
        replies.came(token, Raw("true"))

    async with asyncio.timeout(5):
        answers = [await replies.to("a.b", ask, timeout_s=1.0) for _ in range(2)]
    assert [answer.subject for answer in answers] == ["true", "true"]
    assert len({len(token) for token in seen}) == 1
    assert len(seen[0]) == 24
