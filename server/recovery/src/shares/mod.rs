//! Disks for Hyper-V and for iSCSI initiators: what smbd and tgtd are told, and what their users type.
//!
//! Both programs serve files of a private mount, and keep no state of their own that matters: each
//! write that they acknowledge is in the session's layer. So they can be killed and started again at
//! any moment.

pub mod hyper_v;
pub mod iscsi;
pub mod smb_configuration;
pub mod tgt;
