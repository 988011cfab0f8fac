//! The rungs that a booting machine climbs.

use serde::{Deserialize, Serialize};

/// How far a machine came. The order is that of a boot.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    clap::ValueEnum,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// The disks are served and QEMU runs.
    Started,
    /// The firmware found a system and starts it.
    Firmware,
    /// The kernel lives.
    Kernel,
    /// Programs of the system run.
    Userspace,
    /// A login prompt is there, or the guest agent answers.
    Login,
    /// A service answers: the port of --check-port, the command of --check, or the machine's own
    /// check says ok.
    Service,
}

impl Rung {
    /// All, the lowest first.
    pub const ALL: [Rung; 6] =
        [Rung::Started, Rung::Firmware, Rung::Kernel, Rung::Userspace, Rung::Login, Rung::Service];

    /// The rung of that word.
    pub fn of_word(word: &str) -> Option<Rung> {
        Rung::ALL.into_iter().find(|rung| rung.word() == word)
    }

    /// The word of the command line and of `--json`.
    pub fn word(self) -> &'static str {
        match self {
            Rung::Started => "started",
            Rung::Firmware => "firmware",
            Rung::Kernel => "kernel",
            Rung::Userspace => "userspace",
            Rung::Login => "login",
            Rung::Service => "service",
        }
    }
}
