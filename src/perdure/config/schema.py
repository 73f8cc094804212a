"""Schema of persistence.yaml: templates, validation of its sections, and their values.

Each section's function takes a node and returns a value; problems have line and column.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from perdure.archive.limits import MAX_PATHS
from perdure.autosave.options import Autosave
from perdure.config.yaml_reader import Problems, YamlNode, YamlProblem, kind_of, shown
from perdure.errors import ConfigError, CorruptRecordError, TemplateError, UnsupportedVersionError
from perdure.records.json import decode
from perdure.records.values import redact
from perdure.session.retention import Retention

# Templates of initial values: text with ``{{ variables }}`` of four names, and no engine


VARIABLES: Final = ("agent_name", "random_id", "timestamp", "uuid")
"""Names that a template may use."""


_TEMPLATE_VARIABLE: Final = re.compile(r"\{\{([^{}]*)\}\}")


def check(text: str) -> None:
    """Refuse a template that could not be evaluated.

    Raises:
        TemplateError: A variable is unknown, or does not end.

    """
    for name in names_in(text):
        if name not in VARIABLES:
            known = ", ".join(VARIABLES)
            raise TemplateError(
                f"the template names {name[:60]!r}, which is no variable: choose from {known}",
                variable=name[:60],
            )
    if "{{" in _TEMPLATE_VARIABLE.sub("", text):
        raise TemplateError("the template has a {{ without its }}, or braces in between: close it")


def names_in(text: str) -> list[str]:
    """Return the variables that a template names, in their order.

    >>> names_in("{{ agent_name }}::{{random_id}}")
    ['agent_name', 'random_id']
    """
    return [match[1].strip() for match in _TEMPLATE_VARIABLE.finditer(text)]


def evaluate(text: str, variables: Mapping[str, Callable[[], str]]) -> str:
    """Return a template's text; each occurrence of a variable is made once, by itself.

    >>> evaluate("{{ agent_name }}!", {"agent_name": lambda: "gus"})
    'gus!'
    """
    return _TEMPLATE_VARIABLE.sub(lambda match: variables[match[1].strip()](), text)


T = TypeVar("T")
U = TypeVar("U")

MAX_PATH_BYTES: Final = 1024
PRESETS: Final[Mapping[str, Autosave | None]] = {
    "default": Autosave(),
    "server": Autosave.server(),
    "write_through": Autosave.write_through(),
    "off": None,
}
_DRIVE: Final = re.compile(r"[A-Za-z]:")
_AUTHORITY: Final = re.compile(r"[^/?#]*://([^/?#]*)")
_SECRET: Final = re.compile(r"[?&](password|passwd|sslpassword)=[^&]")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AUTOSAVE: Final = {
    "debounce": float,
    "max_delay": float,
    "on_turn_end": bool,
    "max_bytes": int,
    "max_records": int,
}
_RETENTION: Final = {"keep_turns": int, "keep_days": float, "expire_days": float}


class StorePlace(msgspec.Struct, frozen=True):
    """Place of the sessions: a URL, or the environment variable that holds it."""

    url: str | None = None
    url_env: str | None = None


class KeySource(msgspec.Struct, frozen=True):
    """Source of the master key: an environment variable, or a file."""

    key_env: str | None = None
    key_file: str | None = None


def persist_paths_in(node: YamlNode, problems: Problems) -> tuple[str, ...]:
    """Return folders below the agent's home, without the closing slash."""
    if not isinstance(node.value, tuple) or node.is_mapping:
        problems.add(node, f"persist_paths is {kind_of(node)}: give a list of folders")
        return ()
    if len(node.value) > MAX_PATHS:
        problems.add(node, f"{len(node.value)} persist_paths; at most {MAX_PATHS} are allowed")
        return ()
    paths: dict[str, YamlNode] = {}
    for item in node.value:
        path = _path(item, problems)
        if path is not None and path in paths:
            line = paths[path].line
            problems.add(item, f"duplicate path {shown(path)}, first named on line {line}")
        elif path is not None:
            paths[path] = item
    return tuple(paths)


def _path(node: YamlNode, problems: Problems) -> str | None:
    text = node.value
    if not isinstance(text, str):
        problems.add(node, f"a path is {kind_of(node)}: give text, such as data/")
        return None
    reason = _unfit(text)
    if reason is not None:
        problems.add(node, f"the path {shown(text)} {reason}")
        return None
    return "/".join(step for step in text.split("/") if step not in {"", "."})


