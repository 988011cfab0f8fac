//! The traffic of a line, and the reasons why it was not more.

use coldrise_replica::Traffic;
use serde::Serialize;

use crate::units::show_size;

/// The counters, as they are printed. `offered` is the sum of `unchanged`, `zero`, `known` and `content`; of
/// `content`, delta and compression saved what they say.
#[derive(Serialize)]
pub(super) struct Savings {
    offered_bytes: u64,
    unchanged_bytes: u64,
    zero_bytes: u64,
    known_bytes: u64,
    content_bytes: u64,
    delta_bytes: u64,
    compression_bytes: u64,
    sent_bytes: u64,
}

impl Savings {
    pub(super) fn of(traffic: &Traffic) -> Savings {
        Savings {
            offered_bytes: traffic.offered_bytes(),
            unchanged_bytes: traffic.unchanged_bytes,
            zero_bytes: traffic.zero_bytes,
            known_bytes: traffic.known_bytes,
            content_bytes: traffic.content_bytes,
            delta_bytes: traffic.delta_bytes,
            compression_bytes: traffic.compression_bytes(),
            sent_bytes: traffic.sent_bytes,
        }
    }
}

/// One line for people.
pub(super) fn savings(savings: &Savings, is_here: bool) -> String {
    let (done, known) = match is_here {
        true => ("received", "known here"),
        false => ("sent", "known there"),
    };
    let saved = [
        ("unchanged", savings.unchanged_bytes),
        ("zeroes", savings.zero_bytes),
        (known, savings.known_bytes),
        ("delta", savings.delta_bytes),
        ("compression", savings.compression_bytes),
    ];
    let saved: Vec<_> = saved
        .iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(what, bytes)| format!("{what} {}", show_size(*bytes)))
        .collect();
    let mut text = format!(
        "{done} {} for {}",
        show_size(savings.sent_bytes),
        show_size(savings.offered_bytes)
    );
    if !saved.is_empty() {
        text.push_str(&format!("; saved: {}", saved.join(", ")));
    }
    text
}
