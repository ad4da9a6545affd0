"""An agent that shows images to the policy, in a module that worker processes import at once."""

from __future__ import annotations

import base64
from typing import Any

from tiny_models import png


def uri(seed: int, width: int, height: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed, width, height)).decode()


def image(seed: int, width: int = 16, height: int = 8) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(seed, width, height)}}


async def shows(messages: list[Any], base_url: str, api_key: str, model: str) -> Any:
    """Asks about the row's image and goes on with a larger one, asks the first again about another
    image of the same size, then by the two other APIs.
    """
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI, BadRequestError

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    async def ask(said: list[Any]) -> str:
        answer = await client.chat.completions.create(model=model, messages=said, max_tokens=6)
        return answer.choices[0].message.content or ""

    first = await ask(messages)
    more = [{"type": "text", "text": "and"}, image(1, 24, 16), {"type": "text", "text": "?"}]
    chat = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": more}]
    await ask(chat)
    await ask([{"role": "user", "content": [image(5)]}])
    await ask([{"role": "user", "content": [image(6)]}])
    await client.responses.create(
        model=model, max_output_tokens=4,
        input=[{"role": "user", "content": [{"type": "input_image", "detail": "auto",
                                             "image_url": uri(7, 8, 8)}]}],
    )  # fmt: skip
    file = {"type": "base64", "media_type": "image/png",
            "data": base64.b64encode(png(8, 8, 16)).decode()}  # fmt: skip
    other = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    shown: Any = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f",
                                           "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [
            {"type": "text", "text": "t"}, {"type": "image", "source": file}]}]},
    ]  # fmt: skip
    await other.messages.create(model=model, max_tokens=4, messages=shown)
    problems = []
    for wrong in (
        [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}],
        [image(0, 64, 32)], [image(i, 8, 8) for i in range(4)],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}],
    ):  # fmt: skip
        try:
            await ask([{"role": "user", "content": wrong}])
        except BadRequestError as error:
            problems.append(error.body["message"])  # type: ignore[index]
    return {"score": 1.0, "problems": problems}
