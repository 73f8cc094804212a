-- name: append
-- Heads move only from where the sender says they are, under its epoch; the rows of those that
-- moved follow in the same transaction. Each statement sends its ids in order: no deadlocks.
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest(
        $1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[],
        $7::bigint[]
    ) WITH ORDINALITY AS w (id, epoch, head, seed, last, crc, turns, n)
), moved AS (
    UPDATE {schema}.sessions AS s
    SET head = w.last, crc = w.crc, updated_at = now(), turns = coalesce(w.turns, s.turns),
        belongs = CASE WHEN ($9::bytea[])[w.n] = '' THEN s.belongs
            ELSE convert_from(($9::bytea[])[w.n], 'UTF8')::json ->> 'owner' END
    FROM wanted AS w
    WHERE s.id = w.id AND s.epoch = w.epoch AND s.head = w.head AND s.crc = w.seed
        AND (NOT s.deleted OR s.draft IS NOT NULL)
    RETURNING s.id, w.head + 1 AS first, w.last, w.epoch, w.seed, w.n
), added AS (
    INSERT INTO {schema}.commits (session, first, last, epoch, seed, lines)
    SELECT id, first, last, epoch, seed, ($8::bytea[])[n] FROM moved
), labeled AS (
    INSERT INTO {schema}.labels (session, title, tags)
    SELECT id, l ->> 'title', ARRAY(SELECT json_array_elements_text(l -> 'tags'))
    FROM (
        SELECT id, convert_from(($9::bytea[])[n], 'UTF8')::json AS l
        FROM moved WHERE ($9::bytea[])[n] <> ''
    ) AS l
    ON CONFLICT (session) DO UPDATE SET title = excluded.title, tags = excluded.tags
)
SELECT id FROM moved

-- name: state
SELECT s.id, s.epoch, s.head, s.crc, s.begun, s.life, s.since, s.deleted, s.owner,
    s.released, s.draft
FROM {schema}.tenants AS t JOIN {schema}.sessions AS s ON s.tenant = t.id
WHERE t.name = %(tenant)s AND s.agent = %(agent)s AND s.session = %(session)s

-- name: forward
-- Whole rows from the one that holds record `low` up to `high`, some megabytes of them.
WITH s AS MATERIALIZED (
    SELECT s.id FROM {schema}.tenants AS t JOIN {schema}.sessions AS s ON s.tenant = t.id
    WHERE t.name = %(tenant)s AND s.agent = %(agent)s AND s.session = %(session)s
)
SELECT first, last, epoch, seed, lines FROM (
    SELECT c.*, sum(octet_length(c.lines)) OVER (ORDER BY c.first) - octet_length(c.lines) AS before
    FROM (
        SELECT c.* FROM {schema}.commits AS c
        WHERE c.session = (SELECT id FROM s) AND c.first <= %(high)s AND c.first >= coalesce((
            SELECT max(b.first) FROM {schema}.commits AS b
            WHERE b.session = (SELECT id FROM s) AND b.first <= %(low)s), 0)
        ORDER BY c.first LIMIT %(rows)s
    ) AS c
) AS c
WHERE before < %(bytes)s ORDER BY first

-- name: backward
WITH s AS MATERIALIZED (
    SELECT s.id FROM {schema}.tenants AS t JOIN {schema}.sessions AS s ON s.tenant = t.id
    WHERE t.name = %(tenant)s AND s.agent = %(agent)s AND s.session = %(session)s
)
SELECT first, last, epoch, seed, lines FROM (
    SELECT c.*,
        sum(octet_length(c.lines)) OVER (ORDER BY c.first DESC) - octet_length(c.lines) AS before
    FROM (
        SELECT c.* FROM {schema}.commits AS c
        WHERE c.session = (SELECT id FROM s) AND c.first <= %(high)s AND c.first >= coalesce((
            SELECT max(b.first) FROM {schema}.commits AS b
            WHERE b.session = (SELECT id FROM s) AND b.first <= %(low)s), 0)
        ORDER BY c.first DESC LIMIT %(rows)s
    ) AS c
) AS c
WHERE before < %(bytes)s ORDER BY first DESC

-- name: trim
WITH kept AS (
    SELECT max(first) AS first FROM {schema}.commits
    WHERE session = %(id)s AND first <= %(below)s
), gone AS (
    DELETE FROM {schema}.commits AS c USING kept AS k
    WHERE c.session = %(id)s AND c.first < k.first
    RETURNING octet_length(c.lines) AS size
), moved AS (
    UPDATE {schema}.sessions AS s SET since = k.first FROM kept AS k
    WHERE s.id = %(id)s AND k.first > s.since
)
SELECT coalesce(sum(size), 0)::bigint FROM gone
