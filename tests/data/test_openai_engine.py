import dataclasses
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tests.data.fake_server import MODEL, FakeServer, Reply, asked, completion, echo, failure
from whiflash_infer.chat import Chat, ChatOptions
from whiflash_infer.errors import UserError
from whiflash_infer.target import Target
from whiflash_train.data.engines import Answer, Job, Sampling, seed_of
from whiflash_train.data.openai_engine import (
    OpenAIEngine,
    ServedEngine,
    pause,
    to_wire,
)

GREEDY = Sampling(max_new_tokens=16, temperature=0.0, seed=0)
SETTINGS = OpenAIEngine(
    urls=["http://127.0.0.1:1/v1"],
    model=MODEL,
    concurrency=4,
    max_retries=3,
    backoff_s=0.01,
    timeout_s=10.0,
    api_key_env=None,
    check_prompt=True,
    extra_body={},
)


@pytest.fixture(autouse=True)
def _plain_connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No proxy, and no certificates: reading those of the system takes most of a test's time."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))


def job(id_: str, **changes: Any) -> Job:
    messages = [{"role": "user", "content": id_}]
    fields: dict[str, Any] = {"messages": messages, "tools": None, "prompt_ids": [1, 2, 3]}
    return Job(id=id_, **{**fields, **changes})


def jobs(count: int) -> list[Job]:
    return [job(f"q{i}") for i in range(count)]


def connected(*servers: FakeServer, options: ChatOptions | None = None, **changes: Any):
    urls = [server.url for server in servers]
    settings = dataclasses.replace(SETTINGS, urls=urls, **changes)
    return settings.connect(Chat(None, frozenset(), options), no_target)


def no_target() -> Target:
    raise AssertionError("the target is not needed")


def collected(engine: ServedEngine, asked_for: list[Job], done: Any = ()) -> list[Answer]:
    return [a for batch in engine.answers(asked_for, done, GREEDY) for a in batch]


def ask_one(script: Callable[[dict[str, Any]], Reply], only: Job | None = None, **changes: Any):
    """The one answer, and the server."""
    with FakeServer(script) as server:
        (answer,) = collected(connected(server, **changes), [only or job("q")])
    return answer, server


