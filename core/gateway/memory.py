"""Responses that were given, kept for a while: later requests refer to them and to their items."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from core.errors import RequestError
from core.gateway.errors import ITEM_NOT_FOUND, RESPONSE_NOT_FOUND
from core.gateway.schemas.items import GivenItem, InputItem, ItemReference
from core.gateway.schemas.response_objects import ResponseObject

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Kept:
    """`response` as JSON; `items` are the whole conversation, from its first input to what the response says."""

    response: bytes
    items: tuple[InputItem, ...]
    size: int
    until: float


class ResponseMemory:
    """Belongs to the thread that serves HTTP.

    Each client has its own: what another one was given is not there. They are forgotten after `seconds`; and when there
    are more than `most` of them or more bytes than `most_bytes`, of all clients together, the oldest of the client that
    has the most bytes is. With no seconds nothing is kept.
    """

    def __init__(
        self,
        seconds: float,
        most: int = MAX_RESPONSES,
        most_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock
        self._bytes = Counter[str]()
        """By client."""
        self._kept: dict[tuple[str, str], Kept] = {}
        self._items: dict[tuple[str, str], dict[str, InputItem]] = {}
        """By client and item id: the item, as each of the responses has it, by their ids."""

    def wants(self, store: bool | None) -> bool:
        """Whether a response is kept for which that was asked. Raises RequestError where it should and can't be."""
        if store and not self._seconds:
            raise RequestError(
                "'store': true is not supported",
                "this server keeps no responses (its option --keep-responses is 0)",
                "leave it out, or send false",
                param="store",
                code="unsupported_parameter",
            )
        return bool(self._seconds) and store is not False

    def keep(self, client: str, items: Sequence[InputItem], response: ResponseObject) -> None:
        """Keeps a response that has ended; `items` are the conversation that it answers."""
        said = msgspec.convert(msgspec.to_builtins(response.output), list[InputItem])
        whole = (*items, *said)
        encoded = msgspec.json.encode(response)
        size = len(encoded) + len(msgspec.json.encode(whole))
        if size > self._most_bytes:
            return
        self._kept[client, response.id] = Kept(encoded, whole, size, self._clock() + self._seconds)
        self._bytes[client] += size
        for item in whole:
            if item.id is not None:
                self._items.setdefault((client, item.id), {})[response.id] = item
        self._forget_oldest()

    def get(self, client: str, response_id: str, param: str = "response_id") -> Kept:
        """Raises RequestError, whose `param` it is, where the response isn't kept."""
        self._forget_oldest()
        kept = self._kept.get((client, response_id))
        if kept is None:
            raise self._unknown(f"the response {response_id!r}", param, RESPONSE_NOT_FOUND)
        return kept

    def delete(self, client: str, response_id: str) -> None:
        """Raises RequestError where the response isn't kept."""
        self.get(client, response_id)
        self._forget(client, response_id)

    def resolve(self, client: str, previous: str | None, given: Sequence[GivenItem]) -> list[InputItem]:
        """The conversation that `given` goes on with. Raises RequestError for what isn't kept."""
        before = self.get(client, previous, "previous_response_id").items if previous is not None else ()
        return [*before, *(self._item(client, item, f"input[{i}].id") for i, item in enumerate(given))]

    def _item(self, client: str, item: GivenItem, param: str) -> InputItem:
        if not isinstance(item, ItemReference):
            return item
        self._forget_oldest()
        found = self._items.get((client, item.id))
        if not found:
            raise self._unknown(f"the item {item.id!r}", param, ITEM_NOT_FOUND)
        return next(reversed(found.values()))

    def _forget_oldest(self) -> None:
        while self._kept and self._clock() >= next(iter(self._kept.values())).until:
            self._forget(*next(iter(self._kept)))
        while len(self._kept) > self._most or self._bytes.total() > self._most_bytes:
            [(greediest, _)] = self._bytes.most_common(1)
            self._forget(*next(key for key in self._kept if key[0] == greediest))

    def _forget(self, client: str, response_id: str) -> None:
        kept = self._kept.pop((client, response_id))
        self._bytes[client] -= kept.size
        if not self._bytes[client]:
            del self._bytes[client]
        for item_id in {item.id for item in kept.items if item.id is not None}:
            owners = self._items[client, item_id]
            del owners[response_id]
            if not owners:
                del self._items[client, item_id]

    def _unknown(self, what: str, param: str, code: str) -> RequestError:
        if not self._seconds:
            why = "this server keeps no responses (its option --keep-responses is 0)"
        else:
            why = (
                "it has been forgotten or deleted, or was never given to this API key: responses are kept "
                f"for {self._seconds / 60:g} minutes, {self._most} of them and {self._most_bytes // 2**20} MB at most"
            )
        return RequestError(f"{what} is not kept here", why, "send the conversation whole", param=param, code=code)
