"""What `core doctor` looks at. Each check is a function that yields its findings and touches nothing."""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

GB = 10**9
HOST = "127.0.0.1"
DEFAULT_PORTS = {7001: "--node-port", 8000: "--api-port"}
HUB_TIMEOUT_SECONDS = 3.0
SCARCE_MEMORY = 2 * GB
SCARCE_DISK = 10 * GB


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do about it where it isn't ok."""

    verdict: Verdict
    subject: str
    detail: str
    hint: str = ""


def torch_build() -> Iterator[Finding]:
    """The torch that is installed, its threads, and whether it can use the GPU that is there."""
    import torch

    detail = f"{torch.__version__}, threads: {torch.get_num_threads()}"
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        hint = "install a CUDA build of torch and a driver that it supports"
        yield Finding(Verdict.WARN, "torch", f"{detail}; there is an Nvidia driver, but this torch can't use it", hint)
    else:
        yield Finding(Verdict.OK, "torch", detail)


def devices() -> Iterator[Finding]:
    """Each device that a node could offer, with its memory."""
    import torch

    from core.runtime.device import detect, free_memory

    for device in detect():
        free = free_memory(torch.device(device.id))
        room = f"{free / GB:.1f} of {device.total_memory / GB:.1f} GB free"
        scarce = free < SCARCE_MEMORY
        yield Finding(
            Verdict.WARN if scarce else Verdict.OK,
            f"device {device.id}",
            f"{device.name}, {room}",
            "close what holds memory: few layers fit into this" if scarce else "",
        )


def quantizers() -> Iterator[Finding]:
    """What multiplies weights on each device: a quantizer's report, where it has one."""
    import torch

    from core.errors import CoreError
    from core.plugins import PluginHost
    from core.runtime.device import detect

    registry = PluginHost.installed().quantizers
    for device in detect():
        for name in registry.names():
            subject = f"quantizer {name} on {device.id}"
            try:
                report = registry.get(name).report(torch.device(device.id))
            except CoreError as error:
                yield Finding(Verdict.BAD, subject, f"{error.title}: {error.message}", error.hint)
                continue
            if report:
                yield Finding(Verdict.OK, subject, report)


def ports(wanted: dict[int, str] | None = None) -> Iterator[Finding]:
    """Whether the ports that `core serve` takes by default are free on loopback."""
    for port, option in (DEFAULT_PORTS if wanted is None else wanted).items():
        try:
            socket.create_server((HOST, port)).close()
        except OSError as error:
            hint = f"stop what listens there, perhaps another core serve, or choose another port with {option}"
            yield Finding(Verdict.WARN, f"port {port}", error.strerror or str(error), hint)
        else:
            yield Finding(Verdict.OK, f"port {port}", "free")


def multicast() -> Iterator[Finding]:
    """Whether clusters on the local network can be found, by each of this machine's addresses."""
    from core.discovery.check import hear_oneself
    from core.errors import NoMulticast
    from core.trust.addresses import reachable

    hint = "clusters are not found by themselves from here; an invite, or --cluster-host with an address, always works"
    addresses = [address for address in reachable() if ":" not in address]
    if not addresses:
        yield Finding(Verdict.WARN, "multicast", "this machine has no IPv4 address that others could reach", hint)
    for address in addresses:
        try:
            hear_oneself(address)
        except NoMulticast as error:
            yield Finding(Verdict.WARN, "multicast", f"{error.title}: {error.message}", hint)
        else:
            yield Finding(Verdict.OK, "multicast", f"{address} hears what it sends")


def plugins() -> Iterator[Finding]:
    """Whether each installed plugin loads."""
    from core.plugins import SWITCH, PluginHost

    host = PluginHost.installed()
    yield Finding(Verdict.OK, "plugins", ", ".join(plugin.name for plugin in host.loaded) or "none")
    for plugin in host.switched_off:
        yield Finding(Verdict.WARN, f"plugin {plugin.name}", f"left out by {SWITCH}")
    for broken in host.broken:
        hint = f"install another version of {broken.distribution}, or uninstall it"
        yield Finding(Verdict.BAD, f"plugin {broken.name}", broken.cause, hint)


def dependencies() -> Iterator[Finding]:
    """Whether what core and the plugins require is installed, in versions within their bounds."""
    from core.installing import DISTRIBUTION
    from core.plugins import GROUP

    entries = importlib.metadata.entry_points(group=GROUP)
    for name in sorted({DISTRIBUTION, *(entry.dist.name for entry in entries if entry.dist)}):
        version = importlib.metadata.version(name)
        unmet = list(_unmet(name))
        for complaint in unmet:
            hint = "repair it with pip install --upgrade, in the environment that runs core"
            yield Finding(Verdict.BAD, f"requirements of {name}", complaint, hint)
        if not unmet:
            yield Finding(Verdict.OK, f"{name} {version}", "everything that it requires is installed")


def _unmet(distribution: str) -> Iterator[str]:
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} is {version}, not {requirement.specifier}"


def hub() -> Iterator[Finding]:
    """Whether models can be downloaded: HF_ENDPOINT and HF_HUB_OFFLINE are honoured."""
    import httpx
    from huggingface_hub import constants

    hint = "models in a local directory or already in the cache still work"
    if constants.HF_HUB_OFFLINE:
        yield Finding(Verdict.WARN, "hub", "HF_HUB_OFFLINE is set: nothing is downloaded", hint)
        return
    try:
        httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield Finding(Verdict.WARN, "hub", f"{constants.ENDPOINT} can't be reached: {error}", hint)
    else:
        yield Finding(Verdict.OK, "hub", constants.ENDPOINT)


def disk() -> Iterator[Finding]:
    """The room for downloaded models."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    scarce = free < SCARCE_DISK
    yield Finding(
        Verdict.WARN if scarce else Verdict.OK,
        "disk",
        f"{free / GB:.1f} GB free for models in {cache}",
        "make room there, or set HF_HUB_CACHE to a larger disk" if scarce else "",
    )


Check = Callable[[], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (torch_build, devices, quantizers, ports, multicast, plugins, dependencies, hub, disk)


def examine(checks: tuple[Check, ...] = CHECKS) -> Iterator[Finding]:
    """Runs every check; one that fails itself is a finding and stops no other."""
    for check in checks:
        try:
            yield from check()
        # A doctor is called when anything may be broken, torch's import included.
        except Exception as error:
            subject = check.__name__.replace("_", " ")
            yield Finding(Verdict.BAD, subject, f"{type(error).__name__}: {error}", "reinstall core-cluster")
