-- name: version_table
SELECT 1 FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = 'perdure'

-- name: version
SELECT version FROM {schema}.perdure

-- name: create_schema
CREATE SCHEMA IF NOT EXISTS {schema}

-- name: create_version_table
CREATE TABLE IF NOT EXISTS {schema}.perdure (version integer NOT NULL)

-- name: add_version
INSERT INTO {schema}.perdure VALUES (%s)

-- name: change_version
UPDATE {schema}.perdure SET version = %s
