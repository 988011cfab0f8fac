-- How far behind the copies at a target were at most on one day (UTC).
CREATE TABLE copies_behind (
    repository TEXT NOT NULL,
    target TEXT NOT NULL,
    -- days since 1970
    day INTEGER NOT NULL,
    points INTEGER NOT NULL,
    bytes INTEGER,
    -- of the oldest point that was not there
    age_ms INTEGER NOT NULL,
    PRIMARY KEY (repository, target, day)
) STRICT;
