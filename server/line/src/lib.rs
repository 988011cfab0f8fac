//! The line between two sites: frames over several TLS connections.
//!
//! ```text
//!   user ── send(class, frame) ─▶ credit ─▶ queue ─▶ control connection ─┐
//!                                        ├▶ queue ─▶ fetch connection   ─┼─▶ inbox ─▶ receive ── user
//!                                        └▶ queue ─▶ bulk connections ×N ┘
//! ```
//!
//! Users see the trait [`Line`]. [`connect`] and [`Listener`] make lines over a network, [`pair()`] makes
//! one in memory.
//!
//! # Who may talk
//!
//! Each side has an [`Identity`] and pins the other's [`PeerKey`]: TLS 1.3 with raw public keys, no
//! names, no authorities. Keys are exchanged once, with a [`PairingCode`] that an administrator
//! carries to the other site ([`Listener::invite`], [`pair_with`]).
//!
//! # What a stranger or a hostile peer can take
//!
//! | what | limit |
//! |---|---|
//! | connections that have not proved a key | 256, 32 of one address, 15 s each; addresses of peers have 32 more each |
//! | bytes read from them | TLS's own records, and one message of 56 bytes |
//! | lines of one peer | 8 |
//! | memory of a line | the credit given: 16 MiB and the bulk window |
//! | a frame's body | 1 MiB, checked before memory is allocated |
//! | codes | 5 wrong ones for each invitation |
#![deny(unsafe_code)]

mod code;
mod connected;
mod credit;
mod dial;
mod failure;
mod frame;
mod gate;
mod hello;
mod identity;
mod inbox;
mod line;
mod listener;
mod options;
mod outbox;
mod pace;
mod pair;
mod peers;
mod socket;
mod stream;
mod tls;
mod wire;
mod yielding;

pub use code::{CODE_VALID, MAX_WRONG_CODES, PairingCode};
pub use connected::TcpLine;
pub use credit::DEFAULT_BULK_WINDOW_BYTES;
pub use dial::{connect, pair_with};
pub use frame::{Class, Frame, MAX_BODY_BYTES};
pub use identity::{Identity, PeerKey};
pub use line::{Line, LineStatistics, Received};
pub use listener::{Arrival, Listener, Pairing};
pub use options::LineOptions;
pub use pair::{PairedLine, pair, pair_with_window};

#[cfg(test)]
mod tests;
