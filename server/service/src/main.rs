//! `coldrised`: the service.
#![forbid(unsafe_code)]

fn main() {}
