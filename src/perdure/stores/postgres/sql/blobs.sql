-- name: put_blobs
INSERT INTO {schema}.blobs AS b (tenant, name, data, renewed)
SELECT %s, p.name, p.data, now()
FROM unnest(%s::text[], %b::bytea[]) AS p (name, data) ORDER BY p.name
ON CONFLICT (tenant, name) DO UPDATE SET renewed = now(), quarantined = NULL,
    data = CASE WHEN b.data = excluded.data THEN b.data ELSE excluded.data END

-- name: get_blob
SELECT b.data FROM {schema}.tenants AS t JOIN {schema}.blobs AS b ON b.tenant = t.id
WHERE t.name = %s AND b.name = %s

-- name: blob_names
SELECT b.name FROM {schema}.tenants AS t JOIN {schema}.blobs AS b ON b.tenant = t.id
WHERE t.name = %s ORDER BY b.name

-- name: remove_blobs
WITH gone AS (
    DELETE FROM {schema}.blobs AS b USING {schema}.tenants AS t
    WHERE t.name = %s AND b.tenant = t.id AND b.name = ANY(%s::text[])
    RETURNING octet_length(b.data) AS size
)
SELECT coalesce(sum(size), 0)::bigint FROM gone

-- name: renew
WITH known AS (
    SELECT b.tenant, b.name FROM {schema}.tenants AS t JOIN {schema}.blobs AS b ON b.tenant = t.id
    WHERE t.name = %s AND b.name = ANY(%s::text[]) ORDER BY b.name FOR UPDATE OF b
)
UPDATE {schema}.blobs AS b SET renewed = now(), quarantined = NULL FROM known AS k
WHERE b.tenant = k.tenant AND b.name = k.name
RETURNING b.name

-- name: come_back
UPDATE {schema}.blobs AS b SET quarantined = NULL FROM {schema}.tenants AS t
WHERE t.name = %s AND b.tenant = t.id AND b.quarantined IS NOT NULL AND b.name = ANY(%s::text[])

-- name: sweep
-- One row is either moved away or removed: the one takes what the other does not look at.
WITH tenant AS (
    SELECT id FROM {schema}.tenants WHERE name = %(tenant)s
), removed AS (
    DELETE FROM {schema}.blobs AS b USING tenant AS t
    WHERE b.tenant = t.id AND b.quarantined <= now() - make_interval(secs => %(age)s)
        AND NOT b.name = ANY(%(reachable)s::text[])
        AND (%(among)s::text[] IS NULL OR b.name = ANY(%(among)s::text[]))
    RETURNING octet_length(b.data) AS size
), moved AS (
    UPDATE {schema}.blobs AS b SET quarantined = now() FROM tenant AS t
    WHERE b.tenant = t.id AND b.quarantined IS NULL
        AND b.renewed <= now() - make_interval(secs => %(age)s)
        AND NOT b.name = ANY(%(reachable)s::text[])
        AND (%(among)s::text[] IS NULL OR b.name = ANY(%(among)s::text[]))
    RETURNING 1
)
SELECT (SELECT count(*) FROM moved), (SELECT count(*) FROM removed),
    (SELECT coalesce(sum(size), 0)::bigint FROM removed)
