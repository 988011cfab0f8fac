//! Boots a machine under observation, and judges whether it came up.
//!
//! ```text
//!   QEMU ──monitor──▶ events, disk counters, pictures ─┐
//!        ──serial port──▶ lines ───────────────────────┼─▶ watch ─▶ ladder of rungs ─▶ verdict
//!        ──isolated network──▶ packets ────────────────┘
//! ```
//!
//! One source is not enough: a machine with a serial console shows the boot loader's last line on
//! its screen forever, a desktop writes nothing to its serial port, and a machine without a boot
//! record sends nothing to the network. Each rung needs positive evidence from any source. A
//! failure needs positive evidence, too; the absence of both is neither (docs/decisions/0031).
//!
//! One thread polls everything. The guest is hostile: every source is bounded.

mod ladder;
mod machine;
mod packets;
mod screen;
mod serial;
mod signs;
mod watch;

pub(crate) use ladder::{Reached, Rung};
pub(crate) use machine::{Forward, Machine};
pub(crate) use watch::{watch, Findings, Goal};