def _unfit(path: str) -> str | None:
    """Return why a path cannot be one below the agent's home."""
    steps = [step for step in path.split("/") if step not in {"", "."}]
    rules = (
        (len(path.encode()) > MAX_PATH_BYTES, f"is longer than {MAX_PATH_BYTES} bytes: shorten it"),
        (any(ord(char) < 32 or ord(char) == 127 for char in path), "holds a control character"),
        ("\\" in path, "holds a backslash: divide by /"),
        (path.startswith("/"), "is absolute: name a folder below the agent's home"),
        (path.startswith("~"), "begins with ~: name a folder below the agent's home"),
        (_DRIVE.match(path) is not None, "names a drive: name a folder below the agent's home"),
        (".." in steps, "leads out by ..: name a folder below the agent's home"),
        (not steps, "is the whole home: name the folders in it that are to persist"),
    )
    return next((reason for broken, reason in rules if broken), None)


def store_in(node: YamlNode, problems: Problems) -> StorePlace | None:
    """Return where sessions are kept."""
    if node.is_mapping:
        fields = _fields(node, problems, "store", ("url_env",))
        name = _variable(fields, "url_env", problems)
        if not node.pairs:
            problems.add(node, "store says nothing: give a URL, or url_env: NAME_OF_A_VARIABLE")
        return None if name is None else StorePlace(url_env=name)
    if not isinstance(node.value, str) or not node.value.strip():
        problems.add(
            node, f"store is {kind_of(node)}: give a path or a URL, such as file:./sessions"
        )
        return None
    if _has_password(node.value):
        problems.add(node, "store holds a password: write url_env: NAME, and set that variable")
        return None
    return StorePlace(url=node.value)


def _has_password(url: str) -> bool:
    """Say whether a URL holds one, before its host or among its options."""
    match = _AUTHORITY.match(url)
    who = match[1].rpartition("@")[0] if match is not None else ""
    return bool(who.partition(":")[2] or _SECRET.search(url))


def encryption_in(node: YamlNode, problems: Problems) -> KeySource | None:
    """Return where the master key is; the key itself has no place in a file."""
    known = ("key_env", "key_file")
    if not node.is_mapping:
        problem = f"encryption is {kind_of(node)}: give key_env: NAME, or key_file: PATH"
        problems.add(node, f"{problem}; the key itself does not belong here")
        return None
    if any(key.value == "key" for key, _ in node.pairs):
        problems.add(node, "encryption holds a key, which does not belong here: name its variable")
        return None
    fields = _fields(node, problems, "encryption", known)
    if set(fields) == set(known):
        problems.add(node, "encryption names two keys: give key_env or key_file, not both")
        return None
    if "key_file" in fields:
        path = fields["key_file"]
        if not isinstance(path.value, str) or not path.value:
            problems.add(path, f"key_file is {kind_of(path)}: give the path of a file")
            return None
        return KeySource(key_file=path.value)
    if not node.pairs:
        problems.add(node, "encryption names no key: give key_env: NAME, or key_file: PATH")
    name = _variable(fields, "key_env", problems)
    return None if name is None else KeySource(key_env=name)


def autosave_in(node: YamlNode, problems: Problems) -> Autosave | UnsetType | None:
    """Return when sessions save themselves: a preset, or settings that change one."""
    if not node.is_mapping:
        return _preset(node, problems)
    fields = _fields(node, problems, "autosave", ("preset", *_AUTOSAVE))
    preset = fields.pop("preset", None)
    base = PRESETS["default"] if preset is None else _preset(preset, problems)
    settings = _typed(fields, "autosave", _AUTOSAVE, problems)
    if isinstance(base, UnsetType) or (base is None and not settings):
        return base
    if base is None:
        problems.add(node, "autosave is off, and has settings: choose")
        return UNSET
    merged = msgspec.structs.asdict(base) | settings
    return _made(node, problems, lambda: Autosave(**merged), UNSET)


def _preset(node: YamlNode, problems: Problems) -> Autosave | UnsetType | None:
    if isinstance(node.value, str) and node.value in PRESETS:
        return PRESETS[node.value]
    value = shown(node.value) if isinstance(node.value, str) else kind_of(node)
    problems.add(node, f"autosave is {value}: choose from {', '.join(PRESETS)}, or give settings")
    return UNSET


