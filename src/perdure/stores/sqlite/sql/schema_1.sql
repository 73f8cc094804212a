-- Format 1. `sum` seals a row: a flipped bit in it is noticed. `session.id` comes from the
-- hash of the key, so that the log knows a session even where its own row is lost.

CREATE TABLE session (
    id INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    agent TEXT NOT NULL,
    session TEXT NOT NULL,
    epoch INTEGER NOT NULL,      -- the newest that was ever given; 0: only its inbox is used
    born INTEGER NOT NULL,       -- the epoch that this life began with
    owner TEXT NOT NULL,
    state INTEGER NOT NULL,      -- bits: 1 released, 2 deleted
    start INTEGER NOT NULL,      -- the seq of the epoch's record
    low INTEGER NOT NULL,        -- the log begins here; what was before it was removed
    head INTEGER NOT NULL,
    crc INTEGER NOT NULL,        -- of the log's last record
    sum INTEGER NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
);

CREATE UNIQUE INDEX session_by_key ON session (tenant, agent, session);

-- One row for each session and commit: whole groups, framed and chained as in a log file.
CREATE TABLE log (
    session INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    seed INTEGER NOT NULL,       -- the checksum of the record before `first`
    data BLOB NOT NULL
);

CREATE UNIQUE INDEX log_by_place ON log (session, first);

CREATE TABLE manifest (
    session INTEGER PRIMARY KEY,
    data BLOB NOT NULL,          -- sealed JSON
    owner TEXT,                  -- what a listing filters by, from `data`
    tags TEXT NOT NULL
);

CREATE TABLE document (
    session INTEGER NOT NULL,
    name TEXT NOT NULL,
    data BLOB NOT NULL
);

CREATE UNIQUE INDEX document_by_name ON document (session, name);

CREATE TABLE blob (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    renewed_at REAL NOT NULL,
    moved_at REAL,               -- since when it is out of the way
    data BLOB NOT NULL
);

CREATE UNIQUE INDEX blob_by_name ON blob (tenant, name);

CREATE TABLE inbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session INTEGER NOT NULL,
    op_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    payload BLOB NOT NULL,
    posted_at REAL NOT NULL,
    sum INTEGER NOT NULL
);

CREATE UNIQUE INDEX inbox_by_op ON inbox (session, op_id);

CREATE TABLE owner (
    id TEXT PRIMARY KEY,
    beat INTEGER NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL
);

-- What an owner is told at its next heartbeat.
CREATE TABLE letter (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    session INTEGER NOT NULL,
    mail INTEGER NOT NULL        -- 1: something was posted; 0: somebody wants the session
);

CREATE UNIQUE INDEX letter_by_owner ON letter (owner, session, mail);
