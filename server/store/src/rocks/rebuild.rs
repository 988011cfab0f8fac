//! What a repair does to the database itself: it opens one that has lost files, gives
//! those up, and makes a family anew.

use std::path::Path;

use coldrise_block::{Context, Error, ErrorKind, Result};
use librocksdb_sys as sys;

use super::options::Options;
use super::table::TableProperties;
use super::{c_path, checked, Database, Family, LiveFile, ReadMode, SstWriter, FAMILIES};

/// Parts of the keys of a family that are tried one by one once a part of them cannot
/// be read: by their first two bytes.
const PARTS: u32 = 1 << 16;
/// Values of a file that are tried before it is given up.
const PROBES: u64 = 64;

/// True where the database has all families but the index, which can be made anew: a
/// rebuild was interrupted between dropping it and making it.
pub(super) fn lacks_index_only(path: &Path) -> Result<bool> {
    let c_path = c_path(path)?;
    let options = Options::database(false);
    let mut count = 0;
    let names = checked("reading the families of the database", |error| {
        // SAFETY: the options and the path are live through the call.
        unsafe {
            let options = options.as_ptr();
            sys::rocksdb_list_column_families(options, c_path.as_ptr(), &mut count, error)
        }
    })?;
    let mut found = Vec::with_capacity(count);
    // SAFETY: on success `names` holds `count` NUL-terminated strings, which are read
    // before they are freed, once.
    unsafe {
        for index in 0..count {
            found.push(std::ffi::CStr::from_ptr(*names.add(index)).to_owned());
        }
        sys::rocksdb_list_column_families_destroy(names, count);
    }
    let is_there = |name: &std::ffi::CStr| found.iter().any(|there| there.as_c_str() == name);
    Ok(FAMILIES.iter().all(|(family, name)| is_there(name) != (*family == Family::Dedup)))
}

impl Database {
    /// Gives up the files of a family that are missing, do not end as a file of the
    /// database does, or of which nothing can be read. Returns how many.
    ///
    /// # Errors
    /// `Corrupt` for one that RocksDB does not give up alone.
    pub(crate) fn drop_unreadable_files(&self, family: Family) -> Result<u64> {
        let mut dropped = 0;
        for file in self.listed_files(family)? {
            let path = self.path.join(file.name.trim_start_matches('/'));
            match TableProperties::read(&path) {
                Ok(_) if self.can_read_any(family, &file) => continue,
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {}
                Err(error) => return Err(error),
            }
            let is_expendable = matches!(family, Family::Chunks | Family::Maps);
            if is_expendable && file.level > 0 {
                self.delete_file(&file.name)?;
            }
            if self.listed_files(family)?.iter().any(|there| there.name == file.name) {
                let message = format!(
                    "{} is missing, cut short or unreadable, and the database cannot go on without it: put a \
                     copy of it in its place, or restore what can be read and begin a new \
                     repository",
                    path.display()
                );
                return Err(Error::new(ErrorKind::Corrupt, message));
            }
            dropped += 1;
        }
        Ok(dropped)
    }

    /// Whether anything of a file can be read: not where what leads to its values is
    /// damaged.
    fn can_read_any(&self, family: Family, file: &LiveFile) -> bool {
        let is_readable = |key: &[u8]| self.get(family, key, ReadMode::Payload).is_ok();
        if is_readable(&file.smallest) || is_readable(&file.largest) {
            return true;
        }
        let id = |key: &[u8]| key.try_into().ok().map(u64::from_be_bytes);
        let (Some(first), Some(last)) = (id(&file.smallest), id(&file.largest)) else {
            return false;
        };
        let step = (last.saturating_sub(first) / PROBES).max(1);
        (1..PROBES).any(|probe| {
            let id = first.saturating_add(probe.saturating_mul(step));
            id < last && is_readable(&id.to_be_bytes())
        })
    }

    /// Whether a family can be read from one end to the other.
    pub(crate) fn can_walk(&self, family: Family) -> Result<bool> {
        let walk = || -> Result<()> {
            let mut cursor = self.cursor(family, ReadMode::Scan)?;
            cursor.seek(&[])?;
            while cursor.entry().is_some() {
                cursor.next()?;
            }
            Ok(())
        };
        match walk() {
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => Ok(false),
            walked => walked.map(|()| true),
        }
    }

    /// Makes the index anew, with what is still readable of it: everything that is
    /// damaged in its files goes with them. `staging` is a path for a file on the way.
    ///
    /// A crash leaves the index as it was, or without entries (then without its family,
    /// see `lacks_index_only`): a repair finds out which are missing.
    pub(crate) fn rebuild_index(&mut self, staging: &Path) -> Result<()> {
        let saved = self.save_index(staging)?;
        let (position, name) = FAMILIES
            .iter()
            .enumerate()
            .find_map(|(at, (family, name))| (*family == Family::Dedup).then_some((at, *name)))
            .ok_or_else(|| Error::new(ErrorKind::Internal, "an unknown family"))?;
        let missing = || Error::new(ErrorKind::ReadOnly, "this family is open only in a writer");
        let old = *self.families.get(position).ok_or_else(missing)?;
        let options = self.options.get(position).ok_or_else(missing)?;
        checked("dropping the deduplication index", |error| {
            // SAFETY: the database and the handle are live.
            unsafe { sys::rocksdb_drop_column_family(self.db, old, error) }
        })?;
        let new = checked("making the deduplication index", |error| {
            // SAFETY: the database, the options and the name are live; what the options
            // refer to lives as long as the database.
            unsafe {
                sys::rocksdb_create_column_family(self.db, options.as_ptr(), name.as_ptr(), error)
            }
        })?;
        self.families[position] = new;
        // SAFETY: nothing uses the old handle any more: `self` is borrowed alone.
        unsafe { sys::rocksdb_column_family_handle_destroy(old) };
        if saved {
            self.ingest(Family::Dedup, staging)?;
            let _ = std::fs::remove_file(staging);
        }
        Ok(())
    }

