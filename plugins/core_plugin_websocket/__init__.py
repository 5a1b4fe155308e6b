"""The built-in transport: websockets over TCP, which pass through home routers and proxies as they are."""

from core import Transport, hookimpl


@hookimpl
def core_transports() -> list[type[Transport]]:
    from core_plugin_websocket.transport import TrioWebsocketTransport

    return [TrioWebsocketTransport]
