"""Asks the controllers for names of VMs, over the bus."""

import logging

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError
from virtbus.netd.core.resolver_messages import FoundName, Lookup, NobodyAnswersError
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.names import NameAnswer, NameAsk
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

ASK_S = 2.0


class NameQuestions:
    """Asks for the guests of this node."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._subject = subjects.names_ask(node)

    async def ask(self, want: Lookup, uid: str) -> FoundName | None:
        """Return the answer to a guest of the VM `uid`; None if a controller refuses the question.

        Raises:
            NobodyAnswersError: no controller answered in 2 s, or the bus is away.
        """
        ask = NameAsk(uid=uid, namespace=want.namespace, name=want.vm, address=want.address)
        try:
            data = await self._bus.request(self._subject, ask, timeout_s=ASK_S)
            answer = validate(NameAnswer, data)
        except VirtbusError as error:
            extra = {"code": "names_refused", "uid": uid}
            log.debug("a controller refused to answer for a name: %s", error, extra=extra)
            return None
        except BusError as error:
            raise NobodyAnswersError from error
        return FoundName(answer.found, answer.node, answer.namespace, answer.name, answer.addresses)
