//! How far a machine boots.

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
#[schema(as = Rung)]
pub enum BootStage {
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

impl BootStage {
    /// All, the lowest first.
    pub const ALL: [BootStage; 6] = [
        BootStage::Started,
        BootStage::Firmware,
        BootStage::Kernel,
        BootStage::Userspace,
        BootStage::Login,
        BootStage::Service,
    ];

    /// The stage of that word.
    pub fn of_word(word: &str) -> Option<BootStage> {
        BootStage::ALL.into_iter().find(|stage| stage.word() == word)
    }

    /// The word of the command line and of `--json`.
    pub fn word(self) -> &'static str {
        match self {
            BootStage::Started => "started",
            BootStage::Firmware => "firmware",
            BootStage::Kernel => "kernel",
            BootStage::Userspace => "userspace",
            BootStage::Login => "login",
            BootStage::Service => "service",
        }
    }
}
