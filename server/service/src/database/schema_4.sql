-- The space that a repository's folder takes, one row per day (UTC): the last sample of the day.
CREATE TABLE growth (
    repository TEXT NOT NULL,
    -- days since 1970
    day INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    occupied_bytes INTEGER NOT NULL,
    PRIMARY KEY (repository, day)
) STRICT;
