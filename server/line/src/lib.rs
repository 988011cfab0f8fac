//! The line between two sites: frames over several TLS connections.
//!
//! ```text
//!   user ── send(class, frame) ─▶ credit ─▶ queue ─▶ control connection ─┐
//!                                        ├▶ queue ─▶ fetch connection   ─┼─▶ inbox ─▶ receive ── user
//!                                        └▶ queue ─▶ bulk connections ×N ┘
//! ```
//!
//! Users see the trait [`Line`] only. [`pair()`] is a line in memory.
#![deny(unsafe_code)]

mod credit;
mod failure;
mod frame;
mod inbox;
mod line;
mod pair;

pub use credit::DEFAULT_BULK_WINDOW_BYTES;
pub use frame::{Class, Frame, MAX_BODY_BYTES};
pub use line::{Line, LineStatistics, Received};
pub use pair::{pair, pair_with_window, PairedLine};
