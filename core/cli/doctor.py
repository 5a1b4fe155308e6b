"""`core doctor`: one line per finding, with what to do; fails only where something is bad."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from core.cli.checks import Finding, Verdict, examine
from core.cli.console import counted

_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.BAD: "red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine, and say what to do. Devices, memory, ports, network, plugins, versions, hub, disk."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            _print_line(finding)
    problems, warnings = (sum(each.verdict is kind for each in findings) for kind in (Verdict.BAD, Verdict.WARN))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(f"\n{_in_all(problems, warnings)}")
    if problems:
        raise typer.Exit(1)


def _print_line(finding: Finding) -> None:
    from rich.console import Console
    from rich.text import Text

    verdict = Text(f"{finding.verdict:5}", style=_STYLES[finding.verdict])
    hint = f"\n     -> {finding.hint}" if finding.hint else ""
    Console().print(verdict + Text(f"{finding.subject}: {finding.detail}{hint}"), soft_wrap=True)


def _in_all(problems: int, warnings: int) -> str:
    if problems:
        return f"{counted(problems, 'problem')} to be solved first, and {counted(warnings, 'warning')}"
    if warnings:
        return f"{counted(warnings, 'warning')}, with which core runs here; see what to do above"
    return "nothing is wrong"
