# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client at a trajectory's address: what it is answered, what is trained, and what is refused.

The policy is a script (scripted_policy.py); tests/e2e/test_agents.py has engines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from scripted_policy import PROMPT, RESPONSE, ScriptedClient, agent_loop, called, check_trained, tokenizer

from recipe.agents import gateway
from recipe.agents.errors import AgentFailed

SAMPLING = {"temperature": 0.7, "top_p": 0.9, "logprobs": True}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
QUESTION = {"role": "user", "content": "What is 1 + 2?"}
Run = Callable[[AsyncOpenAI, dict[str, Any]], Awaitable[Any]]


async def played(client: ScriptedClient, run: Run, **arguments: Any) -> Any:
    """The outputs of an agent loop whose agent is ``run``."""
    loop = agent_loop(client, agent="asyncio.sleep", **arguments)
    loop._agent = run
    return await loop.run(dict(SAMPLING), raw_prompt=[QUESTION])


async def told(reply: Any, stream: bool) -> Any:
    """A streamed or whole answer as one message with its finish reason."""
    if not stream:
        return reply.choices[0].message, reply.choices[0].finish_reason, reply.usage
    text, calls, finish, usage = "", {}, None, None
    async for chunk in reply:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                calls[call.index] = call
    listed = [
        {"id": call.id, "type": "function", "function": call.function.model_dump()} for _, call in sorted(calls.items())
    ]
    more = {"tool_calls": listed} if listed else {}
    return openai.types.chat.ChatCompletionMessage(role="assistant", content=text or None, **more), finish, usage


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_a_tool_is_trained_as_it_was_sampled(stream: bool) -> None:
    client = ScriptedClient(["Let me see.\n" + called("add", a=1, b=2), "It is 3."])

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        messages: list[Any] = [*row["raw_prompt"]]
        asked = {"model": "any", "tools": [ADD], "stream": stream}
        more = {"stream_options": {"include_usage": True}} if stream else {}
        said, finish, usage = await told(
            await policy.chat.completions.create(messages=messages, **asked, **more), stream
        )
        assert finish == "tool_calls"
        assert said.content.strip() == "Let me see."
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        (call,) = said.tool_calls
        numbers = json.loads(call.function.arguments)
        assert (call.function.name, numbers) == ("add", {"a": 1, "b": 2})
        messages += [
            said.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": str(sum(numbers.values()))},
        ]
        said, finish, _ = await told(await policy.chat.completions.create(messages=messages, **asked), stream)
        assert (said.content, finish) == ("It is 3.", "stop")
        return 1.0

    output = await played(client, run)
    check_trained(client, output)
    assert output.reward_score == 1.0
    assert output.extra_fields["agent_unmatched_share"] == 0.0
    # The call stands there with the policy's own spaces, and the template's words follow.
    response = tokenizer().decode(output.response_ids)
    assert response.startswith('Let me see.\n<tool_call>\n{"name":"add","arguments": {\n "a": 1,\n "b": 2\n}}')
    assert "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>" in response
    assert client.requests[1]["text"] == tokenizer().decode(output.prompt_ids) + response.removesuffix(
        "It is 3.<|im_end|>"
    )
    assert client.requests[0]["sampling"] == {**SAMPLING, "max_tokens": RESPONSE}


async def test_answers_to_one_prompt_stop_words_and_log_probs() -> None:
    client = ScriptedClient(["a STOP b", "c", "d STOP", "e"])

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        asked = {"model": "any", "messages": [QUESTION]}
        reply = await policy.chat.completions.create(n=3, stop=["STOP"], logprobs=True, **asked)
        assert [choice.message.content for choice in reply.choices] == ["a ", "c", "d "]
        assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 3
        shown = reply.choices[0].logprobs.content
        assert "".join(each.token for each in shown) == "a STOP"
        assert [each.logprob for each in shown] == client.sampled[0][2]
        reply = await policy.chat.completions.create(max_completion_tokens=1, **asked)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("e", "length")
        return 0.0

    outputs = await played(client, run)
    assert len(outputs) == 4
    check_trained(client, outputs)


