//! When jobs run: the calendar events of systemd, windows of time, and the back-off after failures.
//!
//! Pure computation: this crate starts nothing and keeps no state. Expressions are hostile input;
//! length and work are bounded.
#![forbid(unsafe_code)]

mod back_off;
mod calendar;
mod field;
mod occurrences;
mod parse;
mod window;

pub use back_off::back_off;
pub use calendar::Calendar;
pub use occurrences::{Occurrences, occurrences};
pub use window::Window;
