"""A transport of length-prefixed frames over TCP: the least between two machines that reach each other directly."""

from core import Transport, hookimpl


@hookimpl
def core_transports() -> list[type[Transport]]:
    from core_plugin_tcp.transport import PlainTcpTransport

    return [PlainTcpTransport]
