"""Google ADK with its sessions in perdure: each run of this program continues the conversation.

    python examples/google_adk.py "When is low tide in Oosthaven?"
    python examples/google_adk.py --rewind     takes the last question back

The model is a scripted one, so it needs no key: put yours in its place, `model="gemini-…"`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.models.base_llm import LlmCapabilities
from google.adk.runners import Runner
from google.adk.tools import ToolContext
from google.genai import types

import perdure
from perdure.adapters import PerdureSessionService

APP, USER, SESSION = "harbor", "ada", "tides"


def tide(harbor: str, tool_context: ToolContext) -> dict[str, str]:
    """Say when the tide is low."""
    tool_context.state["user:looked_up"] = tool_context.state.get("user:looked_up", 0) + 1
    return {"low": f"noon in {harbor}"}


class Script(BaseLlm):
    """A model that calls the tool once, and answers with what it said."""

    model: str = "script"

    @property
    def capabilities(self) -> LlmCapabilities:
        return LlmCapabilities(output_schema_and_tools=False)

    async def generate_content_async(
        self,
        llm_request: LlmRequest,
        stream: bool = False,  # noqa: FBT001, FBT002  # the SDK's
    ) -> AsyncGenerator[LlmResponse, None]:
        asked = [content.parts[0] for content in llm_request.contents if content.parts]
        if asked[-1].function_response is None:
            call = types.FunctionCall(name="tide", args={"harbor": "Oosthaven"})
            part = types.Part(function_call=call)
        else:
            questions = [part for part in asked if part.text and part.text.endswith("?")]
            part = types.Part(text=f"Low at noon. You have asked {len(questions)} questions.")
        usage = types.GenerateContentResponseUsageMetadata(prompt_token_count=len(asked))
        content = types.Content(role="model", parts=[part])
        yield LlmResponse(content=content, usage_metadata=usage)


async def main(text: str) -> None:
    agent = LlmAgent(name="pilot", model=Script(), tools=[tide])
    async with perdure.connect() as sessions:
        service = PerdureSessionService(sessions)
        runner = Runner(
            app_name=APP, agent=agent, session_service=service, auto_create_session=True
        )
        if text == "--rewind":
            session = await service.get_session(app_name=APP, user_id=USER, session_id=SESSION)
            if session is not None:
                last = session.events[-1].invocation_id
                await runner.rewind_async(
                    user_id=USER, session_id=SESSION, rewind_before_invocation_id=last
                )
            return
        question = types.Content(role="user", parts=[types.Part(text=text)])
        async for event in runner.run_async(user_id=USER, session_id=SESSION, new_message=question):
            if event.is_final_response() and event.content and event.content.parts:
                print(event.content.parts[0].text)
        state = await service.get_user_state(app_name=APP, user_id=USER)
        print(f"Looked up for {USER}: {state['looked_up']}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "When is low tide?"))
