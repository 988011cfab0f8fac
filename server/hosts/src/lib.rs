//! Hypervisors' hosts that a repository knows, and connections to them over SSH.
//!
//! ```text
//!   Hosts      names, addresses and pinned keys, sealed with the repository's key
//!   connect    ssh (OpenSSH) ─▶ coldrise-host serve ─▶ coldrise_host::Host
//! ```
//!
//! OpenSSH is the only way: no port is opened and no daemon is installed on a host. See docs/hosts.md.
#![forbid(unsafe_code)]

mod address;
mod check;
mod cipher;
mod connection;
mod documents;
mod key;
mod program;
mod ssh;

pub use address::HostAddress;
pub use check::{HostReport, check};
pub use connection::{add_host, connect, host_of};
pub use documents::{Contact, Hosts, KnownHost, Seen, parse_host_name};
pub use key::HostKey;
