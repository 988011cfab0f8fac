//! The exit codes of the command line, which are also in the results of runs. The whole table is here.

use coldrise_block::ErrorKind;

/// A booted machine provably failed to come up.
pub const BOOT_FAILED: u8 = 13;
/// A booted machine gave no proof that it came up, and none that it failed.
pub const BOOT_NOT_PROVEN: u8 = 14;

/// The exit code of a command that failed with this kind.
pub fn exit_code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::InvalidInput => 2,
        ErrorKind::Incomplete => 3,
        ErrorKind::NoRepository => 10,
        ErrorKind::Busy => 11,
        ErrorKind::WrongPassphrase => 12,
        ErrorKind::Interrupted => 130,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_exit_code_has_one_meaning() {
        let codes = ErrorKind::ALL.map(|kind| (exit_code(kind), kind.word()));
        let mut special: Vec<_> = codes.into_iter().filter(|(code, _)| *code != 1).collect();
        special.extend([(BOOT_FAILED, "boot failed"), (BOOT_NOT_PROVEN, "boot not proven")]);
        special.sort_unstable();
        let expected = [
            (2, "invalid_input"),
            (3, "incomplete"),
            (10, "no_repository"),
            (11, "busy"),
            (12, "wrong_passphrase"),
            (13, "boot failed"),
            (14, "boot not proven"),
            (130, "interrupted"),
        ];
        assert_eq!(special, expected);
    }
}
