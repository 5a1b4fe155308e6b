"""Programs that people use against a cluster of this machine: whether each gets what it asks for.

The demo's model in fp32, split over two node processes, behind an API with a key. It is served so that it draws no
tokens where a program doesn't ask for that: some can't ask for anything else. A line for each check: PASS, FAIL or
skipped, with the reason. Nothing is installed here; what is missing is skipped, and its line says how to get it:

    pip install -e '.[clients]'            LangChain and the command llm
    pip install 'lm-eval[api,hf]'          lm-eval, which is large
    npm install --prefix FOLDER openai     then --npm-dir FOLDER; needs node
    chromium                               from the system's packages, or --browser PATH

Agents are run to the answer after a tool's result. The model is too small to call functions by itself: it is served
with `--tools-as-text` and a template that shows it the call which is asked for. Their lines name packages of npm, for
`--npm-dir`, and of Python, for `--python`, best that of an environment of their own (open-webui takes 7.5 GB). Agents
run what the model asks for without asking back: `echo Paris`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from shutil import which
from typing import Any

import trio
from _agent_checks import AGENTS
from _browser import Pages, told_by_browser
from _checks import KEY, QUESTION, Check, Missing, Setting, npm_package, output, right
from _measure import machine

from core.cli.demo_model import demo_model
from core.testing.cluster import open_cluster

SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "city",
    "description": "A city and its country.",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
TEMPLATE = Path(__file__).with_name("clients.jinja")


def installed(package: str, how: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise Missing(how) from None


def greedy_model(path: Path) -> Path:
    """The demo's model with the advice to draw no tokens, written to `path`."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    reader = GGUFReader(demo_model())
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    advice = {Keys.General.SAMPLING_TEMP: MetadataDetails(GGUFValueType.FLOAT32, 0.0)}
    with redirect_stderr(StringIO()):  # it draws a bar
        copy_with_new_metadata(reader, GGUFWriter(path, architecture), advice, [])
    return path


def python_package(package: str, how: str = "pip install -e '.[clients]'") -> Callable[[Setting], str]:
    return lambda setting: installed(package, how)


def browser(setting: Setting) -> str:
    if setting.browser is None:
        raise Missing("install chromium, or --browser PATH")
    return output(setting.browser, "--version").split()[1]


def right_city(answer: Any) -> str:
    assert list(answer) == SCHEMA["required"], answer
    return json.dumps(answer)


def npm(name: str, setting: Setting) -> str:
    script = Path(__file__).with_suffix(".mjs")
    arguments = (name, str((setting.npm or Path()).resolve()), setting.cluster.model, QUESTION, json.dumps(SCHEMA))
    told = output("node", str(script), *arguments, env=setting.environment)
    return told if name in ("refusal", "json_schema") else right(told)


def langchain(setting: Setting) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=setting.cluster.model,
        base_url=setting.cluster.api,
        api_key=KEY,
        temperature=0,
        max_tokens=60,
        max_retries=0,
        timeout=60,
    )


def langchain_invoke(setting: Setting) -> str:
    message = langchain(setting).invoke(QUESTION)
    assert message.usage_metadata["output_tokens"] > 0
    return right(message.content)


def langchain_stream(setting: Setting) -> str:
    texts = [chunk.content for chunk in langchain(setting).stream(QUESTION) if chunk.content]
    assert len(texts) > 1, "it came in one piece"
    return right("".join(texts))


def langchain_structured(setting: Setting) -> str:
    return right_city(langchain(setting).with_structured_output(SCHEMA, method="json_schema").invoke(QUESTION))


