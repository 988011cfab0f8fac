-- Machines that jobs of kind protect-live do not follow: a user cancelled the run.
CREATE TABLE unfollowed (
    job TEXT NOT NULL,
    machine TEXT NOT NULL,
    PRIMARY KEY (job, machine)
) STRICT;