def in_turn(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    """The replies one after the other, then echoes."""
    waiting = iter(replies)
    return lambda request: next(waiting, None) or echo(request)


# --- each id once


def test_the_set_of_ids_comes_out_once_each_from_a_server_that_delays_drops_cuts_and_reorders():
    tries: Counter[str] = Counter()

    def moody(request: dict[str, Any]) -> Reply:
        tries[asked(request)] += 1
        luck = random.Random(f"{asked(request)} {tries[asked(request)]}")
        fault = luck.choice([None, None, None, "drop", "cut"])
        return dataclasses.replace(echo(request), delay=luck.uniform(0, 0.03), fault=fault)

    with FakeServer(moody) as one, FakeServer(moody) as two:
        engine = connected(one, two, max_retries=20)
        answers = collected(engine, jobs(40))
    assert Counter(a.id for a in answers) == Counter(f"q{i}" for i in range(40))
    assert all(a.message and a.message["content"] == f"answer to {a.id}" for a in answers)
    assert [a.id for a in answers] != [f"q{i}" for i in range(40)]
    assert sum(engine.retries.values()) == sum(tries.values()) - 40 > 0


def test_killed_half_way_and_run_again_each_id_comes_once_and_done_ones_are_not_asked():
    def slow(request: dict[str, Any]) -> Reply:
        luck = random.Random(asked(request))
        return dataclasses.replace(echo(request), delay=luck.uniform(0, 0.02))

    with FakeServer(slow) as server:
        first: list[Answer] = []
        running = connected(server).answers(jobs(40), (), GREEDY)
        while len(first) < 20:
            first += next(running)
        running.close()
        server.requests.clear()
        done = {a.id for a in first}
        second = collected(connected(server), jobs(40), done)
        assert not done & set(server.asked)
    assert Counter(a.id for a in first + second) == Counter(f"q{i}" for i in range(40))


def test_a_closed_run_leaves_no_threads_and_no_requests_in_flight():
    before = threading.active_count()
    with FakeServer() as server:
        server.script = lambda r: dataclasses.replace(
            echo(r), delay=0.0 if asked(r) == "q0" else 30.0
        )
        running = connected(server).answers(jobs(3), (), GREEDY)
        next(running)
        started = time.monotonic()
        running.close()
        assert time.monotonic() - started < 5
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_ctrl_c_stops_the_run_at_once():
    with FakeServer(lambda request: dataclasses.replace(echo(request), delay=30.0)) as server:
        engine = connected(server)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        started = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            collected(engine, jobs(3))
        assert time.monotonic() - started < 10


def test_requests_are_not_logged_one_by_one(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    ask_one(echo)
    assert caplog.messages == []


def test_with_nothing_left_to_do_no_server_is_asked():
    assert (
        collected(SETTINGS.connect(Chat(None, frozenset()), no_target), jobs(2), {"q0", "q1"}) == []
    )


# --- load


def test_as_many_requests_as_allowed_are_in_flight_and_never_more():
    together = threading.Barrier(3)

    def three_at_a_time(request: dict[str, Any]) -> Reply:
        together.wait(timeout=10)  # breaks unless three are here at once
        return echo(request)

    with FakeServer(three_at_a_time) as server:
        answers = collected(connected(server, concurrency=3, max_retries=0), jobs(12))
    assert [a.finish for a in answers] == ["stop"] * 12
    assert server.most_in_flight == 3


def test_every_url_is_used_and_the_limit_holds_for_each():
    together = threading.Barrier(2)

    def both(request: dict[str, Any]) -> Reply:
        together.wait(timeout=10)
        return echo(request)

    with FakeServer(both) as one, FakeServer(both) as two:
        answers = collected(connected(one, two, concurrency=1, max_retries=0), jobs(10))
    assert [a.finish for a in answers] == ["stop"] * 10
    assert (len(one.requests), len(two.requests)) == (5, 5)
    assert (one.most_in_flight, two.most_in_flight) == (1, 1)


def test_the_least_busy_server_takes_the_next_request():
    together = threading.Barrier(2)

    def both(request: dict[str, Any]) -> Reply:
        together.wait(timeout=10)
        return echo(request)

    with FakeServer(both) as one, FakeServer(both) as two:
        collected(connected(one, two, concurrency=2, max_retries=0), jobs(2))
    assert (len(one.requests), len(two.requests)) == (1, 1)


def test_what_failed_at_one_server_is_tried_at_another():
    with FakeServer(lambda _: Reply(None, fault="drop")) as bad, FakeServer() as good:
        engine = connected(bad, good, concurrency=1, max_retries=0, backoff_s=0.0)
        answers = collected(engine, jobs(6))
    assert [a.finish for a in answers] == ["stop"] * 6
    assert len(bad.requests) == engine.retries["APIConnectionError"] > 0


def test_a_server_that_went_down_is_set_aside_and_its_jobs_are_done_elsewhere():
    with FakeServer() as up, FakeServer() as down:
        engine = connected(down, up, concurrency=2, max_retries=0, backoff_s=60.0)
        assert engine.model == MODEL
        down.stop()
        up.script = lambda request: dataclasses.replace(echo(request), delay=0.01)
        answers = collected(engine, jobs(20))
    assert [a.finish for a in answers] == ["stop"] * 20
    assert up.most_in_flight <= 2
    assert engine.retries == {"APIConnectionError": engine.retries.total()}
    assert engine.retries.total() <= 2


def test_a_server_that_comes_back_is_used_again():
    with FakeServer(in_turn(failure(503, "loading"))) as one, FakeServer() as two:
        slow = dataclasses.replace(echo({"messages": [{"content": ""}]}), delay=0.05)
        two.script = lambda _: slow
        collected(connected(one, two, concurrency=1), jobs(8))
    assert len(one.requests) > 1


# --- failures


def test_two_failures_in_ten_calls_are_retried_and_counted():
    broken = in_turn(failure(500, "oops"), Reply(None, fault="drop"))
    with FakeServer(broken) as server:
        engine = connected(server, concurrency=1)
        answers = collected(engine, jobs(8))
    assert [a.finish for a in answers] == ["stop"] * 8
    assert len(server.requests) == 10
    assert engine.retries == {"InternalServerError": 1, "APIConnectionError": 1}


@pytest.mark.parametrize(
    "bad",
    [
        Reply(completion("x"), fault="cut"),
        Reply("not json"),
        Reply("null"),
        Reply({"choices": []}),
        Reply({"choices": [{"finish_reason": "stop", "message": None}]}),
        Reply(completion("x", token_ids="abc")),
        Reply(completion("x", tool_calls=[{"id": "c"}])),
        Reply(completion("x", tool_calls=7)),
        Reply(completion(5)),  # pyright: ignore[reportArgumentType]
        failure(429, "slow down", retry_after="0"),
        failure(503, "loading"),
    ],
)
def test_what_may_pass_is_tried_again_and_fails_in_the_end(bad: Reply):
    answer, server = ask_one(in_turn(bad, bad))
    assert (answer.finish, len(server.requests)) == ("stop", 3)
    answer, server = ask_one(lambda _: bad, max_retries=1)
    assert (answer.finish, answer.message, len(server.requests)) == ("failed", None, 2)
    assert answer.error
    assert "2 tries" in answer.error
    assert len(answer.error) < 400


@pytest.mark.parametrize("status", [400, 413, 422])
def test_the_requests_own_fault_is_not_tried_again(status: int):
    answer, server = ask_one(in_turn(failure(status, "This model's maximum length is 8")))
    assert (answer.finish, len(server.requests)) == ("failed", 1)
    assert answer.error
    assert f"HTTP {status}: This model's maximum length is 8" in answer.error


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_stops_the_run_and_keeps_the_answers_that_there_are(status: int):
    with FakeServer() as server:
        server.script = lambda r: failure(status, "no such") if asked(r) == "q3" else echo(r)
        running = connected(server, concurrency=1).answers(jobs(9), (), GREEDY)
        kept: list[Answer] = []
        with pytest.raises(UserError, match=rf"{server.url}: HTTP {status}: no such"):
            kept.extend(answer for batch in running for answer in batch)
    assert [a.id for a in kept] == ["q0", "q1", "q2"]


def test_when_no_server_can_be_reached_any_more_the_run_stops_instead_of_failing_every_row():
    with FakeServer() as one, FakeServer() as two:
        engine = connected(one, two, max_retries=1)
        assert engine.model == MODEL
        one.stop()
        two.stop()
        with pytest.raises(UserError, match="no server can be reached any more"):
            collected(engine, jobs(20))


def test_a_request_that_takes_too_long_is_given_up():
    slow = dataclasses.replace(echo({"messages": [{"content": ""}]}), delay=30.0)
    answer, _ = ask_one(lambda _: slow, timeout_s=0.5, max_retries=0)
    assert answer.finish == "failed"
    assert answer.error
    assert "APITimeoutError" in answer.error


def test_pauses_double_up_to_a_minute():
    for times, longest in [(1, 2.0), (2, 4.0), (3, 8.0), (50, 60.0)]:
        assert 0.75 * longest <= pause(ConnectionError(), times, 2.0) <= longest


def test_the_server_says_how_long_to_wait():
    limited = failure(429, "slow down", retry_after="0.2")
    started = time.monotonic()
    answer, _ = ask_one(in_turn(limited), backoff_s=60.0)
    assert 0.2 <= time.monotonic() - started < 10
    assert answer.finish == "stop"


# --- the servers and their models


def test_an_unreachable_server_is_named():
    with FakeServer() as up, FakeServer() as down:
        down.stop()
        engine = connected(up, down, max_retries=0)
        with pytest.raises(UserError, match=f"{down.url} does not tell its models"):
            collected(engine, jobs(1))
    assert up.requests == []


def test_an_unknown_model_is_named_with_those_that_there_are():
    with FakeServer(models=["a", "b"]) as server:
        with pytest.raises(UserError, match=rf"{server.url} has no tiny. It has a, b"):
            collected(connected(server), jobs(1))
        with pytest.raises(UserError, match=r"which of the 2 models .*: a, b"):
            connected(server, model=None).facts()
    assert server.requests == []


def test_without_a_name_the_one_listed_model_is_asked_and_told():
    with FakeServer(models=["served"]) as server:
        engine = connected(server, model=None)
        collected(engine, jobs(1))
        assert engine.facts()["model"] == "served"
    assert server.requests[0]["model"] == "served"


def test_servers_of_different_models_are_refused():
    with FakeServer(models=["a"]) as one, FakeServer(models=["b"]) as two:
        engine = connected(one, two, model=None)
        with pytest.raises(UserError, match=rf"{two.url} has no a. It has b"):
            collected(engine, jobs(1))


@pytest.mark.parametrize("listing", [Reply("<html>"), Reply({"models": []}), Reply([1])])
def test_something_else_at_the_address_is_told(listing: Reply):
    with FakeServer() as server:
        server.listing = listing
        with pytest.raises(UserError, match="not that of an OpenAI server"):
            collected(connected(server), jobs(1))


# --- what is sent


def test_the_thinking_switch_and_template_variables_arrive_at_the_top_level():
    options = ChatOptions(enable_thinking=False, template_kwargs={"style": "terse"})
    with FakeServer() as server:
        collected(connected(server, options=options), jobs(1))
        (request,) = server.requests
        assert request["chat_template_kwargs"] == {"style": "terse", "enable_thinking": False}
        assert "extra_body" not in request
        server.requests.clear()
        collected(connected(server), jobs(1))
    assert "chat_template_kwargs" not in server.requests[0]


def test_greedy_and_sampled_settings_and_tools_arrive():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    hot = Sampling(max_new_tokens=7, temperature=0.8, seed=1)
    with FakeServer() as server:
        engine = connected(server, extra_body={"top_k": -1, "top_p": 1.0})
        collected(engine, [job("a")])
        list(engine.answers([job("b", tools=tools)], (), hot))
    greedy, sampled = server.requests
    assert greedy["messages"] == [{"role": "user", "content": "a"}]
    assert (greedy["model"], greedy["temperature"], greedy["max_tokens"]) == (MODEL, 0.0, 16)
    assert (greedy["top_k"], greedy["top_p"], greedy["return_token_ids"]) == (-1, 1.0, True)
    assert "tools" not in greedy
    assert (sampled["temperature"], sampled["max_tokens"], sampled["tools"]) == (0.8, 7, tools)
    assert engine.target_identity() is None
    assert engine.facts()["request"] == {"return_token_ids": True, "top_k": -1, "top_p": 1.0}


def test_a_null_takes_a_key_out_of_the_request():
    _, server = ask_one(echo, extra_body={"return_token_ids": None})
    assert "return_token_ids" not in server.requests[0]


def test_a_seed_is_that_of_its_id_whatever_is_done_before():
    with FakeServer() as server:
        collected(connected(server), jobs(4))
        first = {asked(r): r["seed"] for r in server.requests}
        server.requests.clear()
        collected(connected(server), jobs(4), {"q0", "q2"})
        second = {asked(r): r["seed"] for r in server.requests}
    assert second == {k: first[k] for k in ("q1", "q3")}
    assert len(set(first.values())) == 4
    assert all(0 <= seed < 2**31 for seed in first.values())
    assert seed_of(0, "q1") != seed_of(1, "q1")
    assert seed_of(0, "q1") == 0x38BD1989  # printf '0 q1' | sha256sum: b8bd1989..., less a bit


def test_the_key_goes_into_the_header_and_nowhere_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_KEY", "sk-secret")
    answer, server = ask_one(
        lambda _: failure(400, "Incorrect key: sk-secret"), api_key_env="FAKE_KEY"
    )
    assert {h["authorization"] for h in server.headers} == {"Bearer sk-secret"}
    engine = connected(server, api_key_env="FAKE_KEY")
    assert "sk-secret" not in f"{answer} {engine.facts()} {server.requests} {engine!r}"
    with pytest.raises(UserError, match=r"bad \*\*\*") as raised:
        ask_one(lambda _: failure(401, "bad sk-secret"), api_key_env="FAKE_KEY")
    assert "sk-secret" not in str(raised.value)


def test_a_missing_key_is_told_before_anything_is_asked():
    with pytest.raises(UserError, match=r"engine\.api_key_env: there is no NO_SUCH_KEY"):
        dataclasses.replace(SETTINGS, api_key_env="NO_SUCH_KEY").connect(
            Chat(None, frozenset()), no_target
        )


def test_calls_go_out_with_text_arguments_and_ids_that_results_point_to():
    def call(name: str, **extra: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": {"x": "é"}}, **extra}

    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call("g", id="mine"), call("f")]},
        {"role": "tool", "content": "of g", "tool_call_id": "mine"},
        {"role": "tool", "content": "of f"},
        {"role": "assistant", "content": "", "tool_calls": [call("h")]},
        {"role": "tool", "content": "of h"},
    ]
    before = json.dumps(messages)
    _, server = ask_one(lambda _: Reply(completion("x")), job("q", messages=messages))
    sent = server.requests[0]["messages"]
    assert json.dumps(messages) == before
    assert sent == to_wire(messages)
    calls = [c for m in sent for c in m.get("tool_calls", [])]
    assert [c["function"]["arguments"] for c in calls] == ['{"x": "é"}'] * 3
    assert [(c["function"]["name"], c["id"]) for c in calls] == [
        ("g", "mine"),
        ("f", "call_0"),
        ("h", "call_1"),
    ]
    results = {m["content"]: m["tool_call_id"] for m in sent if m["role"] == "tool"}
    assert results == {"of g": "mine", "of f": "call_0", "of h": "call_1"}


