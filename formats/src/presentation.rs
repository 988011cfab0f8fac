//! Presents a disk as the files of an image.

use std::ops::Range;

use crate::{DiskShape, Error, Format, Layout, Names, Result};
use crate::{qcow2, raw, vhd, vhdx, vmdk};

/// One file of an image.
#[derive(Debug)]
pub struct File {
    /// Its name.
    pub name: String,
    /// Its content.
    pub layout: Layout,
}

/// A disk in one format.
#[derive(Debug)]
pub struct Presentation {
    files: Vec<File>,
}

impl Presentation {
    /// The files of `disk` under `names`, in the format of `names`.
    ///
    /// `stored` lists the ranges of the disk that hold data, in bytes and in any
    /// order; all other bytes read as zeroes. Compact formats omit those. The
    /// other formats ignore `stored` and show every byte, so that later writes
    /// anywhere on the disk have a place.
    ///
    /// # Errors
    /// The errors of [`Format::check`]; a compact image that outgrows its
    /// format; a range outside the disk; a format that can only be streamed.
    pub fn new(
        names: &Names,
        disk: &DiskShape,
        stored: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<Self> {
        let format = names.format();
        format.check(disk)?;
        let image = |layout| vec![File { name: names.image().to_owned(), layout }];
        let pair = |layout, data| {
            let mut files = image(layout);
            files.push(File { name: names.companion().to_owned(), layout: data });
            files
        };
        let files = match format {
            Format::Raw => image(raw::layout(disk)),
            Format::Vhd => image(vhd::fixed(disk)),
            Format::VhdDynamic => image(vhd::dynamic(disk, stored)?),
            Format::Vhdx => image(vhdx::fixed(disk)),
            Format::VhdxDynamic => image(vhdx::dynamic(disk, stored)?),
            Format::Vmdk | Format::VmdkHosted => {
                pair(vmdk::flat_descriptor(names, disk), raw::whole_sectors(disk))
            }
            Format::VmdkSparse => image(vmdk::sparse(names, disk, stored)?),
            Format::VmdkStream => return Err(Error::Streamed { format }),
            Format::Qcow2 => image(qcow2::allocated(disk)),
            Format::Qcow2Sparse => image(qcow2::sparse(disk, stored)?),
            Format::Qcow2External => {
                pair(qcow2::over_raw_file(disk, names.reference()), raw::layout(disk))
            }
        };
        Ok(Presentation { files })
    }

    /// The files: first the image, then the file with the data, if it is a
    /// separate file.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Returns the files by value.
    pub fn into_files(self) -> Vec<File> {
        self.files
    }
}
