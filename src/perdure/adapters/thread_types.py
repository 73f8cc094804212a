"""Objects in LangGraph's channels as msgpack, and back as what they were, or not at all.

What is stored is LangGraph's own format, with a little more where that would lose something: its
serializers read it. What is read is data: a class that is not allowed is neither imported nor
called, and one that has changed since raises and says how.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache, reduce
from typing import Any, Final, TypeAlias, cast, final

from perdure._lib.lazy import from_extra
from perdure._lib.logs import log_facts
from perdure.errors import (
    CorruptRecordError,
    FormatError,
    NotStorableError,
    UnsupportedVersionError,
)
from perdure.records.types import Registered

with from_extra(
    "langgraph",
    "ormsgpack",
    "pydantic",
    used_by="PerdureSaver",
    name="LangGraph",
    extra="langgraph",
):
    import ormsgpack
    import pydantic
    from langgraph.checkpoint.serde import _msgpack as sdk_msgpack, jsonplus, types as sdk_types
    from langgraph.store.base import Item

Names: TypeAlias = tuple[str, ...]
"""A module and a name in it."""

_DeltaSnapshot: Any = sdk_types._DeltaSnapshot  # noqa: SLF001  # a value of a channel, as stored
_sdk_default: Callable[[Any], Any] = jsonplus._msgpack_default  # noqa: SLF001  # of scalars
_READ: Final = ormsgpack.OPT_NON_STR_KEYS
_WRITE: Final = (
    ormsgpack.OPT_NON_STR_KEYS
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_UUID
)

LANGCHAIN: Final = frozenset(
    {
        ("langchain_core.agents", "AgentAction"),
        ("langchain_core.agents", "AgentActionMessageLog"),
        ("langchain_core.agents", "AgentFinish"),
        ("langchain_core.agents", "AgentStep"),
        ("langchain_core.documents.base", "Blob"),
        ("langchain_core.outputs.chat_generation", "ChatGeneration"),
        ("langchain_core.outputs.chat_generation", "ChatGenerationChunk"),
        ("langchain_core.outputs.chat_result", "ChatResult"),
        ("langchain_core.outputs.generation", "Generation"),
        ("langchain_core.outputs.generation", "GenerationChunk"),
        ("langchain_core.outputs.llm_result", "LLMResult"),
        ("langchain_core.outputs.run_info", "RunInfo"),
        ("langchain_core.prompt_values", "ChatPromptValue"),
        ("langchain_core.prompt_values", "ChatPromptValueConcrete"),
        ("langchain_core.prompt_values", "ImagePromptValue"),
        ("langchain_core.prompt_values", "StringPromptValue"),
        ("langgraph.store.base", "ListNamespacesOp"),
        ("langgraph.store.base", "MatchCondition"),
        ("langgraph.store.base", "PutOp"),
        ("langgraph.store.base", "SearchItem"),
        ("langgraph.store.base", "SearchOp"),
        ("langgraph.types", "CachePolicy"),
        ("langgraph.types", "RetryPolicy"),
    }
)
"""Classes of LangChain's and LangGraph's that hold data, besides those that LangGraph allows."""
SAFE: Final = sdk_msgpack.SAFE_MSGPACK_TYPES | LANGCHAIN
"""Classes that are always read."""
OWN: Final = ("perdure", "text")
"""A text with lone surrogates, which is not valid Unicode, stored as if it were a class."""
OWN_DICT: Final = ("perdure", "dict")
"""A dict with such a key."""
OWN_TUPLE: Final = ("perdure", "tuple")
"""A tuple in a set, which a list cannot be in: LangGraph makes lists of tuples."""
_DICTS: Final[dict[type, Names]] = {
    kind: ("collections", kind.__name__) for kind in (Counter, OrderedDict, defaultdict)
}
_FACTORIES: Final[dict[Any, str]] = {
    kind: kind.__name__ for kind in (bool, dict, float, int, list, set, str, tuple)
}
ALWAYS_READ: Final = frozenset(
    {*SAFE, *sdk_msgpack.SAFE_MSGPACK_METHODS, OWN, OWN_DICT, OWN_TUPLE, *_DICTS.values()}
)
"""Names that are read without being given in ``types``."""
_PACKAGES: Final = ("langchain_core", "langgraph")
"""Packages whose classes that derive from a dict or text come back as that without a warning."""
_SCALARS: Final = {("re", "Pattern"), ("numpy", "ndarray")}
"""Classes that are stored under another name, or none."""
_UNREAD: Final = "cannot be read back: give PerdureSaver(types=[%s]) the class"
_CONSTRUCT: Final = "model_construct"
"""Instead of a method's name: the fields are the object's own, and not what a dump makes of them.
"""

log: logging.Logger = logging.getLogger("perdure.adapters")


class NotAllowedError(FormatError):
    """A stored value is of a class that was not allowed."""


@final
class DataSerializer(jsonplus.JsonPlusSerializer):
    """LangGraph's serializer, which reads safe classes and those that you name.

    Anything else that is stored raises, instead of becoming a dict or None, and so does what does
    not fit the class as it is now.

    Args:
        types: Classes, their modules and names, or what `perdure.register` returns.

    """

    def __init__(self, types: Iterable[type | Names | Registered] = ()) -> None:
        self._known: dict[Names, Registered | None] = {}
        """By the names under which it is stored; None for a class that is imported."""
        self._told: set[Names] = set()
        for each in types:
            if isinstance(each, tuple):
                self._known.setdefault(each, None)
            else:
                self._add(each if isinstance(each, Registered) else _registered(each))
        super().__init__(allowed_msgpack_modules=tuple(self._known) or None)

    def _add(self, registered: Registered) -> None:
        names = {names_of(registered.cls), (registered.cls.__module__, registered.cls.__name__)}
        earlier = [alias.rpartition(".") for alias in registered.aliases]
        names |= {(module, name) for module, _, name in earlier}
        for each in names:
            # Two nested classes of one name: which of them an older release stored is unknown.
            other = self._known.get(each)
            is_other = other is not None and other.cls is not registered.cls
            self._known[each] = None if is_other else registered

    def with_msgpack_allowlist(self, extra_allowlist: Iterable[Names | type]) -> DataSerializer:
        """Return a serializer that allows more classes."""
        extra = tuple(extra_allowlist)
        clone = cast("DataSerializer", super().with_msgpack_allowlist(extra))
        if clone is not self:
            clone._known = dict(self._known)  # noqa: SLF001  # a copy
            for each in extra:
                if isinstance(each, type):
                    clone._add(_registered(each))  # noqa: SLF001
                else:
                    clone._known.setdefault(each, None)  # noqa: SLF001
        return clone

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return a value as its type and bytes.

        Raises:
            NotStorableError: It cannot be stored; it says which part of it.

        """
        if obj is None or isinstance(obj, (bytes, bytearray)):
            return super().dumps_typed(obj)
        try:
            return "msgpack", self._pack(obj)
        except Exception as error:
            place, part, reason = self._culprit(obj, error)
            message = (
                f"{place or 'it'} is a {type(part).__name__} that cannot be stored: {reason}; keep "
                "it out of the state, or store what it is made of"
            )
            raise NotStorableError(message, path=place, type=type(part).__name__) from error

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return a value.

        Raises:
            FormatError: It is of a class that is not allowed, or cannot be rebuilt.

        """
        kind, content = data
        return _Reading(self).value(content) if kind == "msgpack" else super().loads_typed(data)

    # Writing

    def _pack(self, value: Any) -> bytes:
        try:
            return ormsgpack.packb(value, default=self._ext, option=_WRITE)
        except TypeError as error:
            if "surrogates" not in str(error):
                raise
        return ormsgpack.packb(_unpaired(value), default=self._ext, option=_WRITE)

    def _ext(self, obj: Any) -> Any:
        """Return what stands for an object that msgpack does not know."""
        message = _message(type(obj))  # type: ignore[arg-type]  # a class can be hashed
        if message is not None:  # most objects are one; their dumps are the same when read
            parts = (*message, obj.model_dump(), "model_validate_json")
            return ormsgpack.Ext(jsonplus.EXT_PYDANTIC_V2, self._pack(parts))
        if isinstance(obj, _Marked):
            return self._constructor(obj.names, obj.shown, obj.content)
        if isinstance(obj, _DeltaSnapshot):
            return ormsgpack.Ext(jsonplus.EXT_DELTA_SNAPSHOT, self._pack(obj.value))
        if isinstance(obj, Enum):
            return self._user(jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG, type(obj), obj.value)
        if type(obj) in _DICTS:
            return self._dict(obj)
        if isinstance(obj, (dict, list, str, int, float)):
            return self._derived(obj)
        if isinstance(obj, deque):
            about = () if obj.maxlen is None else ({"maxlen": obj.maxlen},)
            return self._constructor(names_of(type(obj)), tuple(obj), *about)
        if isinstance(obj, (set, frozenset)):
            items = tuple(map(_hashable, obj))
            return self._user(jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG, type(obj), items)
        if isinstance(obj, pydantic.BaseModel):
            return self._model(obj)
        return self._with_fields(obj)

    def _with_fields(self, obj: Any) -> Any:
        cls, names = type(obj), names_of(type(obj))
        if names == ("langgraph.types", "Send"):
            rest = () if obj.timeout is None else (obj.timeout,)
            return self._user(jsonplus.EXT_CONSTRUCTOR_POS_ARGS, cls, (obj.node, obj.arg, *rest))
        fields: dict[str, Any] | None = None
        if hasattr(obj, "_asdict") and callable(obj._asdict):  # a namedtuple
            fields = obj._asdict()
        elif dataclasses.is_dataclass(obj):
            fields = {each.name: getattr(obj, each.name) for each in dataclasses.fields(obj)}
        elif isinstance(obj, Item):
            fields = {name: getattr(obj, name) for name in Item.__slots__}
        if fields is not None:
            return self._user(jsonplus.EXT_CONSTRUCTOR_KW_ARGS, cls, fields)
        ext = _sdk_default(obj)
        if isinstance(ext, str):  # an exception is stored as its text
            return _unpaired(ext)
        if names not in SAFE and names not in self._known and names not in _SCALARS:
            self._tell(names, _UNREAD, cls)
        return ext

    def _constructor(self, names: Names, *parts: Any) -> Any:
        return ormsgpack.Ext(jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG, self._pack((*names, *parts)))

    def _user(self, code: int, cls: type, payload: Any, *method: str, **about: Any) -> Any:
        """Return an object of a class, which may have a version."""
        names = names_of(cls)
        registered = self._known.get(names)
        if registered is not None and registered.version > 1:
            about["version"] = registered.version
        if not self._reads(names, cls):
            self._tell(names, _UNREAD, cls)
        last = (about,) if about else ()
        return ormsgpack.Ext(code, self._pack((*names, payload, *method, *last)))

    def _reads(self, names: Names, cls: type) -> bool:
        """Whether what is stored under these names is read as this class."""
        if names in SAFE:
            return True
        if names not in self._known:
            return False
        registered = self._known[names]
        with suppress(Exception):
            return cls is (_import(names) if registered is None else registered.cls)
        return False

    def _dict(self, obj: Any) -> Any:
        names = _DICTS[type(obj)]
        if not isinstance(obj, defaultdict):
            return self._constructor(names, dict(obj))
        factory: Any = obj.default_factory
        known = None if factory is None else _FACTORIES.get(factory)
        if factory is not None and known is None:
            self._tell(names, "with a factory of your own comes back as a plain dict", dict)
            return dict(obj)
        return self._constructor(names, dict(obj), {"factory": known})

    def _derived(self, obj: Any) -> Any:
        """Return an object of a class that derives from a plain one."""
        cls = type(obj)
        base = next(each for each in (dict, list, str, int, float) if isinstance(obj, each))
        names = names_of(cls)
        plain = _unpaired(base(obj))
        if self._reads(names, cls):
            return self._user(jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG, cls, plain)
        if cls.__module__.partition(".")[0] not in _PACKAGES:
            said = f"comes back as a plain {base.__name__}: give PerdureSaver(types=[%s]) the class"
            self._tell(names, said, cls)
        return plain

    def _model(self, obj: pydantic.BaseModel) -> Any:
        """Return a pydantic object, as LangGraph stores it where that is the same when read."""
        cls, code = type(obj), jsonplus.EXT_PYDANTIC_V2
        with suppress(Exception):
            dumped = obj.model_dump()
            for name in cls.model_computed_fields:
                dumped.pop(name, None)
            if _held(cls(**dumped)) == _held(obj):
                return self._user(code, cls, dumped, "model_validate_json")
        fields = {**vars(obj), **(obj.__pydantic_extra__ or {})}
        return self._user(code, cls, fields, _CONSTRUCT, set=sorted(obj.model_fields_set))

    def _tell(self, names: Names, what: str, cls: type) -> None:
        """Warn once that reading will not give back an object of a class."""
        if names in self._told:
            return
        self._told.add(names)
        said = what % cls.__name__ if "%s" in what else what
        message = f"a %(type)s was stored, which {said}"
        log_facts(log, logging.WARNING, message, type=".".join(names))

    def _culprit(self, value: Any, error: Exception) -> tuple[str, Any, str]:
        """Return the place of what cannot be stored, itself, and why not."""
        for place, part in _parts(value):
            try:
                self._pack(part)
            except RecursionError:
                break
            except Exception as inner:  # noqa: BLE001  # of the user's own classes
                below, found, reason = self._culprit(part, inner)
                return place + below, found, reason
        return "", value, str(error)


def _registered(cls: type) -> Registered:
    """Return a class as it is registered without a version; its tag is of no use here."""
    return Registered(cls, cls.__name__)


def names_of(cls: type) -> Names:
    """Return the names under which a class is stored."""
    name = cls.__qualname__
    return cls.__module__, cls.__name__ if "<locals>" in name or "[" in name else name


@lru_cache(256)
def _message(cls: type) -> Names | None:
    """Return the names of a pydantic class that LangGraph always reads; None for another one."""
    is_safe = names_of(cls) in sdk_msgpack.SAFE_MSGPACK_TYPES
    return names_of(cls) if is_safe and issubclass(cls, pydantic.BaseModel) else None


@lru_cache(256)
def _safe_class(names: Names) -> Any:
    """Return a class that is always read."""
    return _import(names)


def _import(names: Names) -> Any:
    """Return the class of some names.

    Raises:
        ImportError, AttributeError: There is none.

    """
    module, name = importlib.import_module(names[0]), names[1]
    origin, bracket, _ = name.partition("[")
    found = reduce(getattr, origin.split("."), module)
    if not bracket:
        return found
    made = (each for each in cast("Any", found).__subclasses__() if each.__name__ == name)
    parametrised = next(made, None)
    if parametrised is None:
        raise AttributeError(name)
    return parametrised


def _held(model: pydantic.BaseModel) -> tuple[Any, Any]:
    return vars(model), model.__pydantic_extra__


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """Return what a value holds, with the place of each."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(f"[{at}]", item) for at, item in enumerate(value)]
    if isinstance(value, _DeltaSnapshot):
        return _parts(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name)) for name in names]
    if isinstance(value, pydantic.BaseModel):
        return [(f".{name}", item) for name, item in vars(value).items()]
    return ()