async def test_rewritten_histories_are_context_and_counted() -> None:
    client = ScriptedClient(["one", "two", "three", "four"])

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> dict[str, Any]:
        async def ask(*messages: Any) -> Any:
            return (await policy.chat.completions.create(model="any", messages=messages)).choices[0].message

        first = await ask(QUESTION)
        again = {"role": "user", "content": "And?"}
        second = await ask(QUESTION, first, again)
        # A summary in place of the first answer; and the first turn cut away.
        await ask(QUESTION, {"role": "assistant", "content": "It said one."}, again, second, again)
        await ask(again, second, again)
        return {"reward": 0.5, "turns": 4}

    outputs = await played(client, run)
    check_trained(client, outputs)
    assert [sum(output.response_mask) for output in outputs] == [len("one") + len("two") + 2, len("three") + 1, 5]
    assert {output.reward_score for output in outputs} == {0.5}
    assert outputs[0].extra_fields["reward_extra_info"] == {"turns": 4}
    # Of the policy's answers that came back, one was found, and three were not.
    assert outputs[0].extra_fields["agent_unmatched_share"] == 3 / 4


async def test_requests_at_once_and_branches_train_each_token_once() -> None:
    client = ScriptedClient(lambda text: f"{len(text)}", seconds=0.05)

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        async def ask(*messages: Any) -> Any:
            return (await policy.chat.completions.create(model="any", messages=messages)).choices[0].message

        first = await ask(QUESTION)
        others = [{"role": "user", "content": text} for text in ("a", "b", "a")]
        seconds = await asyncio.gather(*[ask(QUESTION, first, other) for other in others])
        await asyncio.gather(*[ask(QUESTION, first, o, s, o) for o, s in zip(others, seconds, strict=True)])
        return 0.0

    outputs = await played(client, run)
    check_trained(client, outputs)
    assert len(outputs) == 3


async def test_what_an_agent_gives_up_waiting_for_is_cancelled_and_not_trained() -> None:
    client = ScriptedClient(["late", "left", "in time"], seconds=60.0)

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        asked = {"model": "any", "messages": [QUESTION]}
        with pytest.raises(openai.APITimeoutError):
            await policy.chat.completions.create(timeout=3.0, **asked)
        stream = await policy.chat.completions.create(stream=True, **asked)
        await stream.close()
        while client.cancelled < 2:
            await asyncio.sleep(0.01)
        client._seconds = 0.0
        reply = await policy.chat.completions.create(**asked)
        assert reply.choices[0].message.content == "in time"
        return 0.0

    output = await played(client, run, deadline_s=30.0)
    check_trained(client, output)


async def test_completions_go_on_from_the_tokens_that_were_sampled() -> None:
    client = ScriptedClient([" think\nObservation: none", "done"])

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        prompt = "Question: 1 + 2\nThought:"
        asked = {"model": "any", "stop": "Observation:"}
        first = await policy.completions.create(prompt=prompt, logprobs=1, **asked)
        assert first.choices[0].text == " think\n"
        assert first.choices[0].logprobs.token_logprobs == client.sampled[0][2]
        prompt += first.choices[0].text + "Observation: 3\n"
        stream = await policy.completions.create(prompt=prompt, stream=True, **asked)
        assert [chunk.choices[0].text async for chunk in stream] == ["done"]
        return 0.0

    output = await played(client, run)
    check_trained(client, output)
    assert client.requests[1]["text"] == "Question: 1 + 2\nThought: think\nObservation: 3\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_a_tool_go_on_by_items_or_by_id(stream: bool) -> None:
    client = ScriptedClient([called("add", a=1, b=2), "3", "Sure."])
    tool = {**ADD["function"], "type": "function"}

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        async def respond(**more: Any) -> Any:
            asked = {"model": "any", "tools": [tool], "instructions": "Be brief."}
            if not stream:
                return await policy.responses.create(**asked, **more)
            async with policy.responses.stream(**asked, **more) as events:
                kinds = [event.type async for event in events]
                assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
                return await events.get_final_response()

        first = await respond(input="1 + 2?")
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1, "b": 2})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        items = [{"role": "user", "content": "1 + 2?"}, call.model_dump(exclude_none=True), result]
        second = await respond(input=items)
        assert (second.output_text, second.status) == ("3", "completed")
        third = await respond(input="Sure?", previous_response_id=second.id)
        assert third.output_text == "Sure."
        return 0.0

    output = await played(client, run)
    check_trained(client, output)
    assert output.extra_fields["agent_unmatched_share"] == 0.0