    /// Writes what is readable of the index to a file. False where that is nothing.
    fn save_index(&self, staging: &Path) -> Result<bool> {
        if let Some(folder) = staging.parent() {
            let what = || format!("making {}", folder.display());
            std::fs::create_dir_all(folder).context(what)?;
        }
        let mut file: Option<SstWriter<'_>> = None;
        let mut last: Vec<u8> = Vec::new();
        let mut part = 0;
        while part < PARTS {
            // Part by part only where something cannot be read.
            let start = [(part >> 8) as u8, part as u8];
            let from = if last.as_slice() > &start[..] { &last[..] } else { &start[..] };
            let from = from.to_vec();
            let mut walk = || -> Result<()> {
                let mut cursor = self.cursor(Family::Dedup, ReadMode::Scan)?;
                cursor.seek(&from)?;
                while let Some((key, value)) = cursor.entry() {
                    if key > last.as_slice() {
                        let file = match &mut file {
                            Some(file) => file,
                            none => {
                                none.insert(SstWriter::create_for(self, Family::Dedup, staging)?)
                            }
                        };
                        file.put(key, value)?;
                        last = key.to_vec();
                    }
                    cursor.next()?;
                }
                Ok(())
            };
            match walk() {
                Ok(()) => break,
                Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io) => {}
                Err(error) => return Err(error),
            }
            let reached =
                last.first_chunk::<2>().map_or(0, |two| u32::from(u16::from_be_bytes(*two)));
            part = reached.max(part) + 1;
        }
        match file {
            Some(file) => file.finish().map(|_| true),
            None => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(database: &Database, family: Family, count: u32) {
        let mut batch = database.batch();
        for number in 0..count {
            // Spread over all keys, as hashes are.
            let key = number.wrapping_mul(0x9e37_79b9).to_be_bytes();
            batch.put(family, &key, &[7; 100]).unwrap();
        }
        database.write(batch, true).unwrap();
        database.flush().unwrap();
    }

    fn count(database: &Database, family: Family) -> usize {
        let mut cursor = database.cursor(family, ReadMode::Scan).unwrap();
        cursor.seek(&[]).unwrap();
        let mut count = 0;
        while cursor.entry().is_some() {
            count += 1;
            cursor.next().unwrap();
        }
        count
    }

    #[test]
    fn an_index_with_damage_keeps_what_is_readable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("db");
        let mut database = Database::open_primary(&path, folder.path(), true).unwrap();
        fill(&database, Family::Dedup, 20_000);
        assert!(database.can_walk(Family::Dedup).unwrap());
        let files = database.listed_files(Family::Dedup).unwrap();
        assert_eq!(files.len(), 1);
        let file = path.join(files[0].name.trim_start_matches('/'));
        let mut content = std::fs::read(&file).unwrap();
        let middle = content.len() / 2;
        for at in [100, middle] {
            content[at] ^= 1;
        }
        std::fs::write(&file, content).unwrap();
        assert!(!database.can_walk(Family::Dedup).unwrap());
        database.rebuild_index(&folder.path().join("index.sst")).unwrap();
        assert!(database.can_walk(Family::Dedup).unwrap());
        let kept = count(&database, Family::Dedup);
        // Two blocks of about 35 entries are lost.
        assert!((19_800..20_000).contains(&kept), "{kept}");
        drop(database);
        let database = Database::open_primary(&path, folder.path(), false).unwrap();
        assert_eq!(count(&database, Family::Dedup), kept);
    }

    #[test]
    fn a_rebuild_that_was_interrupted_is_found_and_nothing_else_is_taken_for_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("db");
        for (family, is_index) in [(Family::Maps, false), (Family::Dedup, true)] {
            let _ = std::fs::remove_dir_all(&path);
            let database = Database::open_primary(&path, folder.path(), true).unwrap();
            fill(&database, Family::Chunks, 10);
            assert!(!lacks_index_only(&path).unwrap());
            let handle = database.family(family).unwrap();
            // SAFETY: the database and the handle are live.
            checked("dropping", |error| unsafe {
                sys::rocksdb_drop_column_family(database.db, handle, error)
            })
            .unwrap();
            drop(database);
            assert_eq!(lacks_index_only(&path).unwrap(), is_index);
            assert!(Database::open_primary(&path, folder.path(), false).is_err());
            let opened = Database::open_damaged(&path, folder.path());
            assert_eq!(opened.is_ok(), is_index);
            if let Ok((database, is_new)) = opened {
                assert!(is_new);
                assert_eq!(count(&database, Family::Chunks), 10);
                assert_eq!(count(&database, Family::Dedup), 0);
            }
        }
    }
}
