"""Checks of agents: programs and libraries that have the model call a function, and go on with the result."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from _checks import KEY, QUESTION, Check, Setting, call_request, npm_package, output, python_program, right

BRIEF = "You answer exactly as you are told."
"""In place of instructions that are longer than the demo's model can read."""
ANSWER_TOKENS = 100
CONTEXT_TOKENS = 8192
START_SECONDS = 120


@contextmanager
def home(setting: Setting) -> Iterator[tuple[Path, dict[str, str]]]:
    """An empty folder, and an environment whose home and working directory it is."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), {**setting.environment, "HOME": folder, "PWD": folder}


def command(setting: Setting, name: str) -> str:
    return str((setting.npm or Path()).resolve() / "node_modules/.bin" / name)


def codex(setting: Setting) -> str:
    with home(setting) as (folder, environment):
        (folder / "brief.md").write_text(BRIEF)
        settings = {
            "model": json.dumps(setting.cluster.model),
            "model_provider": '"core"',
            "model_providers.core.name": '"core"',
            "model_providers.core.base_url": json.dumps(setting.cluster.api),
            "model_providers.core.env_key": '"OPENAI_API_KEY"',
            "model_providers.core.wire_api": '"responses"',
            "model_instructions_file": json.dumps(str(folder / "brief.md")),
            "include_permissions_instructions": "false",
            "include_environment_context": "false",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        mode = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--disable", "goals")
        request = call_request("exec_command", cmd="echo Paris")
        run = (command(setting, "codex"), "exec", *mode, *options, request)
        told = output(*run, env={**environment, "CODEX_HOME": str(folder)}, folder=folder)
    items = [json.loads(line).get("item", {}) for line in told.splitlines() if line.startswith("{")]
    printed = [item["aggregated_output"] for item in items if item.get("type") == "command_execution"]
    right("".join(printed))
    return right(str([item["text"] for item in items if item.get("type") == "agent_message"][-1]))


def claude_code(setting: Setting) -> str:
    """By Anthropic's API, which begins above OpenAI's `/v1`."""
    with home(setting) as (folder, environment):
        model = setting.cluster.model
        own = {
            "ANTHROPIC_BASE_URL": setting.cluster.api.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(ANSWER_TOKENS),
            "IS_SANDBOX": "1",
        }
        mode = ("--bare", "--tools", "Bash", "--dangerously-skip-permissions", "--system-prompt", BRIEF)
        request = call_request("Bash", command="echo Paris", description="Says Paris")
        told = output(
            command(setting, "claude"),
            *("-p", request, *mode, "--output-format", "stream-json", "--verbose"),
            env={**environment, **own},
            folder=folder,
        )
    events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    printed = [str(event["tool_use_result"]) for event in events if "tool_use_result" in event]
    right("".join(printed))
    return right(str(events[-1]["result"]))


def cline(setting: Setting) -> str:
    with home(setting) as (folder, environment):
        program, model = (command(setting, "cline"), "--data-dir", str(folder / "data")), setting.cluster.model
        provider = ("openai-compatible", "--apikey", KEY, "--modelid", model, "--baseurl", setting.cluster.api)
        output(program[0], "auth", *program[1:], "--provider", *provider, env=environment, folder=folder)
        request = call_request("run_commands", commands=["echo Paris"])
        run = (*program, "--provider", "openai-compatible", "--model", model, "--system", BRIEF, "--compaction", "off")
        return right(output(*run, request, env=environment, folder=folder))


def qwen_code(setting: Setting) -> str:
    with home(setting) as (folder, environment):
        sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0}
        others = ["agent", "task_stop", "send_message", "skill", "tool_search"]
        settings = {
            "tools": {"core": ["run_shell_command"], "exclude": others},
            "model": {"generationConfig": {"samplingParams": sampling}},
            "privacy": {"usageStatisticsEnabled": False},
        }
        (folder / ".qwen").mkdir()
        (folder / ".qwen/settings.json").write_text(json.dumps(settings))
        (folder / "brief.md").write_text(BRIEF)
        own = {"QWEN_SYSTEM_MD": str(folder / "brief.md"), "OPENAI_MODEL": setting.cluster.model}
        request = call_request("run_shell_command", command="echo Paris", is_background=False)
        run = (command(setting, "qwen"), "--auth-type", "openai", "--yolo", "-p", request)
        return right(output(*run, env={**environment, **own}, folder=folder))


def continue_cli(setting: Setting) -> str:
    with home(setting) as (folder, environment):
        model = {
            "name": "core",
            "provider": "openai",
            "model": setting.cluster.model,
            "apiBase": setting.cluster.api,
            "apiKey": KEY,
            "roles": ["chat"],
            "capabilities": ["tool_use"],
            "defaultCompletionOptions": {"maxTokens": ANSWER_TOKENS, "temperature": 0},
        }
        config = folder / "config.yaml"  # JSON is YAML
        config.write_text(json.dumps({"name": "core", "version": "0.0.1", "schema": "v1", "models": [model]}))
        request = call_request("Bash", command="echo Paris")
        run = (command(setting, "cn"), "-p", "--auto", "--config", str(config), request)
        return right(output(*run, env=environment, folder=folder))


def opencode(setting: Setting) -> str:
    name = setting.cluster.model
    limits = {"context": CONTEXT_TOKENS, "output": ANSWER_TOKENS}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": setting.cluster.api, "apiKey": KEY},
        "models": {name: {"limit": limits}},
    }
    agent = {"mode": "primary", "prompt": BRIEF, "temperature": 0, "tools": {"*": False, "bash": True}}
    config = {
        "provider": {"core": provider},
        "small_model": f"core/{name}",
        "autoupdate": False,
        "agent": {"brief": agent},
        "permission": {"bash": "allow"},
    }
    with home(setting) as (folder, environment):
        (folder / "opencode.json").write_text(json.dumps(config))
        request = call_request("bash", command="echo Paris", description="x")
        run = (command(setting, "opencode"), "run", "--agent", "brief", "--model", f"core/{name}")
        return right(output(*run, env=environment, folder=folder, given=request))


def aider(setting: Setting) -> str:
    """It has no tools: it asks for a text."""
    with home(setting) as (folder, environment):
        quiet = ("--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable")
        model = ("--model", f"openai/{setting.cluster.model}", "--openai-api-base", setting.cluster.api)
        mode = ("--edit-format", "ask", "--map-tokens", "0", "--message", QUESTION)
        return right(output(setting.python, "-m", "aider", *quiet, *model, *mode, env=environment, folder=folder))


def library_npm(name: str, setting: Setting) -> str:
    script = Path(__file__).with_name("_agents.mjs")
    folder = str((setting.npm or Path()).resolve())
    request = call_request("capital_of", country="France")
    return right(output("node", str(script), name, folder, setting.cluster.model, request, env=setting.environment))


def library_python(name: str, setting: Setting, api: str | None = None) -> str:
    script = Path(__file__).with_name("_agents.py")
    request = call_request("capital_of", country="France")
    run = (setting.python, str(script), name, api or setting.cluster.api, setting.cluster.model, request)
    return right(output(*run, env={**setting.environment, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}))


def litellm_proxy(setting: Setting) -> str:
    """What Anthropic's clients ask, which the proxy turns into what ours do."""
    name = setting.cluster.model
    parameters = {"model": f"openai/{name}", "api_base": setting.cluster.api, "api_key": KEY}
    config = {
        "model_list": [{"model_name": name, "litellm_params": parameters}],
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }
    with home(setting) as (folder, environment):
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        run = (str(Path(setting.python).with_name("litellm")), "--config", "config.yaml")
        own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with _serving(run, "/health/liveliness", folder, {**environment, **own}) as url:
            return library_python("anthropic", setting, f"{url}/v1")