class _Marked:
    """A value that msgpack does not have."""

    def __init__(self, names: Names, shown: Any, content: Any = None) -> None:
        self.names: Names = names
        self.shown: Any = shown
        """Instead, for a reader that does not know it."""
        self.content: Any = content


def _hashable(value: Any) -> Any:
    """Return an item of a set in which tuples are marked."""
    return _Marked(OWN_TUPLE, list(map(_hashable, value))) if type(value) is tuple else value


def _unpaired(value: Any) -> Any:
    """Return a plain value in which texts with lone surrogates are marked.

    Such as half an emoji: it is not valid Unicode, and msgpack cannot hold it.
    """
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            shown = value.encode(errors="replace").decode()
            return _Marked(OWN, shown, value.encode(errors="surrogatepass"))
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_unpaired, value))
    if type(value) is dict:
        pairs = [(_unpaired(key), _unpaired(item)) for key, item in value.items()]
        if any(isinstance(key, _Marked) for key, _ in pairs):
            keys = [key.shown if isinstance(key, _Marked) else key for key, _ in pairs]
            items = [item for _, item in pairs]
            return _Marked(OWN_DICT, dict(zip(keys, items, strict=True)), pairs)
        return dict(pairs)
    return value


# Reading


@final
class _Reading:
    """One value that is read: what a hook raises does not come through msgpack's decoder."""

    def __init__(self, serde: DataSerializer) -> None:
        self._known = serde._known  # noqa: SLF001  # the same module
        self._error: FormatError | None = None

    def value(self, data: bytes) -> Any:
        try:
            return self._unpack(data)
        except Exception as error:
            if self._error is not None:
                raise self._error from self._error.__cause__
            raise CorruptRecordError(f"its msgpack cannot be read: {error}") from error

    def _unpack(self, data: bytes) -> Any:
        return ormsgpack.unpackb(data, ext_hook=self._rebuild, option=_READ)

    def _rebuild(self, code: int, data: bytes) -> Any:
        parts: Any = self._unpack(data) if code in _BUILDERS else None
        if code == jsonplus.EXT_PYDANTIC_V2:  # most objects are a message
            names = tuple(parts[:2])
            if names in sdk_msgpack.SAFE_MSGPACK_TYPES:
                with suppress(Exception):  # else as all others
                    return _safe_class(names)(**parts[2])
        try:
            return self._rebuilt(code, data, parts)
        except FormatError as error:
            self._error = self._error or error
            raise

    def _rebuilt(self, code: int, data: bytes, parts: Any) -> Any:
        if code == jsonplus.EXT_DELTA_SNAPSHOT:
            return _DeltaSnapshot(self._unpack(data))
        if code == jsonplus.EXT_NUMPY_ARRAY:
            return _array(*self._unpack(data))
        if code not in _BUILDERS:
            raise FormatError(f"its msgpack extension of type {code} is not known here")
        if not isinstance(parts, list) or len(parts) < 3:
            raise CorruptRecordError(f"its msgpack extension of type {code} has no class")
        module, name, payload, *rest = parts
        about = rest[-1] if rest and isinstance(rest[-1], dict) else {}
        names: Names = (module, name)
        if names in _BUILT_IN and code == jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG:
            return _BUILT_IN[names](payload, rest)
        self._require_allowed(code, (*names, *rest[:1]))
        registered = self._known.get(names)
        cls: Any = self._class(names) if registered is None else registered.cls
        if registered is not None:
            payload = _upcast(registered, payload, about.get("version", 1))
        try:
            return _BUILDERS[code](cls, payload, rest)
        except FormatError:
            raise
        except Exception as error:  # the user's own constructors and validators
            if code == jsonplus.EXT_PYDANTIC_V2 and names in SAFE:
                return cls.model_construct(**payload)  # as LangGraph reads its own
            raise misfit(cls, _reason(error)) from error

    def _require_allowed(self, code: int, names: Names) -> None:
        if code == jsonplus.EXT_METHOD_SINGLE_ARG:
            is_allowed = names in sdk_msgpack.SAFE_MSGPACK_METHODS
        else:
            names = names[:2]
            is_allowed = names in SAFE or names in self._known
        if not is_allowed:
            raise not_allowed(names)

    @staticmethod
    def _class(names: Names) -> Any:
        try:
            return _safe_class(names) if names in SAFE else _import(names)
        except (ImportError, AttributeError) as error:
            dotted = ".".join(names)
            message = (
                f"it is a {dotted}, and there is no such class: if it was moved or renamed, give "
                f"PerdureSaver(types=[register(…, aliases=[{dotted!r}])]) the class as it is now"
            )
            raise FormatError(message, type=dotted) from error


