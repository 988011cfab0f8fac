//! Makes a database from files of another one, by links: nothing is copied.
//!
//! RocksDB's `CreateColumnFamilyWithImport` takes over files of a database of any size, unchanged.
//! Files are given oldest first. Each gets the lowest level, or the level above all earlier files
//! that it overlaps. A file for which no level is left is left out.

use std::ffi::{CString, c_char, c_uchar};
use std::path::Path;

use coldrise_block::{Context, Result};

use super::{FAMILIES, Family, c_path, take_error};

unsafe extern "C" {
    fn coldrise_make_database(
        path: *const c_char,
        log_directory: *const c_char,
        sequence: u64,
        number: u64,
        folder: *const c_char,
        families: usize,
        names: *const *const c_char,
        counts: *const usize,
        files: *const *const c_char,
        is_left_out: *mut c_uchar,
    ) -> *mut c_char;
}

/// All changes and files of a new database get higher numbers than these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Above {
    pub(crate) sequence: u64,
    pub(crate) file_number: u64,
}

/// Makes a database in `path`, an existing folder, with all families; `files` are names of files in
/// `folder`, which are moved. Returns the files that did not fit.
///
/// # Errors
/// `Corrupt` if a file is not a database file; `NoSpace`; errors of the operating system.
pub(crate) fn make_database(
    path: &Path,
    log_directory: &Path,
    above: Above,
    folder: &Path,
    files: &[(Family, String)],
) -> Result<Vec<String>> {
    let of = |family: Family| files.iter().filter(move |(candidate, _)| *candidate == family);
    let families: Vec<Family> = FAMILIES.iter().skip(1).map(|(family, _)| *family).collect();
    let names: Vec<*const c_char> =
        FAMILIES.iter().skip(1).map(|(_, name)| name.as_ptr()).collect();
    let counts: Vec<usize> = families.iter().map(|family| of(*family).count()).collect();
    let sorted: Vec<&String> =
        families.iter().flat_map(|family| of(*family).map(|(_, name)| name)).collect();
    let owned: Vec<CString> =
        sorted.iter().map(|name| c_path(Path::new(name))).collect::<Result<_>>()?;
    let pointers: Vec<*const c_char> = owned.iter().map(|name| name.as_ptr()).collect();
    let mut is_left_out = vec![0; sorted.len()];
    let (c_name, c_log, c_folder) = (c_path(path)?, c_path(log_directory)?, c_path(folder)?);
    // SAFETY: the arrays have as many entries as the counts say and live through the call; the
    // returned text is ours and was allocated by `malloc`.
    let error = unsafe {
        coldrise_make_database(
            c_name.as_ptr(),
            c_log.as_ptr(),
            above.sequence,
            above.file_number,
            c_folder.as_ptr(),
            names.len(),
            names.as_ptr(),
            counts.as_ptr(),
            pointers.as_ptr(),
            is_left_out.as_mut_ptr(),
        )
    };
    match take_error("making a database of the files of another one", error) {
        Some(error) => Err(error).context(|| path.display().to_string()),
        None => {
            let left_out = sorted.into_iter().zip(is_left_out).filter(|(_, is_out)| *is_out != 0);
            Ok(left_out.map(|(name, _)| name.clone()).collect())
        }
    }
}
