-- Version 1. {schema} is the schema's quoted name; everything is one transaction with it.
--
-- Ids compare as bytes (collation "C"), which is the order of their code points: no two ids
-- are ever one, and a listing has the order that Python gives it.

CREATE TABLE {schema}.tenants (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE
);

-- One row a session, for ever: its epochs never start again. Rewritten by every save, so it
-- is kept small, and half of each page is left free for new versions of its rows.
CREATE TABLE {schema}.sessions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant bigint NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    head bigint NOT NULL DEFAULT 0,      -- seq of the log's last record
    crc bigint NOT NULL DEFAULT 0,       -- its checksum, which seeds the next one's
    begun bigint NOT NULL DEFAULT 0,     -- seq of this epoch's first record
    life bigint NOT NULL DEFAULT 0,      -- the epoch that began the log
    since bigint NOT NULL DEFAULT 1,     -- seq of the first record that was not trimmed away
    updated_at timestamptz,
    created_at timestamptz,
    released boolean NOT NULL DEFAULT false,
    deleted boolean NOT NULL DEFAULT false,
    owner text NOT NULL DEFAULT '',
    agent text COLLATE "C" NOT NULL,
    session text COLLATE "C" NOT NULL,
    UNIQUE (tenant, agent, session)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

-- One row a commit of a session: its records as sealed lines, never rewritten.
CREATE TABLE {schema}.commits (
    session bigint NOT NULL,
    first bigint NOT NULL,
    last bigint NOT NULL,
    epoch bigint NOT NULL,
    seed bigint NOT NULL,                -- checksum of the record before the first
    lines bytea NOT NULL,
    PRIMARY KEY (session, first)
);

CREATE TABLE {schema}.documents (
    session bigint NOT NULL,
    id bytea NOT NULL,                   -- SHA-256 of the name, which may be long
    name bytea NOT NULL,                 -- UTF-8
    data bytea NOT NULL,
    PRIMARY KEY (session, id)
);

CREATE TABLE {schema}.manifests (
    session bigint PRIMARY KEY,
    sealed bytea NOT NULL,
    title text,
    owner text COLLATE "C",
    tags text[] COLLATE "C" NOT NULL,
    turns bigint NOT NULL
);

CREATE TABLE {schema}.blobs (
    tenant bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    data bytea NOT NULL,
    renewed timestamptz NOT NULL,
    quarantined timestamptz,
    PRIMARY KEY (tenant, name)
);

CREATE TABLE {schema}.owners (
    owner text COLLATE "C" PRIMARY KEY,
    beat bigint NOT NULL,
    seen timestamptz NOT NULL,
    closed boolean NOT NULL DEFAULT false,
    host text NOT NULL,
    pid bigint NOT NULL
);

-- What others want of an owner, until its heartbeat has heard of it.
CREATE TABLE {schema}.requests (
    owner text COLLATE "C" NOT NULL,
    session bigint NOT NULL,
    mail boolean NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (owner, session, mail)
);

CREATE TABLE {schema}.inbox (
    session bigint NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,
    op bytea NOT NULL,                   -- SHA-256 of the op_id
    item bytea NOT NULL,                 -- the item, sealed
    PRIMARY KEY (session, id),
    UNIQUE (session, op)
);
