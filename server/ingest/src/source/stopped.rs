//! What a backup has to know about an image of a machine that is off, before it reads it.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use coldrise_block::Result;
use serde_json::Value;

use super::inspect::inspect;
use super::{ImageFormat, SourceOptions};
use crate::qemu::{change_bitmap, BitmapChange};

/// Flag of a bitmap that misses writes: the program that had it in memory did not end cleanly.
const IN_USE: &str = "in-use";

/// An image and what QEMU says about it.
#[derive(Clone, Debug)]
pub struct StoppedImage {
    path: PathBuf,
    format: ImageFormat,
    files: Vec<PathBuf>,
    bitmaps: Vec<(String, bool)>,
}

impl StoppedImage {
    /// Asks QEMU about an image, without a lock that could keep a machine from starting on it.
    ///
    /// # Errors
    /// `Unsupported` for what cannot be read, with the reason; `ToolFailed` with QEMU's; errors of the system.
    pub fn inspect(path: &Path, format: ImageFormat, cancel: &AtomicBool) -> Result<StoppedImage> {
        let options = SourceOptions { follow_backing: true, is_shared: true, bitmap: None };
        let inspected = inspect(path, format, &options, false, cancel)?;
        Ok(StoppedImage {
            path: path.to_owned(),
            format,
            files: inspected.image.paths(),
            bitmaps: bitmaps(&inspected.facts),
        })
    }

    /// The path, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The image's file and all that it refers to, such as backing files.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Its format.
    pub fn format(&self) -> ImageFormat {
        self.format
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
    pub fn add_bitmap(&self, name: &str) -> Result<()> {
        change_bitmap(&self.path, BitmapChange::Add, name)
    }

    /// Removes a bitmap.
    ///
    /// # Errors
    /// As of [`StoppedImage::add_bitmap`].
    pub fn remove_bitmap(&self, name: &str) -> Result<()> {
        change_bitmap(&self.path, BitmapChange::Remove, name)
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
