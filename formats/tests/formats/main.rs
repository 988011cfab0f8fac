//! Tests of the formats through their interface, in one program: each costs a link.

mod layouts;
mod stream;
