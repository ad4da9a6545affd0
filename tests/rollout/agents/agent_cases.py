"""Agents of tests, each by the name of its case: what clients see of the endpoint."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

import httpx
from agent_models import ADD, QUESTION, SCHEMA

HI = [{"role": "user", "content": "hi"}]


async def play(row: dict[str, Any], **told: Any) -> Any:
    return await CASES[row["extra_info"]["case"]](**told)


async def openai_chat(base_url: str, api_key: str, model: str, **_: Any) -> Any:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    asked: list[Any] = [QUESTION]
    first = await client.chat.completions.create(
        model=model, messages=asked, tools=[ADD], temperature=0.9
    )
    said = first.choices[0].message
    (call,) = said.tool_calls or []
    asked += [said.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    second = await client.chat.completions.create(
        model=model, messages=asked, tools=[ADD], logprobs=True
    )
    parts, usage = [], None
    stream = await client.chat.completions.create(
        model=model, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        parts += [c.delta.content for c in chunk.choices if c.delta.content]
    calls: list[Any] = []
    stream = await client.chat.completions.create(
        model=model, messages=[QUESTION], tools=[ADD], stream=True
    )
    async for chunk in stream:
        calls += [call for c in chunk.choices for call in c.delta.tool_calls or []]
    both = await client.chat.completions.create(
        model=model, messages=HI, n=2, max_tokens=4, extra_body={"return_token_ids": True}
    )
    seeded = [
        await client.chat.completions.create(model=model, messages=HI, seed=5, stop=["day"])
        for _ in range(2)
    ]
    models = [each.id async for each in client.models.list()]
    models.append((await client.models.retrieve(model)).id)
    logprobs = second.choices[0].logprobs
    return {
        "call": [call.function.name, json.loads(call.function.arguments)],
        "finish": [first.choices[0].finish_reason, second.choices[0].finish_reason],
        "answer": second.choices[0].message.content,
        "logprobs": [[each.token, each.logprob] for each in (logprobs and logprobs.content) or []],
        "streamed": "".join(parts), "usage": usage and usage.completion_tokens,
        "streamed_call": [calls[0].function.name, json.loads(calls[0].function.arguments)],
        "both": [[c.message.content, c.finish_reason, c.token_ids] for c in both.choices],  # type: ignore[attr-defined]
        "seeded": [each.choices[0].message.content for each in seeded], "models": models,
    }  # fmt: skip


async def anthropic(anthropic_base_url: str, api_key: str, model: str, **_: Any) -> Any:
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=anthropic_base_url, api_key=api_key, max_retries=0)
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    asked: list[Any] = [QUESTION]
    first = await client.messages.create(model=model, messages=asked, max_tokens=99, tools=tools)
    (use,) = first.content
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "5"}],
    }
    asked += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = await client.messages.create(model=model, messages=asked, max_tokens=99, tools=tools)
    async with client.messages.stream(model=model, messages=HI, max_tokens=4) as stream:
        text = "".join([part async for part in stream.text_stream])
        ended = await stream.get_final_message()
    async with client.messages.stream(
        model=model, messages=[QUESTION], max_tokens=99, tools=tools
    ) as stream:
        streamed = await stream.get_final_message()
    counted = await client.messages.count_tokens(model=model, messages=HI)
    cut = await client.messages.create(
        model=model, messages=HI, max_tokens=99, stop_sequences=["you", "day"]
    )
    return {
        "cut": [cut.stop_reason, cut.stop_sequence, cut.content[0].text],
        "call": [use.name, use.input], "answer": second.content[0].text,
        "counted": counted.input_tokens,
        "stops": [first.stop_reason, second.stop_reason, ended.stop_reason, streamed.stop_reason],
        "streamed": text, "streamed_call": [streamed.content[0].name, streamed.content[0].input],
        "usage": second.usage.output_tokens,
    }  # fmt: skip


async def responses(base_url: str, api_key: str, model: str, **_: Any) -> Any:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    tool: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
    first = await client.responses.create(model=model, input="2+3", tools=[tool])
    (call,) = first.output
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    second = await client.responses.create(
        model=model, input=[output], tools=[tool], previous_response_id=first.id
    )
    items: list[Any] = [*QUESTION_ITEMS, call.model_dump(), output]
    async with client.responses.stream(model=model, input=items, tools=[tool]) as stream:
        kinds = [event.type async for event in stream]
        third = await stream.get_final_response()
    given: dict[str, Any] = {"model": model, "input": "hi", "max_output_tokens": 1}
    asked = [{"type": None, "role": "developer", "content": "d"}, *HI]
    begun = await client.responses.create(**given | {"input": asked}, instructions="be")
    plain = await client.responses.create(**given, previous_response_id=begun.id)
    again = await client.responses.create(
        **given, previous_response_id=plain.id, instructions="short"
    )
    return {
        "prompts": [each.usage and each.usage.input_tokens for each in (begun, plain, again)],
        "call": [call.name, json.loads(call.arguments)], "answer": second.output_text,
        "again": third.output_text, "kinds": kinds,
    }  # fmt: skip


QUESTION_ITEMS = [{"type": "message", "role": "user", "content": "2+3"}]


async def texts(base_url: str, api_key: str, model: str, trajectory_id: str, **_: Any) -> Any:
    """By the header and not by the path; a prompt as text, then as text that goes on, as tokens."""
    from openai import AsyncOpenAI

    url = base_url.partition("/t/")[0] + "/v1"
    client = AsyncOpenAI(
        base_url=url, api_key=api_key, default_headers={"X-Trajectory-Id": trajectory_id}
    )
    first = await client.completions.create(
        model=model, prompt="uhi:", logprobs=0, max_tokens=4,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    said = first.choices[0].text
    second = await client.completions.create(model=model, prompt=f"uhi:{said}", max_tokens=4)
    ids = first.prompt_token_ids + first.choices[0].token_ids  # type: ignore[attr-defined]
    third = await client.completions.create(model=model, prompt=ids, max_tokens=4, echo=True)
    stream = await client.completions.create(
        model=model, prompt="uhi:", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    streamed = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == len("uhi:")
    return [said, second.choices[0].text, third.choices[0].text, streamed]


async def errors(base_url: str, api_key: str, model: str, **_: Any) -> Any:
    good = {"model": model, "messages": HI}
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    bodies: dict[str, Any] = {
        "unknown model": good | {"model": "gpt-5"},
        "no messages": {"model": model},
        "empty": good | {"messages": []},
        "a role that is a number": good | {"messages": [{"role": 1, "content": "x"}]},
        "a template": good | {"chat_template_kwargs": {"chat_template": "{{ x }}"}},
        "an image": good | {"messages": [{"role": "user", "content": image}]},
        "a format": good | {"response_format": {"type": "json_object"}},
        "a forced call": good | {"tools": [ADD], "tool_choice": "required"},
        "a bias": good | {"logit_bias": {"5": 100}},
        "too many": good | {"n": 1000},
        "no tokens": good | {"max_tokens": 0},
        "an answer begun": good | {"messages": [*HI, {"role": "assistant", "content": "well"}]},
        "many stops": good | {"stop": ["x"] * 99},
        "a prompt that is too long": good | {"messages": [{"role": "user", "content": "a" * 500}]},
    }
    found = {}
    key = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(timeout=60) as client:

        async def post(url: str, **given: Any) -> list[Any]:
            answer = await client.post(url, **given)
            error = answer.json()["error"]
            return [answer.status_code, error.get("code"), error["message"]]

        url = f"{base_url}/chat/completions"
        for name, body in bodies.items():
            found[name] = await post(url, json=body, headers=key)
        found["wrong key"] = await post(url, json=good, headers={"authorization": "Bearer x"})
        found["no key"] = await post(url, json=good)
        found["no JSON"] = await post(url, content=b"{", headers=key)
        found["a list"] = await post(url, content=b"[]", headers=key)
        found["huge"] = await post(url, content=b"x" * (1 << 21), headers=key)
        root = base_url.partition("/t/")[0]
        found["unknown trajectory"] = await post(
            f"{root}/t/none/v1/chat/completions", json=good, headers=key
        )
        found["no trajectory"] = await post(f"{root}/v1/chat/completions", json=good, headers=key)
        found["anthropic"] = await post(
            f"{base_url}/messages", json=good, headers={"x-api-key": api_key}
        )
        for name, body in {
            "a huge token": {"prompt": [10**30]}, "the best": {"prompt": "hi", "best_of": 3},
            "an echo with logprobs": {"prompt": "hi", "echo": True, "logprobs": 0},
            "a huge text": {"prompt": "a" * 1_000_000},
        }.items():  # fmt: skip
            found[name] = await post(f"{base_url}/completions", json=body, headers=key)
        found["several responses"] = await post(
            f"{base_url}/responses", json={"input": "hi", "n": 2}, headers=key
        )
        deep = {"function": {"name": "add", "arguments": '{"a":' * 600 + "1" + "}" * 600}}
        chat = [*HI, {"role": "assistant", "tool_calls": [deep]}, *HI]
        found["deep arguments"] = await post(url, json=good | {"messages": chat}, headers=key)
        utf_16 = '{"messages": [{"role": "user", "content": "h\ud800"}]}'
        found["half a character in UTF-16"] = await post(
            url, content=utf_16.encode("utf-16-le", "surrogatepass"), headers=key
        )
        found["no such path"] = await post(f"{base_url}/embeddings", json=good, headers=key)
        answer = await client.get(url, headers=key)
        found["another method"] = [answer.status_code, answer.json()["error"]["code"]]
        answer = await client.get(f"{base_url}/models/gpt-5", headers=key)
        found["another model"] = [answer.status_code, answer.json()["error"]["code"]]
        both = {"authorization": "Bearer of another service", "x-api-key": api_key}
        answer = await client.post(url, json=good | {"max_tokens": 1}, headers=both)
        assert answer.status_code == 200, answer.text
        half = json.dumps(good | {"messages": [{"role": "user", "content": "h\ud800"}]})
        answer = await client.post(url, content=half.encode(), headers=key)
        assert answer.status_code == 200, answer.text
        for turn in range(20):
            answer = await client.post(url, json=good | {"max_tokens": 1}, headers=key)
            if answer.status_code != 200:
                error = answer.json()["error"]
                found["many turns"] = [answer.status_code, error["code"], turn]
                break
    return found


async def ask_and_leave(url: str, api_key: str, body: dict[str, Any]) -> None:
    """Closes the connection behind the request. The kernel sends both at once, so that nobody can
    have answered between them.
    """
    where, sent = urlsplit(url), json.dumps(body)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    head = [f"POST {where.path} HTTP/1.1", "Host: here", f"Authorization: Bearer {api_key}",
            "Content-Type: application/json", f"Content-Length: {len(sent)}"]  # fmt: skip
    writer.write("\r\n".join([*head, "", sent]).encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def hangs_up(base_url: str, api_key: str, model: str, **_: Any) -> Any:
    """Gives as many requests up as it has turns, then asks the same: what nobody has read is no
    row, and no turn.
    """
    key = {"authorization": f"Bearer {api_key}"}
    body = {"model": model, "messages": HI}
    url = f"{base_url}/chat/completions"
    for stream in (False, True) * 5:
        await ask_and_leave(url, api_key, body | {"stream": stream})
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(url, json=body, headers=key)
    return answer.json()["choices"][0]["message"]["content"]


async def sub_agents(base_url: str, api_key: str, model: str, **_: Any) -> Any:
    """Three at once, one of which goes on."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    talks: list[list[Any]] = [HI, [QUESTION], [*HI, *HI]]
    answers = await asyncio.gather(
        *(client.chat.completions.create(model=model, messages=m, max_tokens=9) for m in talks)
    )
    said = answers[0].choices[0].message.model_dump(exclude_none=True)
    last = await client.chat.completions.create(
        model=model, messages=[*HI, said, *HI], max_tokens=9
    )
    return {"score": 2.0, "turns": {answers[0].id: 0.5, answers[1].id: 0.25, last.id: 3.0}}