def llm(setting: Setting, *arguments: str) -> str:
    model = {
        "model_id": "cluster",
        "model_name": setting.cluster.model,
        "api_base": setting.cluster.api,
        "api_key_name": "cluster",
        "supports_schema": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
        (Path(folder) / "keys.json").write_text(json.dumps({"cluster": KEY}))
        command = (sys.executable, "-m", "llm", "-m", "cluster", "-o", "temperature", "0", "-o", "max_tokens", "60")
        return output(*command, *arguments, QUESTION, env={**os.environ, "LLM_USER_PATH": folder})


def lm_eval(setting: Setting) -> str:
    script = Path(__file__).with_name("_lm_eval.py")
    arguments = (setting.cluster.api, setting.cluster.model, str(demo_model()))
    return output(sys.executable, str(script), *arguments, env=setting.environment).splitlines()[-1]


def browser_allowed(setting: Setting) -> str:
    told = told_by_browser(setting.browser or "", setting.pages, setting.pages.origin)
    assert told["error"] is None, told["error"]
    assert told["reads"] > 1, "it came in one piece"
    return f"{right(told['text'])!r} in {told['reads']} reads"


def browser_refused(setting: Setting) -> str:
    """The same page under another name of this machine, which is another origin."""
    told = told_by_browser(setting.browser or "", setting.pages, setting.pages.other_origin)
    assert told["error"] and not told["text"], f"{told['origin']} was let in"
    return f"an origin that is not named gets {told['error']}"


CHECKS = [
    *(
        Check("openai (npm)", name, npm_package("openai"), partial(npm, name))
        for name in ("chat", "stream", "json_schema", "responses", "refusal")
    ),
    Check("langchain-openai", "invoke", python_package("langchain-openai"), langchain_invoke),
    Check("langchain-openai", "stream", python_package("langchain-openai"), langchain_stream),
    Check("langchain-openai", "with_structured_output", python_package("langchain-openai"), langchain_structured),
    Check("llm", "stream", python_package("llm"), lambda setting: right(llm(setting))),
    Check("llm", "--no-stream", python_package("llm"), lambda setting: right(llm(setting, "--no-stream"))),
    Check(
        "llm",
        "--schema",
        python_package("llm"),
        lambda setting: right_city(json.loads(llm(setting, "--schema", json.dumps(SCHEMA)))),
    ),
    Check("lm-eval", "loglikelihood", python_package("lm-eval", "pip install 'lm-eval[api,hf]'"), lm_eval),
    Check("chromium", "allowed origin", browser, browser_allowed),
    Check("chromium", "other origin", browser, browser_refused),
    *AGENTS,
]


def result(check: Check, setting: Setting) -> tuple[str, str]:
    """The verdict, and the client's version with what came of it, or why nothing did."""
    try:
        told = f"{check.version(setting)}  {check.run(setting)}"
    except Missing as error:
        return "skipped", str(error)
    except Exception as error:  # whatever a client raises is the finding
        return "FAIL", " ".join(f"{type(error).__name__}: {error}".split())
    return "PASS", told


async def check_all(options: argparse.Namespace) -> bool:
    """Whether nothing failed."""
    reached = True
    asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 40, "stream": True}
    with Pages() as pages, tempfile.TemporaryDirectory() as folder:
        tools = ("--tools-as-text", "--chat-template", str(TEMPLATE))
        serve = ("--quant", "fp16", "--dtype", "fp32", "--cors-origin", pages.origin, *tools)
        model = await trio.to_thread.run_sync(greedy_model, Path(folder) / "greedy.gguf")
        async with open_cluster(model, *serve, local_nodes=2, env={"CORE_API_KEY": KEY}) as cluster:
            await cluster.wait_ready()
            body = {**asked, "model": cluster.model}
            pages.asked = {"url": f"{cluster.api}/chat/completions", "key": KEY, "body": body}
            setting = Setting(cluster, pages, options.npm_dir, options.python, options.browser)
            for check in CHECKS:
                if options.only in check.client:
                    verdict, told = await trio.to_thread.run_sync(result, check, setting)
                    print(f"{verdict:8}{check.client}, {check.name}: {told}", flush=True)
                    reached = reached and verdict != "FAIL"
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npm-dir", type=Path, help="where npm installed packages")
    parser.add_argument("--python", default=sys.executable, help="a Python that has agents; see their lines")
    parser.add_argument("--browser", default=which("chromium") or which("google-chrome"), help="a Chromium")
    parser.add_argument("--only", default="", help="the clients with this in their names")
    options = parser.parse_args()
    print(machine())
    sys.exit(0 if trio.run(check_all, options) else 1)


if __name__ == "__main__":
    main()
