"""`core chat`: what is asked, shown and remembered, with an API that the test plays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from core.cli.chat import Talk
from core.errors import CoreError

Output = pytest.CaptureFixture[str]


def chunk(text: str, **more: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text, **more}}]})}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 41}}\n\ndata: [DONE]\n\n'


class Api:
    """Answers each question with the next script; `asked` are the bodies."""

    def __init__(self, *scripts: list[bytes | BaseException]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._scripts = iter(scripts)
        self.client = httpx.Client(base_url="http://cluster", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.content))
        return httpx.Response(200, content=self._stream(next(self._scripts)))

    def _stream(self, script: list[bytes | BaseException]) -> Iterator[bytes]:
        for step in script:
            if isinstance(step, BaseException):
                raise step
            yield step


def test_an_answer_is_shown_measured_and_remembered(capsys: Output) -> None:
    api = Api([chunk("", reasoning_content="hm "), chunk("Hel"), chunk("lo"), USAGE], [chunk("Yes"), USAGE])
    talk = Talk(api.client, "tiny", {"temperature": 0}, "Be brief.")
    assert talk.take("hi")
    out, err = capsys.readouterr()
    assert out == "hm Hello"
    assert "41 tokens" in err
    assert talk.take("again")
    system = {"role": "system", "content": "Be brief."}
    said = [("user", "hi"), ("assistant", "Hello"), ("user", "again")]
    assert api.asked[1]["messages"] == [system, *({"role": role, "content": text} for role, text in said)]
    assert api.asked[1]["temperature"] == 0


def test_a_stopped_answer_stays_as_far_as_it_came(capsys: Output) -> None:
    api = Api([chunk("Hel"), KeyboardInterrupt()], [chunk("Yes"), USAGE])
    talk = Talk(api.client, "tiny")
    assert talk.take("hi")
    assert "stopped" in capsys.readouterr().err
    assert talk.take("more")
    assert [each["content"] for each in api.asked[1]["messages"]] == ["hi", "Hel", "more"]


def test_what_is_waited_for_and_what_fails_is_said_and_the_talk_goes_on(capsys: Output) -> None:
    lost = b'data: {"error": {"message": "the route broke"}}\n\n'
    api = Api([b": waiting: node 'b' was lost\n\n", lost], [httpx.ReadError("cut")], [chunk("Yes"), USAGE])
    talk = Talk(api.client, "tiny")
    for line in ("one", "two", "three"):
        assert talk.take(line)
    err = capsys.readouterr().err
    for words in ("goes on by itself: node 'b' was lost", "the route broke", "no answer from http://cluster"):
        assert words in err
    assert [each["content"] for each in api.asked[2]["messages"]] == ["three"]


def test_commands_change_what_the_model_is_told_begin_anew_and_end(capsys: Output) -> None:
    api = Api([chunk("Yes"), USAGE], [chunk("Yes"), USAGE])
    talk = Talk(api.client, "tiny")
    assert talk.take("/system Be kind.")
    assert talk.take("hi")
    assert talk.take("/new")
    assert talk.take("/system")
    assert talk.take("hi")
    assert talk.take("/what")
    assert talk.take("  ")
    assert not talk.take("/quit")
    assert "/system TEXT" in capsys.readouterr().err
    assert [[each["role"] for each in body["messages"]] for body in api.asked] == [["system", "user"], ["user"]]


def test_a_models_words_do_not_steer_the_terminal(capsys: Output) -> None:
    Talk(Api([chunk("a\x1b[2Jb\n\tc"), USAGE]).client, "tiny").take("hi")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[2Jb\n\tc"


def test_a_refusal_is_said_in_the_apis_words(capsys: Output) -> None:
    refusal = httpx.Response(503, json={"error": {"message": "Model is not ready."}})
    client = httpx.Client(base_url="http://cluster", transport=httpx.MockTransport(lambda _: refusal))
    assert Talk(client, "tiny").take("hi")
    assert "Model is not ready." in capsys.readouterr().err


def test_it_needs_a_cluster() -> None:
    from core.cli.chat import chat

    with pytest.raises(CoreError, match="no answer"):
        chat(url="http://127.0.0.1:9")
