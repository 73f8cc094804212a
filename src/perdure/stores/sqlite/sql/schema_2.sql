-- Format 2: what was posted and could not be delivered.

CREATE TABLE dead_letter (
    session INTEGER NOT NULL,
    op_id TEXT NOT NULL,
    data BLOB NOT NULL           -- sealed JSON
);

CREATE UNIQUE INDEX dead_letter_by_op ON dead_letter (session, op_id);
