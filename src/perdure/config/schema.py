"""Schema of persistence.yaml: templates, validation of its sections, and their values.

Each section's function takes a node and returns a value; problems have line and column. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from perdure._lib.options import meant
from perdure.archive.limits import MAX_PATHS, ArchiveLimits, fault_of_path
from perdure.autosave.options import Autosave
from perdure.config.yaml_reader import Problems, YamlNode, YamlProblem, kind_of, shown
from perdure.errors import CorruptRecordError, TemplateError, UnsupportedVersionError
from perdure.records.json import decode, decoder_of, reason
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


# The sections of persistence.yaml, validated to a `Declaration`
#
# msgspec converts the plain values of a section. Each error names a field: its node says where it
# is, the field is left out, and the rest is converted again, until all problems are found.


T = TypeVar("T", bound=msgspec.Struct)

FORMAT: Final = 1
"""The version of persistence.yaml that this release reads."""
MAX_KEYS: Final = 1000
MAX_NAME_BYTES: Final = 200

SECTIONS: Final = (
    *("version", "config", "persist_paths"),
    *("store", "autosave", "retention", "encryption"),
)
FIELDS: Final = ("description", "init", "on_new_session")
PRESETS: Final[Mapping[str, Autosave | None]] = {
    "default": Autosave(),
    "server": Autosave.server(),
    "write_through": Autosave.write_through(),
    "off": None,
}
_CURES: Final = {
    "init": "give text, a number, true, false or null, and set the rest in setup()",
    "on_new_session": "choose preserve or regenerate",
    "url_env": "give the name of an environment variable, such as DATABASE_URL",
    "key_env": "give the name of an environment variable, such as AGENTS_KEY",
}
"""Cures for fields of which msgspec says too little."""
_DRIVE: Final = re.compile(r"[A-Za-z]:")
_AUTHORITY: Final = re.compile(r"[^/?#]*://([^/?#]*)")
_SECRET: Final = re.compile(r"[?&](password|passwd|sslpassword)=[^&]")

Variable = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
OnNewSession = Literal["preserve", "regenerate"]
Initial = str | int | float | bool | None


class StorePlace(msgspec.Struct, frozen=True):
    """Place of the sessions: a URL, or the environment variable that holds it."""

    url: str = ""
    url_env: Variable = ""

    def __post_init__(self) -> None:
        if not self.url.strip() and not self.url_env:
            raise ValueError("it says nothing: give a path or a URL, or url_env: NAME")
        if _has_password(self.url):
            raise ValueError("it holds a password: write url_env: NAME, and set that variable")


def _has_password(url: str) -> bool:
    """Say whether a URL holds one, before its host or among its options."""
    match = _AUTHORITY.match(url)
    who = match[1].rpartition("@")[0] if match is not None else ""
    return bool(who.partition(":")[2] or _SECRET.search(url))


class KeySource(msgspec.Struct, frozen=True):
    """Source of the master key: an environment variable, or a file; never the key itself."""

    key_env: Variable = ""
    key_file: str = ""

    def __post_init__(self) -> None:
        if bool(self.key_env) == bool(self.key_file):
            raise ValueError("it has to name one key: give key_env: NAME or key_file: PATH")


class ConfigKey(msgspec.Struct, frozen=True, kw_only=True):
    """One declared value."""

    name: str
    description: str = ""
    init: Initial = None
    """Initial value; text is a template."""
    on_new_session: OnNewSession = "preserve"

    @property
    def is_regenerated(self) -> bool:
        """True if each new session gets a value of its own."""
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
    problems = Problems(source)
    sections = _fields(root, problems, "the file", SECTIONS)
    version = sections.pop("version", None)
    if root.is_mapping and version is None:
        problems.add(root, f"version is missing: begin the file with version: {FORMAT}")
    elif version is not None and type(version.value) is not int:
        problems.add(version, f"version is {kind_of(version)}: write version: {FORMAT}")
    elif version is not None and version.value != FORMAT:
        problem = f"version {version.value} is unknown: this release reads version {FORMAT}"
        problems.add(version, problem)
    parsed = {
        name: _SECTION[name](node, problems)
        for name, node in sections.items()
        if node.value is not None
    }
    problems.raise_if_any()
    return Declaration(**parsed, warnings=tuple(problems.warnings))


def _fields(
    node: YamlNode, problems: Problems, parent: str, known: tuple[str, ...]
) -> dict[str, YamlNode]:
    """Return a mapping's values by their keys, those that are known."""
    if not node.is_mapping:
        problems.add(node, f"{parent} is {kind_of(node)}: give a mapping of {', '.join(known)}")
        return {}
    fields: dict[str, YamlNode] = {}
    for name, (key, value) in node.value.items():
        if name in known:
            fields[name] = value
        else:
            cure = meant(name, known) or f"choose from {', '.join(known)}"
            problems.add(key, f"{shown(name)} is no key of {parent}: {cure}")
    return fields


def _section(
    node: YamlNode,
    kind: type[T],
    parent: str,
    problems: Problems,
    *,
    known: tuple[str, ...] = (),
    base: Mapping[str, Any] = {},
) -> T | None:
    """Return what a mapping's fields make, over those of a base; None if they do not fit.

    *known* are the fields that the file may have; all of the struct, if none are given.
    """
    before = len(problems.entries)
    fields = _fields(node, problems, parent, known or kind.__struct_fields__)
    values = {**base, **{name: field.plain for name, field in fields.items()}}
    decoder_of(kind)  # other threads may convert, too, and only that introduces a type safely
    while True:
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            fault, _, path = reason(error).partition(" - at `$.")
            fault, name = fault[0].lower() + fault[1:], path.removesuffix("`")
            if name:
                del values[name]
                fault = f"{name}: {fault}"
                if name in _CURES:
                    plain = fields[name].plain
                    found = shown(plain) if isinstance(plain, str) else kind_of(fields[name])
                    fault = f"{name} is {found}: {_CURES[name]}"
                problems.add(fields[name], f"{parent}: {fault}")
                continue
            if len(problems.entries) == before:  # else it may only lack what was left out
                problems.add(node, f"{parent}: {fault}")
            return None


