//! How many files a process may have open.

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

/// Raises the soft limit of open files to the hard one; to be called before a repository is
/// opened. The soft limit of 1024 is there for programs that use select(2). A server has
/// every file of the database open, and some for each session and connection.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Where the system refuses, the limit is as it was.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