def retention_in(node: YamlNode, problems: Problems) -> Retention | None:
    """Return what of the history is kept."""
    fields = _fields(node, problems, "retention", tuple(_RETENTION))
    settings = _typed(fields, "retention", _RETENTION, problems)
    if settings.get("expire_days") == 0:
        problems.add(
            fields["expire_days"],
            "0 would forget every session: leave expire_days out to forget none",
        )
    return _made(node, problems, lambda: Retention(**settings), None) if settings else None


def _made(node: YamlNode, problems: Problems, make: Callable[[], T], otherwise: U) -> T | U:
    """Return what the options' own class makes of the settings."""
    try:
        return make()
    except ConfigError as error:
        problems.add(node, str(error))
        return otherwise


def _fields(
    node: YamlNode, problems: Problems, parent: str, known: tuple[str, ...]
) -> dict[str, YamlNode]:
    """Return a mapping's values by their keys, those that are known."""
    if not node.is_mapping:
        problems.add(node, f"{parent} is {kind_of(node)}: give a mapping of {', '.join(known)}")
        return {}
    fields: dict[str, YamlNode] = {}
    for key, value in node.pairs:
        if key.value in known:
            fields[key.value] = value
        else:
            problems.unknown(key, parent, known)
    if not node.pairs and parent == "retention":
        problems.add(node, f"{parent} says nothing: give one of {', '.join(known)}")
    return fields


def _typed(
    fields: Mapping[str, YamlNode], parent: str, types: Mapping[str, type], problems: Problems
) -> dict[str, Any]:
    """Return settings whose values are of the types that they should be of."""
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    settings: dict[str, Any] = {}
    for name, node in fields.items():
        wanted = types[name]
        fits = type(node.value) is wanted or (wanted is float and type(node.value) is int)
        if fits:
            settings[name] = wanted(node.value)
        else:
            problems.add(node, f"{parent}: {name} is {kind_of(node)}: it must be {words[wanted]}")
    return settings


def _variable(fields: Mapping[str, YamlNode], name: str, problems: Problems) -> str | None:
    node = fields.get(name)
    if node is None:
        return None
    if not isinstance(node.value, str) or not _VARIABLE.fullmatch(node.value):
        problems.add(node, f"{name} names no environment variable: give a name such as PERDURE_KEY")
        return None
    return node.value


# Sections of persistence.yaml, validated to a `Declaration`


FORMAT: Final = 1
"""The version of persistence.yaml that this release reads."""
MAX_KEYS: Final = 1000
MAX_NAME_BYTES: Final = 200

SECTIONS: Final = (
    *("version", "config", "persist_paths"),
    *("store", "autosave", "retention", "encryption"),
)
FIELDS: Final = ("description", "init", "on_new_session")

OnNewSession = Literal["preserve", "regenerate"]
Initial = str | int | float | bool | None


class ConfigKey(msgspec.Struct, frozen=True, kw_only=True):
    """One declared value."""

    name: str
    description: str = ""
    init: Initial = None
    """Initial value; text is a template."""
    on_new_session: OnNewSession = "preserve"

    @property
    def is_regenerated(self) -> bool:
        """Whether each new session gets a value of its own."""
        return self.on_new_session == "regenerate"


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a persistence.yaml."""

    config: dict[str, ConfigKey] = {}
    persist_paths: tuple[str, ...] = ()
    """Folders below the agent's home, as ``a/b``: relative, and never leading out."""
    store: StorePlace | None = None
    autosave: Autosave | UnsetType | None = UNSET
    """None for off; UNSET where the file says nothing."""
    retention: Retention | None = None
    encryption: KeySource | None = None
    warnings: tuple[YamlProblem, ...] = ()
    """Declarations that are allowed, but unwise."""


def declaration_of(root: YamlNode, source: str) -> Declaration:
    """Return what a file declares.

    Raises:
        ConfigError: Something is invalid; ``facts["problems"]`` holds all of it.
        TemplateError: The first thing that does not fit is a template.

    """
    problems, warnings = Problems(source), Problems(source, most=MAX_KEYS + 1)
    if not root.is_mapping:
        problems.add(root, f"the file is {kind_of(root)}: begin it with version: {FORMAT}")
        problems.raise_if_any()
    sections: dict[str, YamlNode] = {}
    for key, value in root.pairs:
        if key.value in SECTIONS:
            sections[key.value] = value
        else:
            problems.unknown(key, "persistence.yaml", SECTIONS)
    _check_version(root, sections.pop("version", None), problems)
    parsed = {
        name: _SECTION[name](node, problems)
        for name, node in sections.items()
        if name in _SECTION and node.value is not None
    }
    if "config" in sections:
        parsed["config"] = _config(sections["config"], problems, warnings)
    problems.raise_if_any()
    return Declaration(**parsed, warnings=tuple(warnings.entries))


