"""What `core top` makes of `/v1/cluster`, on terminals of several widths."""

from __future__ import annotations

from typing import Any

import pytest

from core.cli.console import output
from core.cli.top import view

BATTERY = "it is paused: this machine runs on battery, as its owner's laptop does on every train"
RELAYED = "relayed by the coordinator: no address of the upstream node answers"


def node(node_id: str, **fields: Any) -> dict[str, Any]:
    plain = {
        "node_id": node_id,
        "state": "ready",
        "detail": "",
        "layers": None,
        "device": "cuda:0",
        "weight_bytes": 12 * 10**9,
        "kv_bytes": 10**6,
        "free_memory": 24 * 10**9,
        "link": "",
        "progress": None,
    }
    return plain | fields


STATUS: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-14B-Instruct",
    "state": "ready",
    "detail": "",
    "sessions": 1,
    "tokens_per_second": 8.0,
    "route_epoch": 3,
    "wire_ms": 1.25,
    "quant": "int4",
    "dtype": "bf16",
    "wire_dtype": "bf16",
    "quality": "perplexity +8%",
    "measured_token_seconds": 0.0213,
    "predicted_token_seconds": 0.02,
    "kv": {"tokens": 100_000, "reserved": 2000, "kept": 500},
    "nodes": [
        node("local-1", layers=[0, 30]),
        node("annas-gaming-computer-3foptdso", layers=[30, 48], link=RELAYED),
        node("bert-7axzq2kd", state="paused", detail=BATTERY),
        node("carl-5mbt3w2x", state="loading", detail="download", progress=[45, 100]),
    ],
    "hops": [{"node_id": "local-1", "compute_ms": 8.31, "queue_ms": 0.2}],
    "generations": [
        {
            "session": 12,
            "phase": "decode",
            "prompt_tokens": 4000,
            "prefilled": 4000,
            "cached_tokens": 1024,
            "tokens": 250,
            "tokens_per_second": 8.0,
            "drafted": 40,
            "accepted": 30,
            "seconds": 31.0,
            "detail": "",
            "recoveries": 0,
        }
    ],
}


def shown(status: dict[str, Any], columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    console = output()
    with console.capture() as captured:
        console.print(view(status))
    return captured.get()


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_and_every_row_is_a_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.rstrip() for line in shown(STATUS, columns, monkeypatch).splitlines()]
    assert max(map(len, lines)) <= columns
    assert "8.0 tokens/s   1 generation   between hops 1.2 ms   route 3" in lines
    assert "quant int4, dtype bf16, wire dtype bf16 (perplexity +8%)" in lines
    assert "a token takes 21.3 ms, 20.0 predicted" in lines
    rows = [line.split() for line in lines]
    assert ["annas-gaming-computer-3foptdso", "ready", "[30,", "48)", "cuda:0", "24.00", "GB", "relayed"] in rows
    assert ["carl-5mbt3w2x", "loading", "45%", "-", "cuda:0", "24.00", "GB", "-"] in rows
    assert ["local-1", "12.00", "GB", "1.0", "MB", "8.3", "ms", "0.2", "ms"] in rows
    assert ["12", "decode", "4000", "4000", "1024", "250", "8.0", "40", "30", "31", "s"] in rows


def test_what_is_too_long_for_a_table_is_said_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.rstrip() for line in shown(STATUS, 200, monkeypatch).splitlines()]
    assert f"bert-7axzq2kd: {BATTERY}" in lines
    assert f"annas-gaming-computer-3foptdso: {RELAYED}" in lines


@pytest.mark.parametrize("columns", [80, 120])
def test_generations_that_wait_for_another_route_say_why(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (running,) = STATUS["generations"]
    suspended = running | {"phase": "suspended", "detail": "node 'carl' with layers [30, 48) was lost", "recoveries": 2}
    recovered = running | {"session": 13, "recoveries": 1}
    text = shown(STATUS | {"generations": [suspended, recovered]}, columns, monkeypatch)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= columns
    assert ["12", "suspended", "4000"] in [line.split()[:3] for line in lines]
    assert lines[-3:] == [
        "12: node 'carl' with layers [30, 48) was lost",
        "12: recovered from 2 lost routes",
        "13: recovered from 1 lost route",
    ]


def test_before_anybody_has_joined_there_are_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = STATUS | {"state": "waiting", "detail": "2 more nodes must join [no] luck"}
    waiting |= {"quant": "auto", "dtype": "auto", "wire_dtype": "auto", "quality": ""}
    waiting |= {"measured_token_seconds": 0.0, "predicted_token_seconds": 0.0}
    text = shown(waiting | {"nodes": [], "hops": [], "generations": [], "sessions": 0}, 80, monkeypatch)
    assert "Qwen/Qwen2.5-14B-Instruct  waiting: 2 more nodes must join [no] luck" in text
    assert "0 generations" in text
    assert "quant auto, dtype auto, wire dtype auto\n" in text
    assert len(text.splitlines()) == 4
