//! Signed proofs of the content of a restore point's disks.
//!
//! ```text
//!   disk ─▶ leaves of 64 KiB ─▶ tree of SHA-256 ─▶ root ─▶ statement ─▶ Ed25519 signature
//!                                   └─ one level of it: sections, for samples
//! ```
//!
//! The leaves do not depend on the chunk size of a repository, nor on the format of an image. So a proof
//! can be checked on any copy: another repository, a restored file, an NBD export. docs/recovery.md
//! specifies the document for third parties.
//!
//! A proof is read from an untrusted file: its length is limited, every field is
//! checked, and its sections count only if they lead to the signed root.
#![forbid(unsafe_code)]

mod check;
mod content;
mod key;
mod proof;
mod section;
mod tree;

pub use check::{CopyCheck, check_copy};
pub use content::Content;
pub use key::{PublicKey, SigningKey};
pub use proof::{DiskStatement, MAX_PROOF_BYTES, Proof, Statement};
pub use section::{Sections, hash_disk};
