"""Tools: plain functions that a model may call, how they are called, and which are permitted.

A tool's name, description and JSON schema come from the function itself: its name, its
docstring and its annotations. Arguments are checked against the annotations before the
function runs. An error in a tool becomes a result that says so, and so does a cancellation that it
lets out; nothing but the cancellation of the call itself comes out of `Toolbox.run`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import (
    Annotated,
    Any,
    Final,
    final,
    get_args,
    get_type_hints,
    overload,
)

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from perdure._lib.ids import random_id
from perdure._lib.logs import log_facts
from perdure._lib.tasks import is_stray
from perdure.agent.llm.model import ToolSpec
from perdure.errors import InvalidArgumentError, ToolOutcomeUnknownError
from perdure.memory.ledger import Policy
from perdure.records.messages import ToolCall, ToolResult
from perdure.records.values import OnUnstorable

log: logging.Logger = logging.getLogger("perdure.agent")

KEY: Final = "idempotency_key"
"""The parameter that gets the call's idempotency key."""
TIMEOUT: Final = "TimeoutError"
LONGEST_ERROR: Final = 10_000
"""Characters of an exception's text that the model gets."""
CANCELLED: Final = "CancelledError"
UNCERTAIN: Final = (TIMEOUT, ToolOutcomeUnknownError.__name__, CANCELLED)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SECTION: Final = re.compile(r"^(?:Args|Returns|Yields|Raises|Examples?):\s*$", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s+(.+)$")


@final
class Tool:
    """A function that a model may call; made of it by `tool`, or by the agent.

    A parameter annotated with `AgentContext` gets the agent's, and the model never sees it.
    A plain function runs in a thread, so that it may block.

    Args:
        function: What is called. A parameter named ``idempotency_key`` gets a key that stays the
            same when this very call is made again; the model never sees it.
        name: Its name; None for the function's own.
        description: Its description for the model; None for what the docstring says before its
            sections, such as ``Args``.
        parameters: The JSON schema of its arguments, where it is known from elsewhere: the
            function then gets all arguments as one dict, and checks them itself.
        effect: What to do if a crash leaves unknown whether it has done its work: "replay" calls
            it again with the same key, "skip" leaves it, "ask" waits for a person's decision.
            None for a tool without side effects, or "replay" if it takes a key.
        unstorable: What becomes of a part of its result that cannot be stored: "raise" makes the
            result an error, "repr" keeps the part's repr.

    Raises:
        ConfigError: The function cannot be a tool; the message says why.

    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: dict[str, Any] | None = None,
        effect: Policy | None = None,
        unstorable: OnUnstorable = "raise",
    ) -> None:
        _check_choice("effect", effect, (None, *get_args(Policy)))
        _check_choice("unstorable", unstorable, get_args(OnUnstorable))
        if not callable(function):
            raise InvalidArgumentError(
                f"{function!r} is no tool: give a function, or a Tool of one", option="tools"
            )
        self.function = function
        self.unstorable: OnUnstorable = unstorable
        self.name: str = str(name or getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(
                f"a tool cannot be named {self.name!r}: give it name= of letters, digits, _",
                tool=self.name,
            )
        docstring = inspect.getdoc(function) or ""
        self.description: str = _description_in(docstring) if description is None else description
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object with an async __call__
        )
        self._arguments: type[msgspec.Struct] | None = None
        self._context_name: str | None = None
        self.takes_key: bool = parameters is None and _takes_key(function)
        """True if it takes an idempotency key."""
        self.effect: Policy | None = effect or ("replay" if self.takes_key else None)
        """Policy for a call whose outcome a crash has left unknown."""
        self.parameters: dict[str, Any] = parameters or {}
        if parameters is not None:
            return
        fields, self._context_name = _fields(self.name, function, _described(docstring))
        self._arguments = msgspec.defstruct(
            f"{self.name}_arguments", fields, kw_only=True, forbid_unknown_fields=True
        )
        self.parameters = _schema(self.name, self._arguments)

    def __repr__(self) -> str:
        return f"<Tool {self.name}>"

    @property
    def spec(self) -> ToolSpec:
        """Its description for a model."""
        return ToolSpec(self.name, self.description, self.parameters)

    async def run(
        self, arguments: Any, context: object, *, idempotency_key: str | None = None
    ) -> Any:
        """Call the function.

        Args:
            arguments: As the model gave them.
            context: The agent's.
            idempotency_key: The call's; None for a new one.

        Raises:
            msgspec.ValidationError: The arguments do not fit.

        """
        call = self._bound(arguments, context, idempotency_key)
        if self._is_async:
            return await call()
        # A tool that hangs keeps its thread: not one of those that sessions are stored with.
        alone = anyio.CapacityLimiter(1)
        result = await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=alone)
        return await result if inspect.isawaitable(result) else result

    def _bound(self, arguments: Any, context: object, key: str | None) -> Callable[[], Any]:
        given = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
        if self._arguments is None:
            return partial(self.function, msgspec.convert(given or {}, dict[str, Any]))
        checked = msgspec.convert(given or {}, self._arguments)
        passed = {field: getattr(checked, field) for field in self._arguments.__struct_fields__}
        # Left out, so that the function's own default counts.
        passed = {field: value for field, value in passed.items() if value is not msgspec.UNSET}
        if self._context_name is not None:
            passed[self._context_name] = context
        if self.takes_key:
            passed[KEY] = key or random_id()
        return partial(self.function, **passed)


@overload
def tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    effect: Policy | None = None,
    unstorable: OnUnstorable = "raise",
) -> Tool: ...


@overload
def tool(
    function: None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    effect: Policy | None = None,
    unstorable: OnUnstorable = "raise",
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    effect: Policy | None = None,
    unstorable: OnUnstorable = "raise",
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function, with options as for `Tool`: also a decorator."""

    def decorate(function: Callable[..., Any]) -> Tool:
        return Tool(
            function, name=name, description=description, effect=effect, unstorable=unstorable
        )

    return decorate if function is None else decorate(function)


@final
class Toolbox:
    """An agent's tools by name.

    Raises:
        ConfigError: A function cannot be a tool, or two have the same name.

    """

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        self._tools: dict[str, Tool] = {}
        self.specs: tuple[ToolSpec, ...] = ()
        self.add(tools)

    def __iter__(self) -> Iterator[Tool]:
        return iter(tuple(self._tools.values()))

    def add(self, tools: Iterable[Tool | Callable[..., Any]]) -> None:
        """Add tools, after the existing ones.

        Raises:
            ConfigError: A function cannot be a tool, or two have the same name.

        """
        for tool in tools:
            new_tool = tool if isinstance(tool, Tool) else Tool(tool)
            if new_tool.name in self._tools:
                raise InvalidArgumentError(
                    f"two tools are named {new_tool.name!r}: give one another, with tool(name=…)",
                    tool=new_tool.name,
                )
            self._tools[new_tool.name] = new_tool
        self.specs = tuple(tool.spec for tool in self._tools.values())

    def find(self, name: str) -> Tool | None:
        """Return the tool of a name, None if there is none."""
        return self._tools.get(name)

    async def run(
        self,
        call: ToolCall,
        context: object,
        *,
        limit: float | None = None,
        idempotency_key: str | None = None,
    ) -> ToolResult:
        """Call a tool, for at most some seconds; a failure is a result with an error."""
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return failed(call, f"there is no tool {call.name!r}; there are: {known}")
        try:
            with anyio.fail_after(limit):
                result = await tool.run(call.arguments, context, idempotency_key=idempotency_key)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            return failed(call, f"the arguments do not fit: {error}")
        except TimeoutError as error:
            reason = _clipped(str(error)) or f"no result within {limit} s"
            return failed(call, f"{TIMEOUT}: {reason}")
        except BaseException as error:
            # A tool may exit, or be cancelled from within: that fails the call. A cancellation of
            # this task, or a Ctrl-C, goes through.
            causes = causes_of(error)
            if not all(isinstance(cause, _FAILURES) or is_stray(cause) for cause in causes):
                raise
            if any(is_stray(cause) for cause in causes):
                message = "a tool let a cancellation out"
                log_facts(log, logging.WARNING, message, error, tool=call.name, call=call.id)
            return failed(call, error_text(error))  # the model's to deal with
        return ToolResult(call.id, call.name, result)


def _check_choice(option: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise InvalidArgumentError(
            f"tool: invalid {option}={value!r}: choose {known}", option=option, value=value
        )


_FAILURES: Final = (Exception, SystemExit)


def error_text(error: BaseException) -> str:
    """Return an exception's text for the model: of a group, the causes in it."""
    causes = causes_of(error)
    reasons = [_reason(cause, LONGEST_ERROR // len(causes)) for cause in causes]
    # One that leaves open what the tool has done leaves it open for all of them.
    reasons.sort(key=lambda reason: not reason.startswith(UNCERTAIN))
    return "; ".join(dict.fromkeys(reasons))


def causes_of(error: BaseException) -> list[BaseException]:
    """Return the exceptions within a group, or the one that is none."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for part in error.exceptions for cause in causes_of(part)]
    return [error]


def _reason(error: BaseException, longest: int) -> str:
    if not isinstance(error, _FAILURES):
        return f"{CANCELLED}: something within the tool was cancelled"
    name = TIMEOUT if isinstance(error, TimeoutError) else type(error).__name__
    return f"{name}: {_clipped(str(error), longest)}"


def storable(result: ToolResult) -> ToolResult:
    r"""Return a result with its lone surrogates escaped, which are not text: ``\udce9``."""
    error = None if result.error is None else _escaped(result.error)
    return replace(result, result=_escaped(result.result), error=error)


def _escaped(value: Any) -> Any:
    if type(value) is str:
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if type(value) in {list, tuple}:
        return type(value)(_escaped(item) for item in value)
    if type(value) is dict:
        return {_escaped(name): _escaped(item) for name, item in value.items()}
    return value


def is_certain(result: ToolResult) -> bool:
    """Return True if a result proves what the tool did: one that timed out may still be running."""
    return not (result.error or "").startswith(UNCERTAIN)


def _takes_key(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get(KEY)
    return parameter is not None and parameter.kind in {
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    }


def _clipped(text: str, longest: int = LONGEST_ERROR) -> str:
    if len(text) <= longest:
        return text
    return f"{text[:longest]} [… {len(text)} characters in all]"


def failed(call: ToolCall, reason: str) -> ToolResult:
    """Return the result of a call that came to nothing."""
    return ToolResult(call.id, call.name, error=reason)


def _fields(
    name: str, function: Callable[..., Any], described: dict[str, str]
) -> tuple[list[Any], str | None]:
    """Return the arguments as fields, and the name of the one that gets the context."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise InvalidArgumentError(
            f"the annotations of tool {name!r} cannot be resolved: {error}", tool=name
        ) from error
    fields: list[Any] = []
    context_name = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY}:
            raise InvalidArgumentError(
                f"tool {name!r}: parameter {parameter.name!r} cannot be given by its name",
                tool=name,
                parameter=parameter.name,
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            raise InvalidArgumentError(
                f"tool {name!r}: **{parameter.name} has no schema: name the parameters",
                tool=name,
                parameter=parameter.name,
            )
        if parameter.name == KEY:
            continue
        kind = hints.get(parameter.name, Any)
        if getattr(kind, "is_for_tools", False) is True:
            context_name = parameter.name
            continue
        text = described.get(parameter.name)
        if text is not None:
            kind = Annotated[kind, msgspec.Meta(description=text)]
        fields.append(_field(parameter, kind))
    return fields, context_name


def _field(parameter: inspect.Parameter, kind: Any) -> Any:
    default = parameter.default
    if default is parameter.empty:
        return (parameter.name, kind)
    if isinstance(default, str | int | float | bool | tuple) or default is None:
        return (parameter.name, kind, default)
    # What JSON schema cannot show, or must not be shared: the function's own default is used.
    return (parameter.name, kind | msgspec.UnsetType, msgspec.UNSET)


def _schema(name: str, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    try:
        _, components = msgspec.json.schema_components((arguments,), ref_template="#/$defs/{name}")
    except TypeError as error:
        raise InvalidArgumentError(
            f"the parameters of tool {name!r} have no JSON schema: {error}", tool=name
        ) from error
    schema = dict(components.pop(arguments.__name__))
    schema.pop("title", None)
    schema.setdefault("required", [])
    return {**schema, **({"$defs": components} if components else {})}


def _description_in(docstring: str) -> str:
    """Return what a docstring says before its sections, a line a paragraph."""
    lines = _SECTION.split(docstring, maxsplit=1)[0].strip()
    return "\n".join(" ".join(part.split()) for part in lines.split("\n\n") if part.strip())


def _described(docstring: str) -> dict[str, str]:
    """Return what a docstring's Args section says of each parameter."""
    _, marker, section = docstring.partition("Args:\n")
    described: dict[str, str] = {}
    last = None
    for line in section.splitlines() if marker else ():
        if not line.strip() or not line.startswith(" "):
            break
        match = _ARGUMENT.match(line)
        if match:
            last = match[1]
            described[last] = match[2].strip()
        elif last is not None:
            described[last] += f" {line.strip()}"
    return described
