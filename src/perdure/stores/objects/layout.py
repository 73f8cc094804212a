"""Which object has which name. Pure.

    s/<folder>/head                        who may write, what is folded, where the log's parts are
    s/<folder>/log/<life>/<seq>            one commit; its name is the place that it takes
    s/<folder>/seg/<epoch>-<first>-<id>    commits merged
    s/<folder>/doc/<epoch>-<id>            documents of one fold
    inbox/<folder>/<number>                what one ``post`` left
    dead-letters/<folder>/<hash>           an item that could not be delivered
    dir/<tenant>/<agent>/<session>-<life>  the directory: names in the order of their keys
    tenants/<tenant>                       a tenant whose name is too long for a name of objects
    blobs/<tenant>/<name>                  and quarantine/<tenant>/<name>
    owners/<owner>                         an owner's heartbeat
    asks/<owner>/<what>-<folder>           what others want of it

A folder is a hash of the whole key, so that no id can reach another's objects; the key itself
stands in the head and is verified. Names of the directory are hex, which keeps the order of ids,
and the first 100 bytes with a hash behind them where an id is longer: some services take no more
than 255 characters between two slashes.
"""

from __future__ import annotations

import hashlib
import zlib

from perdure.records.keys import SessionKey

_LONGEST = 100
"""Bytes of an id that its name holds whole."""
_DIGITS = 16
INBOX = "inbox/"
OWNERS = "owners/"
DEAD_LETTERS = "dead-letters/"
LIVES = 10
"""Digits of a life's number."""


def folder_of(key: SessionKey) -> str:
    """Return where a session's objects lie; ids hold no NUL, so this is one to one."""
    whole = f"{key.tenant}\0{key.agent}\0{key.session}".encode()
    return f"s/{hashlib.sha256(whole).hexdigest()[:40]}"


def log_prefix(folder: str, life: int) -> str:
    """Return the prefix of a life's commits."""
    return f"{folder}/log/{life:0{LIVES}d}/"


def log_name(folder: str, life: int, seq: int) -> str:
    """Return the name of the commit whose first record is *seq*."""
    return f"{folder}/log/{life:0{LIVES}d}/{seq:0{_DIGITS}d}"


def first_of(name: str) -> int:
    """Return the seq in a commit's name, -1 for what is no commit."""
    last = name.rpartition("/")[2]
    return int(last) if len(last) == _DIGITS and last.isdecimal() else -1


def life_seed(folder: str, life: int) -> int:
    """Return what seals the first record of a life to its session."""
    return zlib.crc32(f"{folder}/{life}".encode())


def inbox_name(folder: str, number: int) -> str:
    """Return the name of a post."""
    return f"{INBOX}{folder[2:]}/{number:0{_DIGITS}d}"


def dead_letters_prefix(folder: str) -> str:
    """Return the prefix of a session's dead letters."""
    return f"{DEAD_LETTERS}{folder[2:]}/"


def dead_letter_name(folder: str, op_id: str) -> str:
    """Return the name of a dead letter."""
    digest = hashlib.sha256(op_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{dead_letters_prefix(folder)}{digest}"


number_of = first_of


def hexed(text: str) -> str:
    """Return a name for a text: in the order of texts, as far as it holds them whole."""
    data = text.encode()
    if len(data) <= _LONGEST:
        return data.hex()
    return f"{data[:_LONGEST].hex()}~{hashlib.sha256(data).hexdigest()[:32]}"


def tenant_name(tenant: str) -> str:
    """Return the name of a tenant; no tenant has one, too."""
    return f"t{hexed(tenant)}"


def tenant_of(name: str) -> str | None:
    """Return the tenant that a name stands for, None where the name does not hold it whole."""
    return None if "~" in name else bytes.fromhex(name[1:]).decode()


def directory_prefix(tenant: str) -> str:
    """Return the prefix of a tenant's sessions in the directory."""
    return f"dir/{tenant_name(tenant)}/"


def directory_name(key: SessionKey, life: int) -> str:
    """Return a session's name in the directory; each life has one of its own."""
    names = f"{hexed(key.agent)}/{hexed(key.session)}"
    return f"{directory_prefix(key.tenant)}{names}-{life:0{LIVES}d}"


def key_of(name: str, tenant: str) -> SessionKey | None:
    """Return the key in a name of the directory, None where it does not hold it whole."""
    agent, last = name.split("/")[-2:]
    session = last.partition("-")[0]
    if "~" in agent or "~" in session:
        return None
    return SessionKey(bytes.fromhex(agent).decode(), bytes.fromhex(session).decode(), tenant)


def owner_name(owner: str) -> str:
    """Return the name of an owner's heartbeat."""
    return f"{OWNERS}{hashlib.sha256(owner.encode()).hexdigest()[:32]}"


def ask_name(owner: str, what: str, folder: str) -> str:
    """Return the name of a wish; the same wish has the same name."""
    return f"asks/{owner_name(owner)[7:]}/{what}-{folder[2:]}"