# --- what comes back


def test_an_answer_that_was_cut_is_told_apart_from_one_that_ended():
    assert ask_one(lambda _: Reply(completion("a b", finish="length")))[0].finish == "length"
    assert ask_one(lambda _: Reply(completion("a b")))[0].finish == "stop"


@pytest.mark.parametrize("reason", ["content_filter", "abort", None])
def test_other_ends_are_failures_with_their_reason(reason: str | None):
    answer, server = ask_one(lambda _: Reply(completion("a", finish=reason)))
    assert (answer.finish, answer.error) == ("failed", f"finish_reason {reason}")
    assert len(server.requests) == 1


@pytest.mark.parametrize("content", ["", None])
def test_an_empty_answer_is_a_failure(content: str | None):
    answer, _ = ask_one(lambda _: Reply(completion(content, token_ids=[])))
    assert (answer.finish, answer.error) == ("failed", "empty answer")


def test_text_that_no_file_can_hold_is_a_failure():
    answer, _ = ask_one(lambda _: Reply(completion("a \ud83d", token_ids=[5])))
    assert answer.finish == "failed"
    answer, _ = ask_one(lambda _: failure(400, "a \ud83d"))
    json.dumps(answer.as_dict(), ensure_ascii=False).encode()


@pytest.mark.parametrize("name", ["token_ids", "response_token_ids"])
def test_token_ids_are_kept_beside_the_message(name: str):
    told = completion("ab", prompt_ids=[1, 2, 3])
    told["choices"][0][name] = [7, 8, 2]
    answer, _ = ask_one(lambda _: Reply(told))
    assert (answer.ids, answer.finish) == ([7, 8, 2], "stop")
    assert answer.message == {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_under_one_name(name: str):
    answer, _ = ask_one(lambda _: Reply(completion("4", **{name: "2 and 2"})))
    assert answer.message == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "2 and 2",
    }


