//! Tests of the index of a real repository, in one program: each costs a link.

mod common;
mod index;
mod many_points;
