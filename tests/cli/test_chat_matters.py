"""``perdure chat`` and what was left open: told when it comes back, asked about, answered."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message, ToolCall
from perdure.agent import (
    AgentEvent,
    AgentFactory,
    ApprovalRequested,
    ScriptedModel,
    ToolStarted,
    TurnInterrupted,
    call,
    tool,
)
from perdure.agent.context import AgentConfig
from perdure.cli.chat import Conversation
from tests.cli.conftest import Command


@pytest.fixture
def say(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Chat by lines of standard input; each tool is asked about."""

    def chat(*lines: str, flags: tuple[str, ...] = ("--ask",)):
        typed = tmp_path / "typed"
        typed.write_text("".join(f"{line}\n" for line in lines))
        with typed.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            return command("chat", "--store", str(tmp_path / "store"), *flags)

    return chat


def test_a_tool_runs_once_somebody_has_said_yes(say) -> None:
    ran = say("count one two", "perhaps", "y")
    assert "may it run?" in ran.out
    assert "(answer y, n, a; /quit leaves it open)" in ran.out
    assert "Those were 2 words." in ran.out


def test_what_was_typed_ahead_is_no_answer(say) -> None:
    """A message that begins with a y does not let a tool run, nor one with an a for ever."""
    ran = say("count one two", "yellow fish", "and then some", "yes", "count three", "y")
    assert ran.out.count("(answer y, n, a; /quit leaves it open)") == 2
    assert ran.out.count("may it run?") == 4
    assert "Those were 2 words." in ran.out


def test_one_may_leave_with_the_question_open(say) -> None:
    """What is open is told once, and not in the greeting, too."""
    assert "Those were" not in say("count one two", "/quit", "y").out
    ran = say()
    assert ran.out.count("waits for your approval") == 1
    assert "unfinished" not in ran.out.partition("not answered")[0]


def test_a_command_that_does_not_exist_is_no_message(say) -> None:
    ran = say("/resum", "/resume", "/dismiss", "/etc/hosts is a file")
    assert "there is no /resum: /resume continues what is open" in ran.out
    assert "nothing is open" in ran.out
    assert "You said '/etc/hosts is a file'." in ran.out
    assert "'/resum'" not in ran.out


def test_a_tool_does_not_run_after_a_no(say) -> None:
    ran = say("count one two", "n", "count three", "a", "count four five")
    assert "[count_words] failed: the tool 'count_words' was not approved" in ran.out
    assert "Those were 1 words." in ran.out
    assert ran.out.count("may it run?") == 2  # "always" asks no more
    assert "Those were 2 words." in ran.out


def test_an_approval_that_nobody_has_answered_is_asked_for_after_a_restart(say) -> None:
    assert say("count one two").status == 0  # the input ends with the question
    ran = say("/resume", "y")
    assert "not answered, begun in turn_0001: count one two" in ran.out
    assert 'waits for your approval: count_words {"text":"one two"}' in ran.out
    assert "(/resume continues" in ran.out
    assert "Those were 2 words." in ran.out
    assert "waits" not in say().out


def test_what_was_left_can_be_given_up(say) -> None:
    say("count one two")
    ran = say("/dismiss")
    assert "not answered" in ran.out
    assert "given up: 1" in ran.out
    ran = say()
    assert "not answered" not in ran.out
    assert "waits" not in ran.out


def test_as_json_each_open_matter_and_each_question_is_a_line(say) -> None:
    say("count one two")
    lines = [
        json.loads(line) for line in say("/resume", "y", flags=("--ask", "--json")).out.splitlines()
    ]
    assert lines[0]["message"] == "count one two"
    assert lines[1] == {
        "waits_for_approval": lines[2]["approve"],
        "turn": "turn_0001",
        "tool": "count_words",
    }
    assert lines[2]["arguments"] == {"text": "one two"}
    assert lines[3]["answer"] == "Those were 2 words."


@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone from the context"])
def test_an_effect_of_which_nobody_knows_is_told_and_settled(
    say, tmp_path: Path, gone: bool
) -> None:
    @tool(effect="ask")
    async def pay(amount: int) -> str:
        raise TimeoutError

    async def leave_it_unknown() -> None:
        config = AgentConfig(
            name="chat", model=ScriptedModel(call("pay", amount=3), "?"), tools=[pay]
        )
        async with (
            perdure.connect(str(tmp_path / "store")) as sessions,
            await AgentFactory(sessions).create_agent(config, agent_id="chat") as agent,
        ):
            await agent.ask("pay 3")
            if gone:
                await agent.context.memory.reset_working_context_snapshot([Message.user("pay 3")])

    anyio.run(leave_it_unknown)
    ran = say("/resume", "d")
    arguments = "" if gone else ' {"amount":3}'
    assert f"unknown whether it has done its work: pay{arguments}\n" in ran.out
    assert "unknown" not in say().out


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_ctrl_c_amid_a_question_interrupts_the_turn_and_the_talk_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perdure.cli", "chat", "--ask", "--store", str(tmp_path / "s")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as chat:
        chat.stdin.write("count one\n")
        chat.stdin.flush()
        while "may it run?" not in (seen := chat.stdout.readline()) and seen:
            if "[count_words]" in seen:
                break
        chat.send_signal(signal.SIGINT)
        while "interrupted" not in (seen := chat.stdout.readline()):
            assert seen
        out, _ = chat.communicate("Hello\n")
    assert "You said 'Hello'" in out
    assert chat.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.anyio
async def test_nothing_is_asked_of_a_turn_that_is_being_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C as the question is on its way: nobody would hear that the turn is over."""
    asked = ToolCall("c1", "pay", {"amount": 3})

    class Interrupted:
        unfinished = unknown_effects = pending_approvals = ()

        def __init__(self) -> None:
            self.pressed = anyio.Event()

        def interrupt(self) -> bool:
            self.pressed.set()
            return True

        async def stream(self, text: str) -> AsyncGenerator[AgentEvent, None]:
            yield ToolStarted(agent_id="a", turn_id="t", call=asked)
            signal.raise_signal(signal.SIGINT)
            await self.pressed.wait()
            yield ApprovalRequested(agent_id="a", turn_id="t", call=asked)
            yield TurnInterrupted(agent_id="a", turn_id="t")

    class Lines:
        given = 0

        async def next(self) -> str | None:
            self.given += 1
            await anyio.wait_all_tasks_blocked()  # so that Ctrl-C is heard
            return "count one" if self.given == 1 else None

    talk, lines = Conversation(Interrupted(), json=False), Lines()
    await talk.run(lines)
    assert lines.given == 2  # the message, and the end: no answer
    said = capsys.readouterr().out
    assert "may it run?" not in said
    assert "(interrupted" in said