async def test_models_are_listed() -> None:
    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        assert [model.id async for model in policy.models.list()] == ["policy"]
        assert (await policy.models.retrieve("any")).id == "any"
        await policy.chat.completions.create(model="any", messages=[QUESTION])
        return 0.0

    check_trained(client := ScriptedClient(["x"]), await played(client, run))


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({"messages": []}, 400, "invalid_value"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * PROMPT * 2}]}, 400, "context_length_exceeded"),
        ({"n": 0.5}, 400, "invalid_value"),
        ({"tools": [{"type": "function"}]}, 400, "invalid_value"),
        ({"max_tokens": "many"}, 400, "invalid_value"),
        ({"logit_bias": {"1": 5}}, 400, "unsupported_parameter"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, 400, "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_value"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
                ]
            },
            400,
            None,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_answered_is_refused_in_openais_form(
    asked: dict[str, Any], status: int, code: str | None, stream: bool
) -> None:
    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        with pytest.raises(openai.APIStatusError) as refused:
            await policy.chat.completions.create(
                **{"model": "any", "messages": [QUESTION], "stream": stream, **asked}  # type: ignore[arg-type]
            )
        assert (refused.value.status_code, refused.value.code) == (status, code)
        assert refused.value.type == "invalid_request_error"
        await policy.chat.completions.create(model="any", messages=[QUESTION])
        return 0.0

    client = ScriptedClient(["x"])
    check_trained(client, await played(client, run))


async def test_an_agent_that_fails_for_want_of_room_gets_a_reward_if_there_is_one() -> None:
    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> None:
        messages: list[Any] = [QUESTION]
        while True:
            reply = await policy.chat.completions.create(model="any", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "y" * 500}]

    client = ScriptedClient(lambda text: "x" * 700)
    output = await played(client, run, overlong_reward=-1.0)
    check_trained(client, output)
    assert (output.reward_score, len(output.response_ids) > RESPONSE - 600) == (-1.0, True)
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        await played(ScriptedClient(lambda text: "x" * 700), run)


async def test_a_failure_of_the_engines_is_the_trajectorys_though_the_agent_goes_on() -> None:
    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        for stream in (False, True):
            with pytest.raises(openai.APIError):
                reply = await policy.chat.completions.create(model="any", messages=[QUESTION], stream=stream)
                [chunk async for chunk in reply]
        return 1.0

    with pytest.raises(RuntimeError, match="no server is left"):
        await played(ScriptedClient([RuntimeError("no server is left")] * 2), run)


async def test_an_address_answers_to_its_key_alone_and_not_after_its_end() -> None:
    addresses: list[tuple[str, str]] = []

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        addresses.append((str(policy.base_url), policy.api_key))
        assert addresses[-1][0].startswith("http://127.0.0.1:")
        if len(addresses) == 2:
            (first, first_key), (second, second_key) = addresses
            for address, key in (
                (first, second_key),
                (second, first_key),
                (first, ""),
                (first[:-5] + "0/v1/", first_key),
            ):
                other = AsyncOpenAI(base_url=address, api_key=key or "none", max_retries=0)
                with pytest.raises(openai.AuthenticationError):
                    await other.chat.completions.create(model="any", messages=[QUESTION])
                with pytest.raises(openai.AuthenticationError):
                    await other.models.list()
        await policy.chat.completions.create(model="any", messages=[QUESTION])
        while len(addresses) < 2:
            await asyncio.sleep(0.01)
        return 0.0

    client = ScriptedClient(["x", "y"])
    await asyncio.gather(played(client, run), played(client, run))
    assert len(client.sampled) == 2
    for address, key in addresses:
        with pytest.raises(openai.AuthenticationError):
            await AsyncOpenAI(base_url=address, api_key=key, max_retries=0).models.list()


async def test_bodies_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "BODY_BYTES", 1000)
    monkeypatch.setattr(gateway, "BODY_S", 0.2)

    async def endless() -> Any:
        yield b'{"a": '
        await asyncio.sleep(5)

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        headers = {"Authorization": f"Bearer {policy.api_key}"}
        async with httpx.AsyncClient(base_url=str(policy.base_url), headers=headers) as http:
            for content, status in ((b"x" * 1001, 413), (endless(), 408), (b"{", 400), (b"[]", 400), (b"[" * 999, 400)):
                reply = await http.post("chat/completions", content=content)
                assert (reply.status_code, set(reply.json()["error"])) == (
                    status,
                    {"message", "type", "param", "code"},
                )
            assert (await http.get("files")).status_code == 404
            assert (await http.get("chat/completions")).status_code == 405
        await policy.chat.completions.create(model="any", messages=[QUESTION])
        return 0.0

    await played(ScriptedClient(["x"]), run)