_SECTION: Final[dict[str, Any]] = {
    "persist_paths": persist_paths_in,
    "store": store_in,
    "autosave": autosave_in,
    "retention": retention_in,
    "encryption": encryption_in,
}


def _check_version(root: YamlNode, version: YamlNode | None, problems: Problems) -> None:
    if version is None:
        problems.add(root, f"version is missing: begin the file with version: {FORMAT}")
    elif type(version.value) is not int:
        problems.add(version, f"version is {kind_of(version)}: write version: {FORMAT}")
    elif version.value != FORMAT:
        problems.add(
            version, f"version {version.value} is unknown: this release reads version {FORMAT}"
        )


def _config(node: YamlNode, problems: Problems, warnings: Problems) -> dict[str, ConfigKey]:
    if node.value is None:
        return {}
    if not node.is_mapping:
        problems.add(node, f"config is {kind_of(node)}: give a mapping of names")
        return {}
    if len(node.pairs) > MAX_KEYS:
        problems.add(node, f"{len(node.pairs)} keys; at most {MAX_KEYS} are allowed")
        return {}
    keys: dict[str, ConfigKey] = {}
    for name, value in node.pairs:
        _check_name(name, problems)
        key = _key(name, value, problems)
        if redact({name.value: "x"})[1]:
            problem = (
                f"{shown(name.value)} looks like a credential: keep it out of the agent's state"
            )
            warnings.add(name, f"{problem}, in an environment variable")
        keys[name.value] = key
    return keys


def _check_name(name: YamlNode, problems: Problems) -> None:
    text: str = name.value
    if not text.strip():
        problems.add(name, "the name of this key is empty: give it at least one character")
    elif len(text.encode()) > MAX_NAME_BYTES:
        problems.add(name, f"this name is longer than {MAX_NAME_BYTES} bytes: shorten it")
    elif not text.isprintable():
        problems.add(name, "this name holds a control character: remove it")


def _key(name: YamlNode, node: YamlNode, problems: Problems) -> ConfigKey:
    parent = f"config.{name.value[:60]}"
    if node.value is None:
        return ConfigKey(name=name.value)
    if not node.is_mapping:
        problems.add(node, f"{parent} is {kind_of(node)}: give a mapping, such as {{init: …}}")
        return ConfigKey(name=name.value)
    fields: dict[str, Any] = {}
    for key, value in node.pairs:
        if key.value not in FIELDS:
            problems.unknown(key, parent, FIELDS)
        elif _fits(key.value, value, parent, problems):
            fields[key.value] = value.value
    return ConfigKey(name=name.value, **fields)


def _fits(field: str, node: YamlNode, parent: str, problems: Problems) -> bool:
    value, before = node.value, len(problems.entries)
    if field == "description" and not isinstance(value, str):
        problems.add(node, f"{parent}: description is {kind_of(node)}: give text")
    elif field == "on_new_session" and value not in ("preserve", "regenerate"):
        actual = shown(value) if isinstance(value, str) else kind_of(node)
        problems.add(node, f"{parent}: on_new_session is {actual}: choose preserve or regenerate")
    elif field == "init" and isinstance(value, tuple):
        cure = "give text, a number, true, false or null, and set the rest in setup()"
        problems.add(node, f"{parent}: init is {kind_of(node)}: {cure}")
    elif field == "init" and isinstance(value, str):
        try:
            check(value)
        except TemplateError as error:
            problems.add(node, f"{parent}: {error}", TemplateError)
    return len(problems.entries) == before


def name_of(root: YamlNode, source: str) -> str | None:
    """Return the name in an agent.yaml, None if it says none; everything else there is others'.

    Raises:
        ConfigError: The name is no text, or empty.

    """
    problems = Problems(source)
    if not root.is_mapping:
        problems.add(root, "the file is no mapping: give one with a name")
        problems.raise_if_any()
    for key, value in root.pairs:
        if key.value == "name":
            if isinstance(value.value, str) and value.value.strip():
                return value.value.strip()
            actual = "not text" if value.value is None else kind_of(value)
            problems.add(value, f"name is {actual}: give text", ConfigError)
            problems.raise_if_any()
    return None


