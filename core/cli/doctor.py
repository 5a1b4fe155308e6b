"""`core doctor`: one line per finding, with what to do; fails only where something is bad."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from core.cli.checks import Finding, Verdict, examine

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.BAD: "red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine, and say what to do. Devices, memory, ports, network, plugins, versions, hub, disk."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            _print_line(finding)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    if _any_bad(findings):
        raise typer.Exit(1)


def _print_line(finding: Finding) -> None:
    from rich.console import Console
    from rich.text import Text

    verdict = Text(f"{finding.verdict:5}", style=_STYLES[finding.verdict])
    hint = f" -> {finding.hint}" if finding.hint else ""
    Console().print(verdict + Text(f"{finding.subject}: {finding.detail}{hint}"), soft_wrap=True)


def _any_bad(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict is Verdict.BAD for finding in findings)
