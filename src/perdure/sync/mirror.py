"""Methods and attributes that pass on to their namesakes in the async API.

A method here is its signature and its docstring: its decorator says in which way it is passed on,
which is all that a blocking method has to say for itself.
"""

# A body that is only a docstring never runs: the decorator takes its place.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from perdure.sync.loop import LoopThread


I = TypeVar("I")  # noqa: E741  # the inner object
F = TypeVar("F", bound=Callable[..., Any])


class Mirror(Generic[I]):
    """An object of the async API, for any thread to use."""

    def __init__(self, loop: LoopThread, inner: I) -> None:
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)


def awaited(method: F) -> F:
    """Await the method in the loop; an exception that ends the wait, such as Ctrl-C, cancels it."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return self._loop.call(partial(getattr(self._inner, method.__name__), *args, **options))

    return cast("F", call)


def done(method: F) -> F:
    """Call the method in the loop; it runs even if an exception ends the wait."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return self._loop.do(partial(getattr(self._inner, method.__name__), *args, **options))

    return cast("F", call)


def read(method: F) -> F:
    """Call the method, which only reads: in the loop while there is one, else here."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return self._loop.read(partial(getattr(self._inner, method.__name__), *args, **options))

    return cast("F", call)


def attribute(getter: F) -> F:
    """Return the attribute of a property's name, a plain value that any thread may read."""

    @wraps(getter)
    def get(self: Any) -> Any:
        return getattr(self._inner, getter.__name__)

    return cast("F", get)


def read_attribute(getter: F) -> F:
    """Return the attribute of a property's name, looked up in the loop while there is one."""

    @wraps(getter)
    def get(self: Any) -> Any:
        return self._loop.read(partial(getattr, self._inner, getter.__name__))

    return cast("F", get)