def not_allowed(names: Names) -> NotAllowedError:
    """Return the error for a class that may not be read."""
    dotted = ".".join(names)
    message = (
        f"it is a {dotted}, which is not allowed: if it is yours, give "
        f"PerdureSaver(types=[{names[1]}]) the class"
    )
    return NotAllowedError(message, type=dotted)


def misfit(cls: type, reason: str, field: str = "") -> FormatError:
    """Return the error for stored data that its class does not take any more."""
    name = cls.__name__
    message = (
        f"it is a {'.'.join(names_of(cls))} that does not fit the class as it is now: {reason}; "
        f"give PerdureSaver(types=[register({name}, version=2, upcasts={{1: …}})]) a function that "
        "makes the fields of today of the stored ones"
    )
    return FormatError(message, type=".".join(names_of(cls)), field=field)


def _reason(error: Exception) -> str:
    """Return why a class did not take its data, without values of it."""
    if isinstance(error, pydantic.ValidationError):
        found = error.errors(include_url=False, include_context=False, include_input=False)
        each = (f"{'.'.join(map(str, one['loc']))}: {one['type']}" for one in found[:3])
        return "field " + ", ".join(each)
    return f"it raises {type(error).__name__}"


def _upcast(registered: Registered, data: Any, version: int) -> Any:
    """Return the fields of today.

    Raises:
        FormatError: There is no way from the stored version to them, or a step raises.

    """
    cls, newest = registered.cls, registered.version
    if version > newest:
        message = (
            f"it is a {'.'.join(names_of(cls))} of version {version}, and version {newest} is "
            "registered: use the newer program"
        )
        raise UnsupportedVersionError(message, type=".".join(names_of(cls)), version=version)
    for at in range(version, newest):
        if at not in registered.upcasts:
            raise misfit(cls, f"it has version {at}, and there is no upcast from it")
        try:
            data = registered.upcasts[at](data)
        except Exception as error:
            reason = f"its upcast from version {at} raises {type(error).__name__}"
            raise misfit(cls, reason) from error
    return data


