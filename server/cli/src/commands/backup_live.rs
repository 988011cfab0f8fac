//! The part of `coldrise backup` for machines that run: --from.

use coldrise_live_backup::Instant;
use serde::Serialize;

#[derive(Serialize)]
pub(super) struct MadeInstant<'a> {
    /// How long the machine stood still, at most; absent if it did not.
    standstill_us: Option<u64>,
    is_quiesced: bool,
    /// Whether the machine is off.
    is_off: bool,
    remarks: &'a [String],
}

impl<'a> MadeInstant<'a> {
    pub(super) fn new(instant: &'a Instant) -> MadeInstant<'a> {
        MadeInstant {
            standstill_us: instant.standstill.map(|time| time.as_micros() as u64),
            is_quiesced: instant.is_quiesced,
            is_off: instant.is_off,
            remarks: &instant.remarks,
        }
    }

    /// For people.
    pub(super) fn sentence(&self) -> String {
        if self.is_off {
            return ": the machine is off".to_owned();
        }
        let kind = if self.is_quiesced { "with frozen file systems" } else { "crash-consistent" };
        let stood = match self.standstill_us {
            Some(time) => {
                format!("; the machine stood still for {:.1} ms", time as f64 / 1000.0)
            }
            None => String::new(),
        };
        format!(": all disks at one instant, {kind}{stood}")
    }
}
