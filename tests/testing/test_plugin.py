"""The plugin, as a project of somebody else's uses it: in pytest runs of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.source_tree import ROOT

pytestmark = pytest.mark.deep
PROJECT = ROOT / "examples" / "tests_of_your_own"
SCOPE = ("-o", "asyncio_default_fixture_loop_scope=function")
ANYIO = ("-p", "anyio.pytest_plugin", "-o", "anyio_mode=auto")
ASYNCIO = ("-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto", *SCOPE)

USES_ALL = """
    from perdure import Message
    from perdure.testing import assert_saved

    async def test_all(
        perdure_sandbox, perdure_sessions, perdure_store, perdure_clock, perdure_reopen,
        perdure_scripted_model,
    ):
        assert perdure_sandbox.sessions is perdure_sessions
        assert perdure_sandbox.store is perdure_store
        assert perdure_sandbox.clock is perdure_clock
        session = await perdure_sessions.open("mia")
        session.append(Message.user("saved"))
        await perdure_clock.advance(30)
        assert_saved(session)
        session.append(Message.user("lost"))
        sessions = await perdure_reopen()
        session = await sessions.open("mia")
        assert [message.text for message in session.context()] == ["saved"]
        model = perdure_scripted_model()
        chunks = [chunk.text async for chunk in model.stream(session.context(), ())]
        assert "".join(chunks) == "You said: saved"

    async def test_no_test_sees_the_sessions_of_another(perdure_sessions):
        assert not await perdure_sessions.exists("mia")

    async def test_without_the_clock_it_saves_at_once(perdure_sessions):
        session = await perdure_sessions.open("mia")
        version = session.append(Message.user("saved"))
        assert (await session.wait_durable()).version == version
"""


class Project:
    """A folder with tests, and pytest to run them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("pytest.ini", "[pytest]\nfilterwarnings = error\n")
        self.write("conftest.py", 'pytest_plugins = ["perdure.testing.plugin"]\n')

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(dedent(text), encoding="utf-8")

    def run(self, *arguments: str, autoload: bool = False) -> str:
        """Return what pytest prints; it ends with the summary line."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        # None of the options for the run around it.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        if not autoload:
            env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        run = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        assert run.stderr == ""
        return run.stdout.strip()


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def summary(output: str) -> str:
    return output.splitlines()[-1].partition(" in ")[0]


@pytest.mark.parametrize(
    ("plugin", "expected"), [(ANYIO, "6 passed"), (ASYNCIO, "3 passed")], ids=["anyio", "asyncio"]
)
def test_every_fixture_works_under_either_plugin(project, plugin, expected):
    project.write("test_all.py", USES_ALL)
    output = project.run(*plugin)
    assert summary(output) == expected, output


def test_both_plugins_may_share_a_suite(project):
    project.write(
        "test_shared.py",
        """
        import pytest

        async def use(sessions):
            session = await sessions.open("mia")
            await session.save()

        @pytest.mark.anyio
        async def test_anyio(perdure_sessions):
            await use(perdure_sessions)

        @pytest.mark.asyncio
        async def test_asyncio(perdure_sessions):
            await use(perdure_sessions)

        @pytest.mark.asyncio(loop_scope="module")
        async def test_in_the_loop_of_the_module(perdure_sessions):
            await use(perdure_sessions)

        @pytest.mark.asyncio(loop_scope="session")
        async def test_in_the_loop_of_the_session(perdure_sessions):
            await use(perdure_sessions)
        """,
    )
    output = project.run(*SCOPE, autoload=True)
    assert summary(output) == "5 passed", output


def test_sessions_live_in_the_loop_that_the_configuration_gives_to_tests(project):
    project.write("test_all.py", USES_ALL)
    output = project.run(*ASYNCIO, "-o", "asyncio_default_test_loop_scope=module")
    assert summary(output) == "3 passed", output


def test_options_come_from_a_fixture_of_the_users(project):
    project.write(
        "test_options.py",
        """
        import pytest
        from perdure import Limits, Message, TooLargeError

        @pytest.fixture
        def perdure_options():
            return {"limits": Limits(record_bytes=1000)}

        async def test_options(perdure_sessions):
            session = await perdure_sessions.open("mia")
            with pytest.raises(TooLargeError):
                session.append(Message.user("x" * 1000))
        """,
    )
    output = project.run(*ASYNCIO)
    assert summary(output) == "1 passed", output


def test_a_test_that_no_loop_runs_is_told_so(project):
    project.write("test_plain.py", "def test_plain(perdure_sessions): pass\n")
    output = project.run(*ANYIO)
    assert "test_plain asks for sessions, but no event loop runs it" in output
    assert summary(output) == "1 error"


def test_the_plugin_loads_only_where_it_is_asked_for(project):
    project.write("conftest.py", "")
    project.write(
        "test_without.py",
        """
        import sys
        import pytest

        def test_without(request):
            assert "perdure" not in sys.modules
            with pytest.raises(pytest.FixtureLookupError):
                request.getfixturevalue("perdure_sessions")
        """,
    )
    assert summary(project.run(*SCOPE, autoload=True)) == "1 passed"
    project.write("test_without.py", USES_ALL)
    assert summary(project.run(*ASYNCIO, "-p", "perdure.testing.plugin")) == "3 passed"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "16 passed"),
        (("-o", "addopts=", "-o", "anyio_mode=strict", *ASYNCIO[2:]), "8 passed"),
    ],
    ids=["anyio", "asyncio"],
)
def test_the_example_project_passes_under_either_plugin(project, options, expected):
    shutil.copytree(PROJECT, project.folder, dirs_exist_ok=True)
    (project.folder / "pytest.ini").unlink()
    output = project.run(*options, autoload=True)
    assert summary(output) == expected, output
