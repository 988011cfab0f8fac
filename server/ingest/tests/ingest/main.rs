//! Tests of backups and restores with real sources, in one program: each costs a link.

mod common;

mod appliance;
mod backup;
mod image_sources;
mod nbd_sources;
mod raw_sources;
mod restore;
mod restore_images;