# Values of an agent's config, from the declared keys and the saved values


DOCUMENT: Final = "_persistence"
"""The state, and the file, that holds the values; no other state may have this name."""


class StoredValues(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stored values of an agent's config."""

    version: int = FORMAT
    values: dict[str, msgspec.Raw] = {}
    """JSON by key."""
    orphans: dict[str, msgspec.Raw] = {}
    """Values of keys that are declared no more: kept, and not shown."""
    session: str | None = None
    """The session that they were last begun for."""

    def value(self, key: str) -> Any:
        """Return a copy of a value, None where there is none."""
        raw = self.values.get(key)
        return None if raw is None else decode(bytes(raw))


def saved_in(data: bytes | None, place: str) -> StoredValues:
    """Return what stored bytes hold; nothing for none.

    Raises:
        CorruptRecordError: They are damaged.
        UnsupportedVersionError: A newer release wrote them.

    """
    if data is None:
        return StoredValues()
    try:
        head = decode(data, _Head)
        if head.version <= FORMAT:
            return decode(data, StoredValues)
    except CorruptRecordError as error:
        raise CorruptRecordError(
            f"{place} is damaged, and was left as it is: mend it, or move it away ({error})",
            path=place,
        ) from None
    raise UnsupportedVersionError(
        f"{place} has version {head.version}, this release reads up to {FORMAT}: "
        "use a newer perdure",
        path=place,
        version=head.version,
    )


class _Head(msgspec.Struct):
    version: int = FORMAT


def written(saved: StoredValues) -> Any:
    """Return what is to be written, as JSON values: all of its fields, with its version."""
    return decode(msgspec.json.encode({**msgspec.structs.asdict(saved), "version": FORMAT}))


def shared(config: Mapping[str, ConfigKey]) -> dict[str, ConfigKey]:
    """Return the keys whose values all of an agent's sessions share."""
    return {name: key for name, key in config.items() if not key.is_regenerated}


def own(config: Mapping[str, ConfigKey]) -> dict[str, ConfigKey]:
    """Return the keys whose values each session has for itself."""
    return {name: key for name, key in config.items() if key.is_regenerated}


def begun(
    saved: StoredValues,
    config: Mapping[str, ConfigKey],
    *,
    is_new: bool,
    initial: Callable[[ConfigKey], Any],
    session: str | None = None,
    keep: Callable[[str], bool] = lambda _: False,
) -> StoredValues:
    """Return the values to save when a session begins or resumes; *saved* itself for no change.

    Args:
        saved: What is stored.
        config: The keys that are declared.
        is_new: Whether the session is a new one, and not resumed.
        initial: Returns the initial value of a key.
        session: What to note as the session.
        keep: Whether the value of a key that is not among those declared stays in use.

    """
    known = {**saved.orphans, **saved.values}
    values = {
        name: known[name]
        if name in known and not (is_new and key.is_regenerated)
        else msgspec.Raw(msgspec.json.encode(initial(key)))
        for name, key in config.items()
    }
    others = {name: raw for name, raw in known.items() if name not in config}
    retained = {name: raw for name, raw in others.items() if name in saved.values and keep(name)}
    orphans = {name: raw for name, raw in others.items() if name not in retained}
    new = StoredValues(FORMAT, values | retained, orphans, session)
    return saved if new == saved else new


def changed(saved: StoredValues, key: str, value: bytes) -> StoredValues:
    """Return what is to be saved once a key has a value."""
    return msgspec.structs.replace(saved, values={**saved.values, key: msgspec.Raw(value)})


class ConfigPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to one place."""

    added: tuple[str, ...] = ()
    """Keys that get their initial values."""
    orphaned: tuple[str, ...] = ()
    """Keys whose values would be put aside."""
    returned: tuple[str, ...] = ()
    """Keys whose values come back from there."""

    def __bool__(self) -> bool:
        return bool(self.added or self.orphaned or self.returned)


def plan(
    saved: StoredValues,
    config: Mapping[str, ConfigKey],
    keep: Callable[[str], bool] = lambda _: False,
) -> ConfigPlan:
    """Return what `begun` changes when a session resumes with these declarations."""
    return ConfigPlan(
        added=tuple(
            name for name in config if name not in saved.values and name not in saved.orphans
        ),
        orphaned=tuple(name for name in saved.values if name not in config and not keep(name)),
        returned=tuple(
            name for name in config if name in saved.orphans and name not in saved.values
        ),
    )