def test_calls_come_back_with_arguments_as_objects():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    told = completion(None, finish="tool_calls", tool_calls=[call])
    answer, _ = ask_one(lambda _: Reply(told))
    assert answer.finish == "stop"
    function = {"name": "f", "arguments": {"x": 1}}
    assert answer.message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def test_arguments_that_are_no_object_fail_unless_the_tokens_are_known():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{x"}}
    answer, server = ask_one(lambda _: Reply(completion(None, tool_calls=[call])))
    assert (answer.finish, len(server.requests)) == ("failed", 1)
    answer, _ = ask_one(lambda _: Reply(completion(None, tool_calls=[call], token_ids=[5, 2])))
    assert (answer.finish, answer.ids) == ("stop", [5, 2])


@pytest.mark.parametrize("theirs", [[1, 2, 9, 3], [1, 2], [1, 2, 3, 4]])
def test_a_prompt_rendered_in_another_way_stops_the_run(theirs: list[int]):
    told = completion("x", prompt_ids=theirs, token_ids=[5])
    at = {4: 3 if theirs[2:3] == [3] else 2, 2: 2}[len(theirs)]
    with pytest.raises(UserError, match=rf"prompt of q in another way: from token {at} "):
        ask_one(lambda _: Reply(told))
    answer, _ = ask_one(lambda _: Reply(told), check_prompt=False)
    assert answer.ids == [5]


def test_a_prompt_told_with_the_choice_is_compared_as_well():
    told = completion("x")
    told["choices"][0]["prompt_token_ids"] = [1, 2, 4]
    with pytest.raises(UserError, match=r"are \[1, 2, 3\] here and \[1, 2, 4\] there"):
        ask_one(lambda _: Reply(told))


# --- settings


def test_the_yaml_gives_every_setting():
    engine = instantiate(OmegaConf.load(Path("conf/engine/openai.yaml")), _convert_="all")
    assert isinstance(engine, OpenAIEngine)
    assert engine.api_key_env is None
    assert engine.extra_body["repetition_penalty"] == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("urls", []),
        ("urls", ["http://a/v1", "http://a/v1"]),
        ("urls", ["localhost:8000"]),
        ("concurrency", 0),
        ("max_retries", -1),
        ("backoff_s", -0.1),
        ("timeout_s", 0.0),
    ],
)
def test_settings_out_of_range_are_named(field: str, value: Any):
    with pytest.raises(UserError, match=rf"engine\.{field}"):
        dataclasses.replace(SETTINGS, **{field: value})