def _array(dtype: str, shape: Any, order: str, data: bytes) -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise FormatError("it is an array, which numpy reads: pip install numpy") from error
    try:
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape, order=cast("Any", order))
    except Exception as error:
        raise CorruptRecordError("it is an array that cannot be rebuilt") from error


def _factory(name: str | None) -> Any:
    return next((kind for kind, known in _FACTORIES.items() if known == name), None)


def _about(rest: list[Any], name: str) -> Any:
    return rest[0].get(name) if rest else None


_BUILT_IN: Final[dict[Names, Callable[[Any, list[Any]], Any]]] = {
    OWN: lambda _, rest: rest[0].decode(errors="surrogatepass"),
    OWN_DICT: lambda _, rest: {key: item for key, item in rest[0]},  # noqa: C416
    OWN_TUPLE: lambda payload, _: tuple(payload),
    ("collections", "Counter"): lambda payload, _: Counter(payload),
    ("collections", "OrderedDict"): lambda payload, _: OrderedDict(payload),
    ("collections", "defaultdict"): lambda payload, rest: defaultdict(
        _factory(_about(rest, "factory")), payload
    ),
    ("collections", "deque"): lambda payload, rest: deque(payload, _about(rest, "maxlen")),
}
"""Builders of values whose classes need not be named."""


