"""Tools: schemas from functions, and failures as results."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Literal

import anyio
import pytest

from perdure import ConfigError, ToolCall
from perdure.agent import AgentContext, Tool, tool
from perdure.agent.tools import Toolbox, is_certain

CONTEXT: Any = object()


@dataclasses.dataclass
class Place:
    name: str
    depth: float = 0.0


async def look(
    where: Place, unit: Literal["m", "ft"] = "m", hours: list[int] | None = None
) -> dict[str, Any]:
    """Look how deep
    the water is.

    Args:
        where: The place, which has
            a name.
        unit: What to measure in.

    Returns:
        Something.

    """
    return {"place": where, "unit": unit, "hours": hours}


async def run(function: Callable[..., Any], arguments: Any, limit: float | None = None) -> Any:
    box = Toolbox([function])
    (made,) = box
    return await box.run(ToolCall("c1", made.name, arguments), CONTEXT, limit=limit)


def test_name_and_description_are_the_functions_own() -> None:
    spec = Tool(look).spec
    assert (spec.name, spec.description) == ("look", "Look how deep the water is.")


def test_the_model_is_told_all_that_the_docstring_says_of_the_tool() -> None:
    """S1-9: a caution in the second paragraph is one for the model."""

    def dig(depth: int) -> str:
        """Dig a hole,
        with a spade.

        Never under a house.

        Args:
            depth: In meters.

        """
        return "nothing"

    spec = Tool(dig).spec
    assert spec.description == "Dig a hole, with a spade.\nNever under a house."
    assert spec.parameters["properties"]["depth"]["description"] == "In meters."


def test_the_schema_follows_the_annotations_and_the_docstring() -> None:
    schema = Tool(look).parameters
    assert schema["type"] == "object"
    assert schema["required"] == ["where"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["unit"] == {
        "enum": ["ft", "m"],
        "default": "m",
        "description": "What to measure in.",
    }
    assert "which has a name" in str(schema["properties"]["where"])
    assert schema["$defs"]["Place"]["properties"]["depth"] == {"type": "number", "default": 0.0}


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    async def clock() -> str:
        return "noon"

    assert Tool(clock).parameters == {
        "type": "object",
        "properties": {},
        "required": [],
        "additionalProperties": False,
    }


async def test_arguments_arrive_as_what_the_annotations_say() -> None:
    result = await run(look, {"where": {"name": "harbor"}, "hours": [1, 2]})
    assert result.error is None
    assert result.result == {"place": Place("harbor"), "unit": "m", "hours": [1, 2]}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"where": 1},
        {"where": {"name": "x"}, "unit": "mile"},
        {"where": {"name": "x"}, "wat": 1},
        "{not json",
        ["x"],
    ],
)
async def test_arguments_that_do_not_fit_are_a_result_with_an_error(arguments: Any) -> None:
    result = await run(look, arguments)
    assert "the arguments do not fit" in result.error
    assert (result.call_id, result.result) == ("c1", None)


async def test_arguments_as_text_are_read_as_json() -> None:
    result = await run(look, '{"where": {"name": "harbor"}}')
    assert result.result["place"] == Place("harbor")


async def test_an_exception_is_a_result_with_an_error() -> None:
    async def fails() -> None:
        raise ValueError("no water")

    assert (await run(fails, {})).error == "ValueError: no water"


async def test_a_tool_that_exits_does_not_end_the_agent() -> None:
    """A program's main() as a tool: what it is given does not fit, and it exits."""

    def main() -> None:
        raise SystemExit(2)

    assert (await run(main, {})).error == "SystemExit: 2"


async def test_the_text_of_an_exception_is_not_longer_than_a_model_can_read() -> None:
    async def fail() -> None:
        raise OSError("x" * 1_000_000)

    error = (await run(fail, {})).error
    assert len(error) < 11_000
    assert error.endswith("[… 1000000 characters in all]")


async def test_an_unknown_tool_is_a_result_that_names_the_known_ones() -> None:
    result = await Toolbox([look]).run(ToolCall("c1", "listen", {}), CONTEXT)
    assert "no tool 'listen'" in result.error
    assert "look" in result.error


async def test_a_plain_function_runs_in_a_thread_of_its_own() -> None:
    def where() -> int:
        return threading.get_ident()

    assert (await run(where, {})).result != threading.get_ident()


async def test_a_plain_function_that_hangs_takes_no_thread_of_anybody_else() -> None:
    def borrowed() -> float:
        return anyio.from_thread.run_sync(of_all)

    def of_all() -> float:
        return anyio.to_thread.current_default_thread_limiter().borrowed_tokens

    assert (await run(borrowed, {})).result == 0


async def test_a_tool_that_takes_too_long_is_a_result_with_an_error() -> None:
    async def waits() -> None:
        await anyio.sleep_forever()

    assert "TimeoutError" in (await run(waits, {}, limit=0)).error


async def test_the_context_is_given_and_never_shown() -> None:
    async def where(context: AgentContext, deep: int = 1) -> bool:
        return context is CONTEXT and deep == 1

    assert list(Tool(where).parameters["properties"]) == ["deep"]
    assert (await run(where, {})).result is True


async def test_a_default_that_json_cannot_show_stays_the_functions_own() -> None:
    shared: list[int] = []

    async def collect(into: list[int] = shared) -> bool:
        return into is shared

    assert (await run(collect, {})).result is True


def test_a_name_of_ones_own() -> None:
    @tool(name="gauge", description="Read the gauge.")
    async def f() -> int:
        return 1

    assert (f.spec.name, f.spec.description) == ("gauge", "Read the gauge.")


def with_rest(*rest: int) -> None: ...
def with_options(**options: int) -> None: ...
def without_schema(what: threading.Thread) -> None: ...


def unresolved(what: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    "function", [with_rest, with_options, without_schema, unresolved, lambda: 1]
)
def test_what_cannot_be_a_tool_is_refused_by_name(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=function.__name__):
        Tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'look'"):
        Toolbox([look, look])


async def test_of_a_group_of_exceptions_the_model_is_told_the_causes() -> None:
    async def fails() -> None:
        async def connect(port: int) -> None:
            raise ConnectionError(f"port {port} refused the connection")

        async with anyio.create_task_group() as group:
            group.start_soon(connect, 5432)

    result = await run(fails, {})
    assert result.error == "ConnectionError: port 5432 refused the connection"


async def test_of_several_causes_the_one_that_leaves_the_outcome_open_counts() -> None:
    async def fails() -> None:
        raise ExceptionGroup(
            "all", [ValueError("bad"), ExceptionGroup("more", [TimeoutError("slow"), OSError()])]
        )

    result = await run(fails, {})
    assert result.error == "TimeoutError: slow; ValueError: bad; OSError: "
    assert not is_certain(result)
