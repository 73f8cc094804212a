-- Version 2: what was posted and could not be delivered.

CREATE TABLE {schema}.dead_letters (
    session bigint NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,
    op bytea NOT NULL,                   -- SHA-256 of the op_id
    letter bytea NOT NULL,               -- sealed JSON
    PRIMARY KEY (session, id),
    UNIQUE (session, op)
);
