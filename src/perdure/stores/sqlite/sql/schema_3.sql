-- Format 3: logs that begin at any number, and copies. `session.state` has further bits: 4 while a
-- copy is a draft, 8 for a copy.

CREATE TABLE draft (
    session INTEGER PRIMARY KEY,
    data BLOB NOT NULL           -- sealed JSON: what it is a copy of
);
