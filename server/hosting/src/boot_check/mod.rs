//! Boots a machine under observation, and judges whether it came up.
//!
//! ```text
//!   QEMU ──monitor──▶ events, disk counters, pictures ─┐
//!        ──serial port──▶ lines ───────────────────────┼─▶ watch ─▶ boot stages ─▶ verdict
//!        ──isolated network──▶ packets ────────────────┤
//!        ──virtio ports──▶ agent, the machine's word ──┤
//!   this host ──the user's own command─────────────────┘
//! ```
//!
//! One source is not enough: a machine with a serial console shows the boot loader's last line on
//! its screen forever, a desktop writes nothing to its serial port, and a machine without a boot
//! record sends nothing to the network. Each stage needs positive evidence from any source. A
//! failure needs positive evidence, too; the absence of both is neither (docs/decisions/0031).
//!
//! One thread polls everything. The guest is hostile: every source is bounded.

mod agent;
mod command;
mod machine;
mod packets;
mod process;
mod screen;
mod search;
mod signs;
mod stages;
mod throwaway;
mod trial;
mod watch;

pub use command::OwnCheck;
pub use machine::Forward;
pub use search::{Answer, Outcome, Search};
pub use stages::{BootStage, Reached};
pub use trial::{Trial, check_memory, highest_stage, lacking_memory, needed_bytes};
pub use watch::Goal;