def _store(node: YamlNode, problems: Problems) -> StorePlace | None:
    """Return where sessions are kept; text is the URL."""
    known = "url_env"
    if not node.is_mapping:
        known = "url"
        node = YamlNode({known: (node, node)}, node.line, node.column)
    return _section(node, StorePlace, "store", problems, known=(known,))


def _encryption(node: YamlNode, problems: Problems) -> KeySource | None:
    """Return where the master key is."""
    return _section(node, KeySource, "encryption", problems)


def _autosave(node: YamlNode, problems: Problems) -> Autosave | UnsetType | None:
    """Return when sessions save themselves: a preset, or settings that change one."""
    preset, settings = node, YamlNode({}, node.line, node.column)
    if node.is_mapping:
        pairs = dict(node.value)
        _, preset = pairs.pop("preset", (node, YamlNode("default", node.line, node.column)))
        settings = YamlNode(pairs, node.line, node.column)
    if not isinstance(preset.value, str) or preset.value not in PRESETS:
        value = shown(preset.value) if isinstance(preset.value, str) else kind_of(preset)
        cure = f"choose from {', '.join(PRESETS)}, or give settings"
        problems.add(preset, f"autosave is {value}: {cure}")
        return UNSET
    base = PRESETS[preset.value]
    if base is None:
        if settings.value:
            problems.add(node, "autosave is off, and has settings: choose")
        return None
    values = msgspec.structs.asdict(base)
    return _section(settings, Autosave, "autosave", problems, base=values) or UNSET


def _retention(node: YamlNode, problems: Problems) -> Retention | None:
    """Return what of the history is kept."""
    retention = _section(node, Retention, "retention", problems)
    if retention is not None and retention.expire_days == 0:
        cure = "leave expire_days out to forget none"
        problems.add(node.value["expire_days"][1], f"0 would forget every session: {cure}")
    return retention


def _persist_paths(node: YamlNode, problems: Problems) -> tuple[str, ...]:
    """Return folders below the agent's home, without the closing slash."""
    if not isinstance(node.value, tuple):
        problems.add(node, f"persist_paths is {kind_of(node)}: give a list of folders")
        return ()
    if len(node.value) > MAX_PATHS:
        problems.add(node, f"{len(node.value)} persist_paths; at most {MAX_PATHS} are allowed")
        return ()
    paths: dict[str, YamlNode] = {}
    for item in node.value:
        if not isinstance(item.value, str):
            problems.add(item, f"a path is {kind_of(item)}: give text, such as data/")
            continue
        path = "/".join(step for step in item.value.split("/") if step not in {"", "."})
        fault = fault_of_path(path, ArchiveLimits())
        if item.value.startswith(("/", "~")) or _DRIVE.match(item.value):
            fault = "it does not begin in the agent's home: name a folder below it"
        elif not path:
            fault = "it is the whole home: name the folders in it that are to persist"
        elif path in paths:
            fault = f"it is a duplicate, first named on line {paths[path].line}"
        if fault is not None:
            problems.add(item, f"the path {shown(item.value)}: {fault}")
        paths.setdefault(path, item)
    return tuple(paths)


def _config(node: YamlNode, problems: Problems) -> dict[str, ConfigKey]:
    if not node.is_mapping:
        problems.add(node, f"config is {kind_of(node)}: give a mapping of names")
        return {}
    if len(node.pairs) > MAX_KEYS:
        problems.add(node, f"{len(node.pairs)} keys; at most {MAX_KEYS} are allowed")
        return {}
    keys: dict[str, ConfigKey] = {}
    for name, value in node.pairs:
        _check_name(name, problems)
        keys[name.value] = _key(name.value, value, problems)
        if redact({name.value: "x"})[1]:
            cure = "keep it out of the agent's state, in an environment variable"
            problems.warn(name, f"{shown(name.value)} looks like a credential: {cure}")
    return keys


def _check_name(name: YamlNode, problems: Problems) -> None:
    text: str = name.value
    if not text.strip():
        problems.add(name, "the name of this key is empty: give it at least one character")
    elif len(text.encode()) > MAX_NAME_BYTES:
        problems.add(name, f"this name is longer than {MAX_NAME_BYTES} bytes: shorten it")
    elif not text.isprintable():
        problems.add(name, "this name holds a control character: remove it")


def _key(name: str, node: YamlNode, problems: Problems) -> ConfigKey:
    if node.value is None:
        return ConfigKey(name=name)
    parent, base = f"config.{name[:60]}", {"name": name}
    key = _section(node, ConfigKey, parent, problems, known=FIELDS, base=base)
    assert key is not None  # nothing but its fields can be wrong
    if isinstance(key.init, str):
        try:
            check(key.init)
        except TemplateError as error:
            problems.add(node.value["init"][1], f"{parent}: {error}", TemplateError)
    return key


_SECTION: Final[dict[str, Any]] = {
    "config": _config,
    "persist_paths": _persist_paths,
    "store": _store,
    "autosave": _autosave,
    "retention": _retention,
    "encryption": _encryption,
}


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
