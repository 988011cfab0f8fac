//! Unix sockets in folders of the repository, and the messages of `writer.control`.
//!
//! A process asks here for work that only the holder of a lock can do. The listening ends are in
//! `sessions::control`, `activity`, `incoming` and `writer::shared`.

pub(crate) mod local_socket;
pub(crate) mod point_change;
pub(crate) mod writer_messages;
