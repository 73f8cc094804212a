"""Sessions of the SDKs are conversations: turns, with the tokens that the SDK has kept."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.inspector.activity import Tokens
from tests.inspector.conftest import client, connected
from tests.inspector.test_pages import get

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def turns(page: Any) -> list[tuple[int, list[tuple[str, str]], Tokens]]:
    """Return each turn's number, what was said in it, and its tokens."""
    found: list[tuple[int, list[tuple[str, str]], Tokens]] = []
    for item in page["items"]:
        if item["turn"] is not None:
            turn = item["turn"]
            found.append((turn["number"], [], Tokens(**turn["tokens"])))
        found[-1][1].append((item["role"], item["parts"][0]["text"]))
    return found


async def test_a_conversation_of_pydantic_ai() -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.models.test import TestModel

    from perdure.adapters import PerdureConversationStore

    agent = Agent(TestModel(custom_output_text="At noon."))
    async with connected() as sessions, client(sessions) as http:
        store = PerdureConversationStore(sessions)
        for _ in range(2):
            conversation = await store.load("ada") or Conversation(conversation_id="ada")
            result = await agent.run("When is low tide?", conversation=conversation)
            await store.save(result)
        page = await get(http, "/session", agent="ada")
    said = [("user", "When is low tide?"), ("assistant", "At noon.")]
    first, second = turns(page)
    assert (first[1], second[1]) == (said, said)
    assert first[2].input > 0
    assert first[2].output > 0
    assert page["head"]["status"]["name"] == "idle"


async def test_a_session_of_the_adk() -> None:
    pytest.importorskip("google.adk")
    from google.adk.agents import LlmAgent
    from google.adk.models import BaseLlm, LlmResponse
    from google.adk.models.base_llm import LlmCapabilities
    from google.adk.runners import Runner
    from google.genai import types

    from perdure.adapters import PerdureSessionService

    class Noon(BaseLlm):
        @property
        def capabilities(self) -> LlmCapabilities:
            return LlmCapabilities(output_schema_and_tools=False)

        async def generate_content_async(self, llm_request: Any, stream: bool = False) -> Any:
            yield LlmResponse(
                content=types.Content(role="model", parts=[types.Part(text="At noon.")]),
                usage_metadata=types.GenerateContentResponseUsageMetadata(
                    prompt_token_count=7, candidates_token_count=3
                ),
            )

    async with connected() as sessions, client(sessions) as http:
        service = PerdureSessionService(sessions)
        await service.create_session(app_name="harbor", user_id="ada", session_id="tides")
        agent = LlmAgent(name="pilot", model=Noon(model="noon"))
        runner = Runner(app_name="harbor", agent=agent, session_service=service)
        question = types.Content(role="user", parts=[types.Part(text="When?")])
        for _ in range(2):
            async for _event in runner.run_async(
                user_id="ada", session_id="tides", new_message=question
            ):
                pass
        await sessions.flush()
        (listed,) = (await get(http, "/"))["sessions"]
        page = await get(http, "/session", **listed["key"])
    said = [("user", "When?"), ("assistant", "At noon.")]
    assert [turn[1:] for turn in turns(page)] == [(said, Tokens(7, 3))] * 2
    assert page["head"]["status"]["name"] == "idle"


async def test_a_session_of_openais() -> None:
    pytest.importorskip("agents")
    from perdure.adapters import PerdureSession

    async with connected() as sessions, client(sessions) as http:
        async with PerdureSession("ada", sessions) as session:
            for _ in range(2):
                await session.add_items([{"role": "user", "content": "When?"}])
                await session.add_items([{"role": "assistant", "content": "At noon."}])
        page = await get(http, "/session", agent="ada")
    assert [turn[1] for turn in turns(page)] == [[("user", "When?"), ("assistant", "At noon.")]] * 2
    assert page["head"]["status"]["name"] == "idle"