async def test_a_deadline_ends_the_agent_and_its_requests() -> None:
    client = ScriptedClient(["x"], seconds=30)

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> None:
        await policy.chat.completions.create(model="any", messages=[QUESTION])

    with pytest.raises(AgentFailed, match="deadline_s=3"):
        await played(client, run, deadline_s=3.0)
    assert client.cancelled == 1


async def test_an_agent_that_asks_nothing_or_returns_nonsense_fails() -> None:
    async def silent(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        return 1.0

    async def odd(policy: AsyncOpenAI, row: dict[str, Any]) -> Any:
        await policy.chat.completions.create(model="any", messages=[QUESTION])
        return "good"

    with pytest.raises(AgentFailed, match="without an answer"):
        await played(ScriptedClient([]), silent)
    with pytest.raises(AgentFailed, match="not a number"):
        await played(ScriptedClient(["x"]), odd)


async def test_requests_belong_to_their_trajectory_and_do_not_see_each_other() -> None:
    """The client of a run finds the trajectory's record in its context, and marks each request there."""
    trajectory: ContextVar[str] = ContextVar("trajectory")
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: list[tuple[str, str]] = []

    class Watching(ScriptedClient):
        async def generate(self, request_id: str, **asked: Any) -> Any:
            seen.append((trajectory.get(), request.get()))
            request.set("another")
            return await super().generate(request_id, **asked)

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        await asyncio.gather(*[policy.chat.completions.create(model="any", messages=[QUESTION]) for _ in range(2)])
        await policy.chat.completions.create(model="any", messages=[QUESTION])
        return 0.0

    async def of(name: str) -> None:
        trajectory.set(name)
        await played(Watching(["x"] * 3), run)

    async with asyncio.TaskGroup() as tasks:
        for name in ("first", "second"):
            tasks.create_task(of(name))
    assert sorted(seen) == [("first", "none")] * 3 + [("second", "none")] * 3


async def test_so_many_agents_run_at_once() -> None:
    running, most = 0, 0

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await policy.chat.completions.create(model="any", messages=[QUESTION])
        running -= 1
        return 0.0

    client = ScriptedClient(["x"] * 6, seconds=0.02)
    await asyncio.gather(*[played(client, run, at_once=2) for _ in range(6)])
    assert most == 2


async def test_agents_that_block_more_threads_than_python_has_are_answered() -> None:
    agents, policies = 40, OpenAI(api_key="another for each", max_retries=0, timeout=30.0)

    def blocking(address: str, key: str) -> float:
        policy = policies.with_options(base_url=address, api_key=key)
        said = policy.chat.completions.create(model="any", messages=[QUESTION], tools=[ADD]).choices[0].message
        return float(json.loads(said.tool_calls[0].function.arguments)["a"])

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        return await asyncio.to_thread(blocking, str(policy.base_url), policy.api_key)

    asked = [played(ScriptedClient([called("add", a=number)], seconds=0.5), run) for number in range(agents)]
    assert [output.reward_score for output in await asyncio.gather(*asked)] == list(range(agents))


async def test_reasoning_is_told_apart_and_may_be_left_out_when_sent_back() -> None:
    client = ScriptedClient(["<think>hm</think>3", "4"])

    async def run(policy: AsyncOpenAI, row: dict[str, Any]) -> float:
        reply = await policy.chat.completions.create(model="any", messages=[QUESTION])
        said = reply.choices[0].message
        assert (said.content, said.reasoning_content) == ("3", "hm")
        messages = [QUESTION, {"role": "assistant", "content": "3"}, QUESTION]
        await policy.chat.completions.create(model="any", messages=messages)
        return 0.0

    output = await played(client, run, reasoning="deepseek_r1")
    check_trained(client, output)
    assert "<think>hm</think>3<|im_end|>" in client.requests[1]["text"]
