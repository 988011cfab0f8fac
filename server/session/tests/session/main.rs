//! Tests of sessions in a real repository, in one program: each costs a link.

mod support;

mod boot_trace;
mod client_files;
mod fold;
mod gc;
mod owned_sessions;
mod parts;
mod rollback;
mod sessions;
