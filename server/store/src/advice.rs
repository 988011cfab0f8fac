//! Advice in the store's errors.

use coldrise_block::{Error, ErrorKind};

/// For damage whose extent a verify shows.
pub(crate) const VERIFY: &str = "run coldrise verify to see what it affects";
/// For a damaged database.
pub(crate) const REPAIR: &str = "run coldrise repair";

/// Adds advice to an error of opening the database.
pub(crate) fn advise_repair(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Corrupt => error.advise(REPAIR),
        ErrorKind::NoSpace => error.context(
            "the drive is full, and opening the repository for writing takes up to 1 MiB (with \
             that, coldrise gc returns unreferenced space)",
        ),
        _ => error,
    }
}

/// Adds advice to the error of an operation that writes only to the repository's drive.
pub fn advise_room(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NoSpace => error.advise(
            "the repository's drive is full: free some space on it, or with 1 MiB left run \
             coldrise gc to make room",
        ),
        _ => error,
    }
}
