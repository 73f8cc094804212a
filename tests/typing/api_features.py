"""What an agent keeps with its session beside the conversation, as users would use it."""

from __future__ import annotations

from typing import Any, assert_type

from perdure import SessionManager, export_state, import_state
from perdure.agent import (
    AgentConfig,
    Features,
    InContextMemory,
    Permissions,
    PersistentInstructions,
    ScriptedModel,
    ToolSettings,
)
from perdure.types import Imported

features = Features(memory=True, in_context_memory=True, history=True, permissions=False)
config = AgentConfig(name="mia", model=ScriptedModel("hello"), features=features)

permissions = Permissions()
assert_type(permissions.allowlist, tuple[str, ...])
assert_type(permissions.approvals, dict[str, Any])

tools = ToolSettings()
tools.disable("send_mail")
assert_type(tools.is_enabled("send_mail"), bool)

notes = InContextMemory(max_entries=5)
assert_type(notes.keys, tuple[str, ...])


async def instructions(path: str) -> str:
    return await PersistentInstructions(path).read()


async def copied(sessions: SessionManager) -> Imported | None:
    state = await export_state(sessions, "mia")
    return None if state is None else await import_state(sessions, state, id="mia-2")
