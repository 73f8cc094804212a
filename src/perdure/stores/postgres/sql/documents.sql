-- name: documents
-- One statement is one moment: a fold that ends meanwhile is seen whole, or not at all.
WITH found AS (
    SELECT s.id, s.head, m.sealed
    FROM {schema}.tenants AS t
    JOIN {schema}.sessions AS s ON s.tenant = t.id
    LEFT JOIN {schema}.manifests AS m ON m.session = s.id
    WHERE t.name = %(tenant)s AND s.agent = %(agent)s AND s.session = %(session)s
        AND NOT s.deleted
)
SELECT f.head, NULL::bytea, f.sealed FROM found AS f WHERE f.sealed IS NOT NULL
UNION ALL
SELECT f.head, d.name, d.data FROM found AS f
JOIN {schema}.documents AS d ON d.session = f.id
WHERE %(ids)b::bytea[] IS NULL OR d.id = ANY(%(ids)b::bytea[])

-- name: many_states
SELECT w.n, s.id, s.epoch, s.head, s.crc, s.begun, s.life, s.since, s.deleted, s.owner, s.released,
    s.draft
FROM unnest(%(tenants)s::text[], %(agents)s::text[], %(sessions)s::text[])
    WITH ORDINALITY AS w (tenant, agent, session, n)
JOIN {schema}.tenants AS t ON t.name = w.tenant COLLATE "C"
JOIN {schema}.sessions AS s ON s.tenant = t.id
    AND s.agent = w.agent COLLATE "C" AND s.session = w.session COLLATE "C"
WHERE NOT s.deleted

-- name: opening
-- What restores need, of one moment: of each session the manifest (no name), documents, the log's
-- rows after the last fold, and a row of nothing if something waits in the inbox. The manifest has
-- the number of the fold; where it cannot be read there, the rows begin at another record, which
-- the reader finds out. With `whole` it is the log alone, from its beginning.
WITH w AS MATERIALIZED (
    SELECT w.n, s.id
    FROM unnest(%(tenants)s::text[], %(agents)s::text[], %(sessions)s::text[])
        WITH ORDINALITY AS w (tenant, agent, session, n)
    JOIN {schema}.tenants AS t ON t.name = w.tenant COLLATE "C"
    JOIN {schema}.sessions AS s ON s.tenant = t.id
        AND s.agent = w.agent COLLATE "C" AND s.session = w.session COLLATE "C"
), m AS MATERIALIZED (
    SELECT w.n, m.sealed FROM w JOIN {schema}.manifests AS m ON m.session = w.id
    WHERE NOT %(whole)s
), folded AS MATERIALIZED (
    SELECT w.n, w.id, 1 + coalesce((
        SELECT substring(encode(m.sealed, 'escape') FROM '"as_of_seq":([0-9]{1,18})')::bigint
        FROM m WHERE m.n = w.n), 0) AS low
    FROM w
)
SELECT m.n, NULL::bytea, m.sealed AS data, NULL::bigint AS first, NULL::bigint AS last,
    NULL::bigint AS epoch, NULL::bigint AS seed
FROM m
UNION ALL
SELECT w.n, d.name, d.data, NULL, NULL, NULL, NULL
FROM w JOIN {schema}.documents AS d ON d.session = w.id
WHERE NOT %(whole)s AND (%(ids)b::bytea[] IS NULL OR d.id = ANY(%(ids)b::bytea[]))
UNION ALL
SELECT w.n, NULL, NULL, NULL, NULL, NULL, NULL FROM w
WHERE EXISTS (SELECT FROM {schema}.inbox AS i WHERE i.session = w.id)
UNION ALL
SELECT f.n, NULL, c.lines, c.first, c.last, c.epoch, c.seed
FROM folded AS f CROSS JOIN LATERAL (
    SELECT c.*, sum(octet_length(c.lines)) OVER (ORDER BY c.first) - octet_length(c.lines) AS before
    FROM (
        SELECT c.* FROM {schema}.commits AS c
        WHERE c.session = f.id AND c.first >= coalesce((
            SELECT max(b.first) FROM {schema}.commits AS b
            WHERE b.session = f.id AND b.first <= f.low), 0)
        ORDER BY c.first LIMIT %(limit)s
    ) AS c
) AS c
WHERE c.before < %(bytes)s
ORDER BY first

-- name: lock_epoch
SELECT s.id FROM {schema}.tenants AS t JOIN {schema}.sessions AS s ON s.tenant = t.id
WHERE t.name = %s AND s.agent = %s AND s.session = %s AND s.epoch = %s
    AND (NOT s.deleted OR s.draft IS NOT NULL)
FOR NO KEY UPDATE OF s

-- name: fold
-- Under the session's lock, and in one statement: no reader sees a part of it.
WITH held AS (
    SELECT s.id FROM {schema}.tenants AS t JOIN {schema}.sessions AS s ON s.tenant = t.id
    WHERE t.name = %(tenant)s AND s.agent = %(agent)s AND s.session = %(session)s
        AND s.epoch = %(epoch)s AND (NOT s.deleted OR s.draft IS NOT NULL)
        AND s.head >= %(as_of)s
    FOR NO KEY UPDATE OF s
), written AS (
    INSERT INTO {schema}.documents (session, id, name, data)
    SELECT h.id, d.* FROM held AS h,
        unnest(%(ids)b::bytea[], %(names)b::bytea[], %(data)b::bytea[]) AS d (id, name, data)
    ON CONFLICT (session, id) DO UPDATE SET name = excluded.name, data = excluded.data
), dropped AS (
    DELETE FROM {schema}.documents AS d USING held AS h
    WHERE d.session = h.id AND NOT d.id = ANY(%(listed)b::bytea[])
), described AS (
    INSERT INTO {schema}.manifests (session, sealed) SELECT h.id, %(sealed)s FROM held AS h
    ON CONFLICT (session) DO UPDATE SET sealed = excluded.sealed
), listed AS (
    UPDATE {schema}.sessions AS s SET turns = %(turns)s, belongs = %(owner)s
    FROM held AS h WHERE s.id = h.id AND (s.turns IS NULL OR s.head <= %(as_of)s)
    RETURNING s.id
), labeled AS (
    INSERT INTO {schema}.labels (session, title, tags)
    SELECT id, %(title)s, %(tags)s::text[] FROM listed
    ON CONFLICT (session) DO UPDATE SET title = excluded.title, tags = excluded.tags
)
SELECT id FROM held
