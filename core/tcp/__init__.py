"""For the authors of transports over TCP: connections, their TLS, how many a listener takes, failures in words.

A transport subclasses `TcpTransport` and says how its peers greet; `FramedChannel` moves its messages, by `Frames` of
its own.
"""

from core.tcp.channel import CLOSED, FramedChannel, Frames, Goodbye
from core.tcp.connection import ENDED, Connection
from core.tcp.connection_limits import Limits
from core.tcp.failures import CHECK_PORT, closed
from core.tcp.transport import TcpTransport

__all__ = [
    "CHECK_PORT",
    "CLOSED",
    "ENDED",
    "Connection",
    "FramedChannel",
    "Frames",
    "Goodbye",
    "Limits",
    "TcpTransport",
    "closed",
]
