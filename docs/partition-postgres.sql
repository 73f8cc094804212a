-- Split the two large tables of a store by session, into 32 partitions each.
--
-- Stop every process that uses the store. Then, as the tables' owner, with the store's own schema:
--     PGOPTIONS='--search_path=perdure' psql --single-transaction -f partition-postgres.sql "$URL"
-- It rewrites both tables, so it takes as long as copying them, and needs as much room again.
-- Repeat the GRANTs that you made on the two tables.
DO $$
DECLARE
    parts constant int := 32;
    name text;
    part int;
BEGIN
    FOREACH name IN ARRAY ARRAY['commits', 'documents'] LOOP
        EXECUTE format('ALTER TABLE %I RENAME TO %I', name, name || '_whole');
        EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING STORAGE) '
                       'PARTITION BY HASH (session)', name, name || '_whole');
        EXECUTE format('ALTER TABLE %I ADD PRIMARY KEY (session, %I)', name,
                       CASE name WHEN 'commits' THEN 'first' ELSE 'id' END);
        FOR part IN 0 .. parts - 1 LOOP
            EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES WITH (MODULUS %s, REMAINDER %s)',
                           name || '_' || part, name, parts, part);
        END LOOP;
        EXECUTE format('INSERT INTO %I SELECT * FROM %I', name, name || '_whole');
        EXECUTE format('DROP TABLE %I', name || '_whole');
    END LOOP;
END $$;
