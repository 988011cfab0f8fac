//! Machines, points, sessions and space as documents.
#![forbid(unsafe_code)]
