//! Tests of the store through its interface, in one program: each costs a link. Those that need a
//! process for themselves are beside this folder.

#[path = "../common/mod.rs"]
mod common;

mod damage;
mod disks_at_once;
mod gc_estimate;
mod interrupted;
mod open_and_init;
mod points;
mod remembered;
mod repair;
mod round_trip;
mod small_files;