def _of_one(cls: Any, payload: Any, _rest: list[Any]) -> Any:
    try:
        return cls(payload)
    except ValueError as error:
        if isinstance(cls, type) and issubclass(cls, Enum):
            raise misfit(cls, f"it has no member {payload!r}", str(payload)) from error
        raise


def _of_method(cls: Any, payload: Any, rest: list[Any]) -> Any:
    return getattr(cls, rest[0])(payload)


def _of_positions(cls: Any, payload: Any, _rest: list[Any]) -> Any:
    if cls.__module__ == "langgraph.types" and len(payload) == 3:
        return cls(*payload[:2], timeout=payload[2])
    return cls(*payload)


def _of_keywords(cls: Any, payload: dict[str, Any], _rest: list[Any]) -> Any:
    fields = {each.name: each for each in getattr(cls, "__dataclass_fields__", {}).values()}
    if not fields:
        _require(cls, payload, getattr(cls, "_fields", payload))
        return cls(**payload)
    _require(cls, payload, fields)
    for name, field in fields.items():
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if field.init and no_default and name not in payload:
            raise misfit(cls, f"field {name!r} has no default, and was not stored", name)
    made = cls(**{name: value for name, value in payload.items() if fields[name].init})
    for name, value in payload.items():
        if not fields[name].init:
            object.__setattr__(made, name, value)
    return made


