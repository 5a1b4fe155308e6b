"""What sockets say when they fail, in words for people."""

from __future__ import annotations

import errno
import socket
import ssl

from core.errors import ChannelClosed, ConfigError, TrustError

CHECK_PORT = "check the host and the port: something else may listen there"
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


def address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 literal."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def closed(peer: str, why: str | None) -> ChannelClosed:
    """That a connection which once stood is no more. None: it broke off."""
    title = f"the connection to {peer} ended"
    if why is None:
        return ChannelClosed(
            title, "it broke off without a goodbye", "see whether the machine and the program there still run"
        )
    return ChannelClosed(title, why)


def no_tls(peer: str, error: Exception) -> ChannelClosed:
    """Why a TCP connection did not become an encrypted one."""
    title = f"no encrypted connection with {peer}"
    if isinstance(error, TimeoutError):
        return ChannelClosed(title, "it was connected, but did not finish the handshake in time", CHECK_PORT)
    if isinstance(error.__cause__, ssl.SSLError):
        return ChannelClosed(title, "it does not speak TLS 1.3", CHECK_PORT)
    return ChannelClosed(title, "it closed the connection during the handshake", CHECK_PORT)


def wrong_certificate(peer: str) -> TrustError:
    return TrustError(
        f"{peer} is not the machine that was expected",
        "its certificate is another one",
        "if its host set it up anew, ask for a new invite; if not, somebody may be in between",
    )


def connect_failed(where: str, error: Exception) -> ChannelClosed:
    """Why there is no TCP connection to `where`."""
    title = f"no connection to {where}"
    causes = _causes(error)
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return ChannelClosed(
            title, "it was refused: nothing listens on that port", "start the program there, or check the port"
        )
    if any(isinstance(cause, TimeoutError) for cause in causes):
        return ChannelClosed(
            title,
            "it timed out: nothing answered",
            "see whether the machine is on, and whether a firewall lets the port through",
        )
    if any(isinstance(cause, OSError) and cause.errno in _UNREACHABLE for cause in causes):
        return ChannelClosed(
            title, "it is unreachable from this network", "check the address, and that both are on one network"
        )
    if any(isinstance(cause, socket.gaierror | UnicodeError) for cause in causes):
        return ChannelClosed(title, "the host's name is not known", "check its spelling, or give an IP address")
    return ChannelClosed(title, str(causes[0]), "check the host and the port")


def listen_failed(where: str, error: Exception) -> ConfigError:
    """Why nothing can listen on `where`."""
    title = f"can't listen on {where}"
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return ConfigError(title, "the port is in use", "choose another port, or stop the program that uses this one")
    if code == errno.EACCES:
        return ConfigError(title, "the system does not allow it", "choose a port from 1024 to 65535")
    if code == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror | UnicodeError):
        return ConfigError(
            title,
            "this machine has no such address",
            "give one of its own addresses, or 0.0.0.0 for all of them",
        )
    return ConfigError(title, str(error), "choose another host or port")


def _causes(error: Exception) -> list[BaseException]:
    """trio keeps what each address of a host failed with in a group, as the cause of one general error."""
    if isinstance(error.__cause__, BaseExceptionGroup):
        return list(error.__cause__.exceptions)
    return [error]
