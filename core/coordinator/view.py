"""What the coordinator tells of itself: the cluster's status, and gauges beside the telemetry's counters."""

from __future__ import annotations

from collections.abc import Iterator

from core.coordinator.live import Live
from core.coordinator.members import Member, MemberState
from core.coordinator.readiness import State
from core.coordinator.session import Session, Status
from core.coordinator.supervisor import Supervisor
from core.coordinator.telemetry import Telemetry, gauge, status_of
from core.interfaces.engine import ClusterStatus, NodeStatus, PlanningStatus, WireStatus
from core.interfaces.telemetry import KVStatus, Metric
from core.runtime.precision_choice import AUTO


def cluster_status(live: Live, phase: str, progress: tuple[int, int] | None) -> ClusterStatus:
    """`phase` and `progress` say what the coordinator is at before its model is open."""
    settings, supervisor, generator = live.settings, live.supervisor, live.generator
    precision = generator.precision if generator else None
    return ClusterStatus(
        model=settings.served_model_name,
        state=(supervisor.state if supervisor else State.WAITING).value,
        detail=supervisor.detail if supervisor else phase,
        progress=None if supervisor else progress,
        required_nodes=supervisor.required if supervisor else settings.min_nodes,
        ready_nodes=supervisor.ready_nodes() if supervisor else 0,
        route_epoch=supervisor.epoch if supervisor else 0,
        layers=generator.model.spec.layers if generator else 0,
        sessions=generator.sessions if generator else 0,
        tokens_per_second=live.telemetry.rate.per_second(),
        quant=precision.quantizer.name if precision else settings.quant,
        dtype=precision.compute if precision else settings.dtype or AUTO,
        wire_dtype=precision.wire if precision else settings.wire_dtype,
        quality=precision.quality if precision else "",
        nodes=tuple(_node_status(member, supervisor, live.telemetry) for member in live.members.all()),
        left_out=_left_out(live),
        kv=_kv(live),
        hops=live.telemetry.hops(),
        wire_ms=live.telemetry.wire.value or 0.0,
        generations=tuple(map(status_of, _sessions(live))),
        wires=tuple(
            WireStatus(ends, _rounded(wire.seconds), round(wire.bandwidth))
            for ends, wire in live.routes.wires.known(live.members.all()).items()
        ),
        predicted_token_seconds=_predicted(live),
        measured_token_seconds=live.telemetry.times.token,
        notes=supervisor.notes if supervisor else (),
        planning=_planning(live),
        events=live.journal.events,
        register_changes=live.members.register_changes,
    )


def metrics(live: Live) -> Iterator[Metric]:
    yield from live.telemetry.metrics()
    kv, statuses = _kv(live), [session.status for session in _sessions(live)]
    waiting, suspended = statuses.count(Status.WAITING), statuses.count(Status.SUSPENDED)
    yield gauge("core_sessions_running", "Generations that run.", len(statuses) - waiting - suspended)
    yield gauge("core_sessions_waiting", "Generations that wait for room, or for a route.", waiting)
    yield gauge("core_sessions_suspended", "Generations whose route broke, and that wait for another.", suspended)
    yield gauge("core_kv_tokens", "Tokens of KV cache that the route's memory holds.", kv.tokens)
    yield gauge("core_kv_reserved_tokens", "Of those, reserved by running sessions.", kv.reserved)
    yield gauge("core_kv_kept_tokens", "Of those, kept of ended sessions.", kv.kept)
    yield gauge("core_token_seconds", "Time of a token while one generation ran.", live.telemetry.times.token)
    yield gauge("core_predicted_token_seconds", "What that is predicted to be.", _predicted(live))
    yield gauge("core_nodes", "Nodes that have joined.", len(live.members.all()))
    ready = live.supervisor is not None and live.supervisor.state is State.READY
    yield gauge("core_ready", "1 while the cluster serves.", ready)


def _predicted(live: Live) -> float:
    serving = live.generator.router.serving if live.generator else None
    if serving is None or live.supervisor is None:
        return 0.0
    return live.supervisor.planning.token_seconds(serving.route.hops)


def _planning(live: Live) -> PlanningStatus | None:
    if live.supervisor is None:
        return None
    asked = live.supervisor.planning.asked
    return PlanningStatus(
        planner=live.settings.planner,
        plan_for=asked.plan_for.value,
        layer_bytes=asked.layer_bytes,
        weight_bytes=asked.weight_bytes,
        row_bytes=asked.row_bytes,
        min_nodes=asked.min_stages,
        max_nodes=asked.max_stages,
        pins={node_id: (layers.start, layers.stop) for node_id, layers in live.settings.pins.items()},
        excluded=tuple(sorted(live.settings.excluded)),
        prompt_rows=asked.prompt_rows,
        head_seconds=_rounded(live.telemetry.times.head),
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _node_status(member: Member, supervisor: Supervisor | None, telemetry: Telemetry) -> NodeStatus:
    speeds = supervisor.planning.speeds if supervisor else None
    reported, hop, layers = member.reported, member.hops[-1] if member.hops else None, member.layers
    return NodeStatus(
        node_id=member.node_id,
        hostname=member.hello.hostname,
        device=member.hello.selected_device,
        state=member.state.value,
        layers=(layers.start, layers.stop) if layers is not None else None,
        weight_bytes=hop.weight_bytes if hop else 0,
        kv_bytes=reported.kv_bytes,
        kv_tokens=reported.kv_tokens,
        sessions=reported.sessions,
        free_memory=reported.free_memory,
        link=hop.link if hop else "",
        detail=_detail(member, supervisor),
        progress=member.progress,
        row_seconds=tuple(map(_rounded, speeds.row_seconds(member))) if speeds else (),
        chunk_seconds=tuple(map(_rounded, speeds.chunk_seconds(member))) if speeds else (),
        memory=supervisor.planning.memory(member) if supervisor else 0,
        tokens=telemetry.tokens_by_node.get(member.node_id, 0),
        estimated=speeds.estimated(member) if speeds else False,
    )


def _detail(member: Member, supervisor: Supervisor | None) -> str:
    """Why it can hold no layers, or what it is at, or that it is slow."""
    if supervisor is None:
        return member.detail
    return supervisor.planning.requirements.lacking(member) or member.detail or supervisor.drift.slowness(member)


def _left_out(live: Live) -> dict[str, str]:
    """Who holds no layers, and why: by the plan, for having joined after it, or for being paused."""
    planned = dict(live.supervisor.left_out) if live.supervisor else {}
    resting = (MemberState.SPARE, MemberState.PAUSED)
    resting_ones = [member for member in live.members.all() if member.state in resting]
    details = {member.node_id: _detail(member, live.supervisor) for member in resting_ones}
    return planned | {node_id: detail for node_id, detail in details.items() if detail}


def _kv(live: Live) -> KVStatus:
    serving = live.generator.router.serving if live.generator else None
    if serving is None:
        return KVStatus()
    budget = serving.admission.budget
    return KVStatus(budget.tokens, budget.reserved, budget.kept)


def _sessions(live: Live) -> list[Session]:
    return live.generator.router.sessions if live.generator else []
