"""`core bench`: how fast one machine computes a whole model, and where a decoded token's time goes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import trio
import typer

from core.cli.console import Bars, DTypeOption, counted, output, set_up_logging, table
from core.cli.options import (
    CacheDir,
    Compile,
    Compute,
    Device,
    KeepHead,
    ModelName,
    Quant,
    Revision,
    Threads,
    TransportName,
)
from core.errors import ChannelClosed
from core.interfaces.checkpoint import Source
from core.interfaces.transport import DEFAULT_TRANSPORT

if TYPE_CHECKING:
    from rich.table import Table

    from core.interfaces.transport import Channel, Transport
    from core.protocol.codec import Packet
    from core.runtime.bench import Profile
    from core.runtime.kernel_choice import Choice
    from core.runtime.model import Model, Precision

_DIAL_SECONDS = 5.0
_MESSAGES = 200


def bench(
    model: ModelName,
    revision: Revision = None,
    quant: Quant = "auto",
    keep_head: KeepHead = False,
    dtype: Compute = DTypeOption.AUTO,
    device: Device = "auto",
    threads: Threads = None,
    compiles: Compile = False,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the made-up prompt.", min=1)] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens to decode in each round.", min=1)] = 64,
    rounds: Annotated[int, typer.Option(help="How often to measure, after one round to warm up.", min=1)] = 5,
    profile: Annotated[bool, typer.Option("--profile", help="Show where a decoded token's time goes.")] = False,
    transport: TransportName = DEFAULT_TRANSPORT,
    hf_cache_dir: CacheDir = None,
) -> None:
    """Time a whole model on this machine alone. Prefill and decode, in this process, without any network."""
    set_up_logging("warning")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler has things to say
    import torch

    from core.plugins import PluginHost
    from core.runtime.bench import WholeModel, made_up_prompt, refuse_too_large
    from core.runtime.compiled import refuse_without_compiler
    from core.runtime.device import pick, set_up_torch
    from core.runtime.kernel_choice import CHOOSER
    from core.runtime.model import Model
    from core.runtime.precision_choice import choose_precision, refuse_unknown

    plugins = PluginHost.installed()
    refuse_unknown(quant, plugins.quantizers)
    moved_by, place = plugins.transports.get(transport), pick(device)
    set_up_torch(threads)
    if compiles:
        refuse_without_compiler(place)
    with Model.open(Source(model, revision, hf_cache_dir), plugins) as opened:
        precision = choose_precision(
            opened, plugins.quantizers, place, quant=quant, dtype=dtype.dtype, keep_head=keep_head
        )
        precision = replace(precision, wire=precision.compute)
        prompt = made_up_prompt(opened, prompt_tokens, tokens)
        refuse_too_large(opened, precision, place, prompt_tokens + tokens)
        _fetch(opened)
        whole = WholeModel(opened, precision, place, compiles=compiles)
        hidden_size = opened.spec.hidden_size
        typer.echo(f"model    {model}")
        layers = f"{counted(opened.spec.layers, 'layer')}{', compiled' if compiles else ''}"
        typer.echo(
            f"         {layers}, architecture {opened.architecture.name},"
            f" quant {precision.quantizer.name}, dtype {precision.compute} ({precision.quality})"
        )
    typer.echo(f"device   {place}, {counted(torch.get_num_threads(), 'thread')}, torch {torch.__version__}")
    typer.echo(f"speed    the median of {counted(rounds, 'round')} (the slowest to the fastest), after one to warm up")
    whole.measure(prompt, tokens)
    measured = [whole.measure(prompt, tokens) for _ in range(rounds)]
    prefill, decode = [each.prefill for each in measured], [each.decode for each in measured]
    typer.echo(f"prefill  {_rate(prompt_tokens, prefill)}, a prompt of {counted(prompt_tokens, 'token')}")
    typer.echo(f"decode   {_rate(tokens, decode)}, {counted(tokens, 'token')} after it")
    if profile:
        found = whole.profile(prompt, tokens)
        packet = _decode_message(hidden_size, precision)
        typer.echo()
        output().print(_table(found, _codec_seconds(packet), trio.run(_round_trip, moved_by, packet)))
        typer.echo()
        output().print(_kernel_table(CHOOSER.choices()))


def _fetch(model: Model) -> None:
    with Bars() as bars:

        def progress(done: int, total: int) -> None:
            bars.show({"download": (done, total)})

        model.fetch_embed_and_head(progress)
        model.fetch_stage(range(model.spec.layers), progress)


def _rate(tokens: int, seconds: Sequence[float]) -> str:
    rates = [tokens / each for each in seconds]
    return f"{statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})"


def _decode_message(hidden_size: int, precision: Precision) -> Packet:
    import torch

    from core.protocol.codec import Packet
    from core.protocol.fields import Segment
    from core.protocol.messages import RunDecode
    from core.protocol.tensors import to_wire

    hidden = to_wire(torch.zeros(1, hidden_size, dtype=precision.residual), precision.residual)
    return Packet(RunDecode(1, [Segment(1, 100, 1, 1)], hidden, [1000]), "1")


def _codec_seconds(packet: Packet) -> float:
    """What it takes to encode and decode a message."""
    from core.protocol.codec import Decoder, encode

    decoder, times = Decoder(), []
    for _ in range(_MESSAGES):
        started = time.perf_counter()
        for frame in encode(packet):
            decoder.feed(frame)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


async def _round_trip(transport: Transport, packet: Packet) -> float:
    """Seconds for a message to the other end of a link in this process and back."""
    from core.link import open_link

    async with trio.open_nursery() as nursery:
        port = await nursery.start(transport.listen, "127.0.0.1", 0, _echo)
        times = []
        async with transport.dial("127.0.0.1", port, timeout=_DIAL_SECONDS) as channel, open_link(channel) as link:
            for _ in range(_MESSAGES):
                started = time.perf_counter()
                await link.send(packet.message, packet.request_id)
                await link.receive()
                times.append(time.perf_counter() - started)
        nursery.cancel_scope.cancel()
    return statistics.median(times)


async def _echo(channel: Channel) -> None:
    from core.link import open_link

    async with open_link(channel) as link:
        try:
            while True:
                packet = await link.receive()
                await link.send(packet.message, packet.request_id)
        except ChannelClosed:
            return


def _table(profile: Profile, codec: float, round_trip: float) -> Table:
    shown = table("part", "ms", "%", "of which", right=("ms", "%"))
    whole = profile.embed + profile.layers + profile.head + profile.sampling

    def row(part: str, seconds: float, of_which: str = "") -> None:
        shown.add_row(part, f"{1e3 * seconds:.3f}", f"{100 * seconds / whole:.0f}", of_which)

    row("a decoded token", whole)
    row("layers", profile.layers)
    for kind in profile.kinds:
        row(f"  {kind.name}", kind.seconds, ", ".join(f"{name} {1e3 * spent:.3f}" for name, spent in kind.operators))
    row("  dispatch", profile.dispatch, "the layers' time outside of torch's operators")
    row("embedding", profile.embed)
    row("head", profile.head, "final norm and logits")
    row("sampling", profile.sampling, "greedy")
    shown.add_section()
    row("codec", codec, "not in a token here: a decode message encoded and decoded")
    row("link", round_trip, "not in a token here: such a message to the other end of a link on this machine and back")
    return shown


def _kernel_table(choices: Sequence[Choice]) -> Table:
    """What multiplies, by the number of rows, with the times that say why: those of the most rows in a line."""
    shown = table("weight", "rows", "multiplied by", "ms", "the others", right=("rows", "ms"))
    for choice in choices:
        weight = str(choice.product)
        for name, rows in choice.kernels.ranges():
            times = choice.kernels.times[rows[-1]]
            others = ", ".join(f"{other} {1e3 * spent:.3f}" for other, spent in times.items() if other != name)
            shown.add_row(weight, f"{rows[0]}-{rows[-1]}", name, f"{1e3 * times[name]:.3f}" if times else "", others)
            weight = ""
    return shown