def _require(cls: type, payload: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Refuse stored fields that a class does not have any more."""
    gone = [name for name in payload if name not in fields]
    if gone:
        raise misfit(cls, f"field {gone[0]!r} was stored, and is no field of it", gone[0])


def _of_v1(cls: Any, payload: dict[str, Any], _rest: list[Any]) -> Any:
    _require(cls, payload, getattr(cls, "__fields__", payload))
    return cls(**payload)


def _of_model(cls: Any, payload: dict[str, Any], rest: list[Any]) -> Any:
    if rest and rest[0] == _CONSTRUCT:
        fields = cls.model_fields
        if cls.model_config.get("extra") != "allow":
            _require(cls, payload, fields)
        for name, field in fields.items():
            if name not in payload and field.is_required():
                raise misfit(cls, f"field {name!r} is required, and was not stored", name)
        return cls.model_construct(_fields_set=set(rest[-1]["set"]), **payload)
    try:
        made = cls(**payload)
    except pydantic.ValidationError:
        made = _by_names(cls, payload)
        if made is None:
            raise
    if not _message(cls) and names_of(cls) not in SAFE:
        gone = _unread(payload, made)
        if gone:
            raise misfit(cls, f"field {gone!r} was stored, and is no field of it", gone)
    return made


def _by_names(cls: Any, payload: dict[str, Any]) -> Any:
    """Return an object whose fields have aliases, which LangGraph does not store; else None."""
    with suppress(Exception):
        return cls.model_validate(payload, by_name=True, by_alias=False)
    return None


def _unread(data: Any, value: Any) -> str:
    """Return the first stored field that did not become part of a value, empty if all did."""
    held: Any = None
    if type(data) is dict:
        if isinstance(value, pydantic.BaseModel):
            held = {**vars(value), **(value.__pydantic_extra__ or {})}
            computed = type(value).model_computed_fields
            data = {name: item for name, item in data.items() if name not in computed}
        elif dataclasses.is_dataclass(value):
            held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        elif type(value) is dict:
            held = value
        if held is not None:
            for name, item in data.items():
                if name not in held and held is not value:
                    return str(name)
                below = _unread(item, held.get(name))
                if below:
                    return f"{name}.{below}"
    elif isinstance(data, (list, tuple)) and isinstance(value, (list, tuple)):
        for at, (item, inner) in enumerate(zip(data, value, strict=False)):
            below = _unread(item, inner)
            if below:
                return f"{at}.{below}"
    return ""


_BUILDERS: Final[dict[int, Callable[[Any, Any, list[Any]], Any]]] = {
    jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG: _of_one,
    jsonplus.EXT_CONSTRUCTOR_POS_ARGS: _of_positions,
    jsonplus.EXT_CONSTRUCTOR_KW_ARGS: _of_keywords,
    jsonplus.EXT_METHOD_SINGLE_ARG: _of_method,
    jsonplus.EXT_PYDANTIC_V1: _of_v1,
    jsonplus.EXT_PYDANTIC_V2: _of_model,
}