def open_webui(setting: Setting) -> str:
    """By its HTTP API; it starts without a network, and with no model of its own."""
    with home(setting) as (folder, environment):
        own = {
            "DATA_DIR": str(folder),
            "ENABLE_OLLAMA_API": "false",
            "OFFLINE_MODE": "true",
            "OPENAI_API_BASE_URL": setting.cluster.api,
            "RAG_EMBEDDING_ENGINE": "openai",
            "WEBUI_AUTH": "false",
            "WEBUI_SECRET_KEY": KEY,
        }
        run = (str(Path(setting.python).with_name("open-webui")), "serve")
        with _serving(run, "/health", folder, {**environment, **own}) as url:
            return library_python("open-webui", setting, f"{url}/api")


@contextmanager
def _serving(run: tuple[str, ...], health: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """Where a server of this machine is, for the length of the block."""
    port = _free_port()
    address = ("--host", "127.0.0.1", "--port", str(port))
    quiet = subprocess.DEVNULL
    process = subprocess.Popen((*run, *address), cwd=folder, env=environment, stdout=quiet, stderr=quiet)
    try:
        _wait_for(f"http://127.0.0.1:{port}{health}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=START_SECONDS).close()
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _python(package: str, how: str, name: str) -> Check:
    return Check(package, name.partition(" ")[2] or "tool", python_program(package, how), partial(library_python, name))


def _npm(package: str, others: tuple[str, ...], name: str) -> Check:
    return Check(package, "tool", npm_package(package, *others), partial(library_npm, name))


def _program(package: str, run: Callable[[Setting], str]) -> Check:
    return Check(package, "command", npm_package(package), run)


AGENTS = [
    _program("@openai/codex", codex),
    _program("@anthropic-ai/claude-code", claude_code),
    _program("cline", cline),
    _program("@qwen-code/qwen-code", qwen_code),
    _program("@continuedev/cli", continue_cli),
    _program("opencode-ai", opencode),
    Check("aider-chat", "question", python_program("aider-chat", "aider-chat"), aider),
    _npm("@ai-sdk/openai", ("ai", "zod"), "ai-sdk openai"),
    _npm("@ai-sdk/openai-compatible", ("ai", "zod"), "ai-sdk openai-compatible"),
    _npm("@langchain/openai", ("@langchain/core", "zod"), "langchain"),
    _python("openai-agents", "openai-agents", "openai-agents chat"),
    _python("openai-agents", "openai-agents", "openai-agents responses"),
    _python("pydantic-ai-slim", "'pydantic-ai-slim[openai]'", "pydantic-ai chat"),
    _python("pydantic-ai-slim", "'pydantic-ai-slim[openai]'", "pydantic-ai responses"),
    _python("smolagents", "'smolagents[openai]'", "smolagents"),
    _python("litellm", "litellm", "litellm"),
    Check("open-webui", "HTTP API", python_program("open-webui", "open-webui"), open_webui),
    Check("litellm", "proxy, /v1/messages", python_program("litellm", "'litellm[proxy]'"), litellm_proxy),
]
