//! An image of a machine, on the machine's host, while no QEMU writes it: what QEMU's tools say about it, its bitmaps,
//! and an export for reading.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use coldrise_block::Result;
use coldrise_host::{ScratchSpace, greets};
use serde_json::Value;

use super::ImageFormat;
use super::inspect::{Inspection, inspect};
use crate::qemu::{BitmapChange, ImageServer, QemuImage, change_bitmap};

/// Flag of a bitmap that misses writes: the program that had it in memory did not end cleanly.
const IN_USE: &str = "in-use";

/// An image and what QEMU says about it. The private folder of each call is on its host.
#[derive(Clone, Debug)]
pub struct MachineImage {
    path: PathBuf,
    format: ImageFormat,
    image: QemuImage,
    bitmaps: Vec<(String, bool)>,
}

impl MachineImage {
    /// Asks QEMU about an image, without a lock that could keep a machine from starting on it. With `is_checked`, QEMU
    /// checks the tables of all its files.
    ///
    /// # Errors
    /// `Unsupported` for what cannot be read, with the reason; `ToolFailed` with QEMU's; errors of the system.
    pub fn inspect(
        space: &ScratchSpace,
        path: &Path,
        format: ImageFormat,
        is_checked: bool,
        cancel: &AtomicBool,
    ) -> Result<MachineImage> {
        let way =
            Inspection { space, follows_backing: true, is_checked, is_of_machine: true, cancel };
        let inspected = inspect(path, format, &way)?;
        Ok(MachineImage {
            path: path.to_owned(),
            format,
            image: inspected.image,
            bitmaps: bitmaps(&inspected.facts),
        })
    }

    /// The image's file and all that it refers to, such as backing files.
    pub fn files(&self) -> Vec<PathBuf> {
        self.image.paths()
    }

    /// The names of its persistent dirty bitmaps.
    pub fn bitmaps(&self) -> impl Iterator<Item = &str> {
        self.bitmaps.iter().map(|(name, _)| &**name)
    }

    /// Whether it has a bitmap of this name that has recorded every write.
    pub fn has_whole_bitmap(&self, name: &str) -> bool {
        self.bitmaps.iter().any(|(known, is_whole)| known == name && *is_whole)
    }

    /// Adds an empty bitmap, which counts from now on. QEMU's own lock for writing is held for some 10 ms.
    ///
    /// # Errors
    /// `Busy` if a program has the image open for writing; `ToolFailed` with QEMU's reason.
    pub fn add_bitmap(&self, space: &ScratchSpace, name: &str) -> Result<()> {
        self.change_bitmap(space, BitmapChange::Add, name)
    }

    /// Removes a bitmap.
    ///
    /// # Errors
    /// As of [`MachineImage::add_bitmap`].
    pub fn remove_bitmap(&self, space: &ScratchSpace, name: &str) -> Result<()> {
        self.change_bitmap(space, BitmapChange::Remove, name)
    }

    fn change_bitmap(&self, space: &ScratchSpace, change: BitmapChange, name: &str) -> Result<()> {
        let driver = self.format.qemu_driver();
        let image = QemuImage::new(space, driver, &self.path, &[], None)?;
        change_bitmap(space, image, change, name)
    }

    /// Serves the image, with the content of a bitmap, at a socket of the private folder until the answer is dropped. No
    /// lock keeps a machine from starting on it: the caller has to prove that nothing changed meanwhile. Also returns the
    /// path at which the socket can be reached from here.
    ///
    /// # Errors
    /// `ToolFailed` with QEMU's reason; errors of the connection.
    pub fn serve(
        &self,
        space: &ScratchSpace,
        socket: &str,
        bitmap: Option<&str>,
    ) -> Result<(ImageServer, PathBuf)> {
        let server = ImageServer::start(&self.image, bitmap, space, socket)?;
        let way = space.host().reach(server.socket()).and_then(|way| greets(&way).map(|()| way));
        let what = || format!("opening {} as {}", self.path.display(), self.format);
        let way = way.map_err(|error| server.explain_refusal(&what(), error))?;
        Ok((server, way))
    }
}

/// From `qemu-img info`. A bitmap without `auto` does not record.
fn bitmaps(facts: &Value) -> Vec<(String, bool)> {
    let listed = facts["format-specific"]["data"]["bitmaps"].as_array();
    let bitmap = |bitmap: &Value| {
        let flags: Vec<&str> =
            bitmap["flags"].as_array()?.iter().filter_map(Value::as_str).collect();
        let is_whole = flags.contains(&"auto") && !flags.contains(&IN_USE);
        Some((bitmap["name"].as_str()?.to_owned(), is_whole))
    };
    listed.into_iter().flatten().filter_map(bitmap).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::bitmaps;

    #[test]
    fn bitmaps_that_miss_writes_are_not_whole() {
        let bitmap = |name: &str, flags: &[&str]| json!({"name": name, "flags": flags, "granularity": 65536});
        let listed = [bitmap("a", &["auto"]), bitmap("b", &["in-use", "auto"]), bitmap("c", &[])];
        let facts = json!({"format-specific": {"data": {"bitmaps": listed}}});
        let found = bitmaps(&facts);
        assert_eq!(
            found,
            [("a".to_owned(), true), ("b".to_owned(), false), ("c".to_owned(), false)]
        );
        assert_eq!(bitmaps(&json!({})), []);
    }
}
