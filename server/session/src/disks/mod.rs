//! Views of disks: layers over a chunk map. They read and write bytes, take no lock of the
//! repository, and know no session.

pub(crate) mod layered_disk;
pub(crate) mod length;
pub(crate) mod point_disk;