async def asks_long(base_url: str, api_key: str, model: str, **_: Any) -> Any:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    answer = await client.chat.completions.create(
        model=model, messages=[*HI, *HI, *HI], max_tokens=40
    )
    return {"score": 1.0, "text": answer.choices[0].message.content}


async def rewards_another(base_url: str, api_key: str, model: str, **_: Any) -> Any:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model=model, messages=HI, max_tokens=2)
    return {"score": 1.0, "turns": {"chatcmpl-5": 1.0}}


async def never_asks(**_: Any) -> float:
    return 1.0


async def fails(**_: Any) -> float:
    raise LookupError("no such thing")


async def leaves_its_key(base_url: str, api_key: str, model: str, **_: Any) -> Any:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model=model, messages=HI, max_tokens=2)
    return {"score": 0.0, "told": [base_url, api_key]}


def asks_plainly(base_url: str, api_key: str, model: str, sample_index: int) -> Any:
    """A function that blocks, by OpenAI's client for them."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        said = client.chat.completions.create(model=model, messages=HI).choices[0].message
        chat: list[Any] = [*HI, said.model_dump(exclude_none=True), *HI]
        client.chat.completions.create(model=model, messages=chat, max_tokens=3)
    if sample_index == 1:
        raise LookupError("behind two turns")
    return {"score": 0.5, "said": said.content}


PROGRAM = """import json, os, sys, urllib.request as web
key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(web.urlopen(web.Request(url, json.dumps(body).encode(), key)))
print(json.dumps({"said": answer["choices"][0]["message"]["content"], "score": 1}))
"""
AGENTS = {
    "async": play, "plain": asks_plainly,
    "program": [sys.executable, "-c", PROGRAM.replace("{", "{{").replace("}", "}}"), "{prompt}"],
}  # fmt: skip
CASES = {
    f.__name__: f
    for f in (openai_chat, anthropic, responses, texts, errors, hangs_up, sub_agents, never_asks,
              fails, leaves_its_key, rewards_another, asks_long)
}  # fmt: skip
