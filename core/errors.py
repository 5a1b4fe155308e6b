"""What can go wrong, in words for people: every error carries what failed, the detail, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class CoreError(Exception):
    """A failure with a title (what failed), a message (where and why) and a hint (what to do next)."""

    def __init__(self, title: str, message: str = "", hint: str = "") -> None:
        super().__init__(title, message, hint)
        self.title = title
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.title}: {self.message}" if self.message else self.title
        return f"{text} ({self.hint})" if self.hint else text

    @property
    def reason(self) -> str:
        """Why, for a sentence that says itself what failed."""
        return self.message or self.title


class ConfigError(CoreError):
    """An option, or a combination of options, that can't be honoured."""


class PluginError(CoreError):
    """A plugin that is missing, broken, or in conflict with another."""


class CheckpointError(CoreError):
    """A checkpoint that is absent, incomplete, damaged or of a kind that nothing here reads."""


class MissingFile(CheckpointError):
    """A file that is not among those of a checkpoint, all of which are known."""


class DamagedFile(CheckpointError):
    """Files of a checkpoint whose bytes are not what they should be: `files`, by name.

    `is_set_aside` once they are out of the way, so that they are brought again.
    """

    def __init__(self, title: str, message: str = "", hint: str = "", *, files: tuple[str, ...]) -> None:
        super().__init__(title, message, hint)
        self.files = files
        self.is_set_aside = False


class PlanError(CoreError):
    """No plan: the model's layers do not fit into the nodes that are there, or these are too few."""

    def __init__(
        self, title: str, message: str = "", hint: str = "", *, missing_bytes: int = 0, missing_nodes: int = 0
    ) -> None:
        super().__init__(title, message, hint)
        self.missing_bytes = missing_bytes
        self.missing_nodes = missing_nodes


class ProtocolError(CoreError):
    """A peer that sent what the protocol does not allow, or speaks another version of it."""


class TrustError(CoreError):
    """A peer that is no member, or not the one that it should be."""


class NoMulticast(CoreError):
    """Multicast DNS does not work on this machine or its network."""


class ChannelClosed(CoreError):
    """A connection that ended: closed by the peer, cut, or silent for too long."""


class StageError(CoreError):
    """A stage that refused or failed a batch (a gap in positions, non-finite hidden states).

    `node` says whose stage it was, where that is known.
    """

    def __init__(self, title: str, message: str = "", hint: str = "", *, node: str = "") -> None:
        super().__init__(title, message, hint)
        self.node = node


class NoKVRoom(StageError):
    """A stage has no memory left for KV caches."""


class WrongAnswer(StageError):
    """What `node` answered can't come of the batch that it was given: other rows, another width or dtype, NaN, inf."""


class NotReady(CoreError):
    """No route is serving yet: carries how many nodes are required, and how many are ready."""

    def __init__(self, title: str, message: str = "", hint: str = "", *, required: int, ready: int) -> None:
        super().__init__(title, message, hint)
        self.required = required
        self.ready = ready


class Overloaded(CoreError):
    """As many sessions are running as the cluster takes at once."""


class DeadlineExceeded(CoreError):
    """A request whose time was up: the message says what it was at."""


class RouteError(CoreError):
    """The route broke under a session: names the node, its layers, and what happens next."""

    def __init__(self, title: str, message: str = "", hint: str = "", *, node: str = "", layers: str = "") -> None:
        super().__init__(title, message, hint)
        self.node = node
        self.layers = layers

    def again(self) -> RouteError:
        """The same for one more that is told: an exception object remembers where it was raised."""
        return RouteError(self.title, self.message, self.hint, node=self.node, layers=self.layers)


class RequestError(CoreError):
    """A request that asks for what can't be had: `param` is the offending field, `code` OpenAI's error code."""

    def __init__(
        self,
        title: str,
        message: str = "",
        hint: str = "",
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(title, message, hint)
        self.param = param
        self.code = code


def leaves(group: BaseExceptionGroup[E]) -> Iterator[E]:
    """The exceptions inside a group, and inside the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


def sole_error(error: BaseException) -> BaseException:
    """The one exception inside an exception group (nested ones too), or the first CoreError of several.

    A nursery wraps what its body raises; at an edge where there is one thing to say, this says it.
    """
    while isinstance(error, BaseExceptionGroup):
        known = error.subgroup(CoreError) or error
        if len(error.exceptions) > 1 and known is error:
            return error
        error = known.exceptions[0]
    return error
