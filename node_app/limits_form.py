"""Limits as the page's form sends them: what can't be, or can't be on this machine, is refused in a person's words."""

from __future__ import annotations

import re

import msgspec

from core.errors import ConfigError
from node_app.machine import Machine
from node_app.settings import Limits
from node_app.status import show_bytes

_FIELD = re.compile(r"at `\$\.(\w+)")
_WORDS = {
    "memory_gb": "the memory to give is a number of gigabytes, more than 0",
    "threads": "compute threads are a whole number, 1 or more",
    "device": "the device is one of those in the list",
    "hours": "the hours begin and end at two times of day, like 22:30",
    "cpu_percent": "how much of all cores others may use is a whole number from 1 to 100",
    "gpu_percent": "how much of the GPU others may use is a whole number from 1 to 100",
    "free_memory_gb": "the memory to be left free is a number of gigabytes, more than 0",
}
_TITLE = "these limits can't be taken"


def limits_from(text: bytes, machine: Machine) -> Limits:
    """Raises ConfigError that says what is wrong with which of them."""
    try:
        limits = msgspec.json.decode(text, type=Limits)
    except (msgspec.DecodeError, ValueError) as error:
        field = _FIELD.search(str(error))
        raise ConfigError(_TITLE, _WORDS.get(field[1] if field else "", "they did not come whole")) from error
    if absurd := _absurd(limits, machine):
        raise ConfigError(_TITLE, absurd)
    return limits


def _absurd(limits: Limits, machine: Machine) -> str:
    """What this machine has not; "" for nothing."""
    has = f"this machine has {show_bytes(machine.memory)} of memory"
    if limits.memory_gb is not None and limits.memory_gb * 10**9 > max(machine.memory, machine.gpu_memory):
        on_gpu = f", and {show_bytes(machine.gpu_memory)} on its GPU" if machine.gpu_memory else ""
        return f"{limits.memory_gb:g} GB can't be given: {has}{on_gpu}"
    if limits.free_memory_gb is not None and limits.free_memory_gb * 10**9 >= machine.memory:
        return f"{limits.free_memory_gb:g} GB are never free: {has}"
    if limits.threads is not None and limits.threads > machine.cores:
        return f"{limits.threads} threads are too many: this machine has {machine.cores} cores"
    return ""
