//! Tests of the exports of a real repository, in one program: each costs a link. `listing.rs` counts
//! events and has a process for itself.

#[path = "../common/mod.rs"]
mod common;

mod folders;
mod tree;
