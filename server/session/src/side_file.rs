//! Side files: what clients write into an image file around the disk.
//!
//! A session's disks are shown as image files too. What a client writes there
//! outside of the disk (a VMDK's descriptor, the headers and the log of a VHDX)
//! belongs to that one file. It is captured in a layer of its own, over what
//! the layout computes, and stays until the session ends, seals or not: a
//! client that goes on must find what it wrote. It is in no restore point,
//! whose images are computed anew.
//!
//! # Order of writes
//!
//! The first such write makes the layer's file under another name (synced),
//! renames it (synced) and goes into it. After a crash in between there is no
//! layer, or an empty one, which reads as if there were none. Everything later
//! is the layer's. When the session ends, `session.json` says so before the
//! files are removed.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use coldrise_block::{check_range, Context, Disk, Extent, Result};
use coldrise_store::{LayerId, Repository};
use parking_lot::Mutex;

use crate::disk::{LayeredDisk, Stack};
use crate::document::SessionDocument;
use crate::layer::{Layer, LayerKeys, Poison, ReadMode, Superblock};
use crate::lock::FileLock;
use crate::place::{is_there, layer_keys, map_path, remove_file, sync_directory, Place};

/// Which side file: its place, and what its layer's superblock has to say.
#[derive(Clone)]
pub(crate) struct SideFileKey {
    path: PathBuf,
    id: LayerId,
    size_bytes: u64,
    repository: Arc<Repository>,
}

impl SideFileKey {
    /// The side file of the image file `name` of a session. Bound to the moment
    /// of the publish: a session that is published again has other ones.
    pub(crate) fn new(
        repository: &Arc<Repository>,
        document: &SessionDocument,
        name: &str,
        size_bytes: u64,
    ) -> SideFileKey {
        // No name holds a slash.
        let material = format!("{}/{}/{name}", document.name, document.created_at_ms);
        let hash = repository.derive_key("side file", material.as_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&hash[..16]);
        let id = LayerId(id);
        let path = Place::of(repository, &document.name).side_files().join(id.to_string());
        SideFileKey { path, id, size_bytes, repository: Arc::clone(repository) }
    }

    /// A layer of that id at `path`.
    pub(crate) fn at(
        repository: &Arc<Repository>,
        path: PathBuf,
        id: LayerId,
        size_bytes: u64,
    ) -> SideFileKey {
        SideFileKey { path, id, size_bytes, repository: Arc::clone(repository) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn superblock(&self) -> Superblock {
        Superblock { id: self.id.0, disk_size_bytes: self.size_bytes }
    }

    fn keys(&self) -> LayerKeys {
        layer_keys(&self.repository, &self.id)
    }

    /// Opens the layer for reading: through the writer's block map where a writer
    /// of the session has the file open, `is_served`.
    pub(crate) fn open_for_reading(&self, is_served: bool) -> Result<Arc<Layer>> {
        let map = map_path(&self.id);
        let mode = if is_served { ReadMode::PerhapsAttached(&map) } else { ReadMode::Idle(0) };
        Layer::open_for_reading(&self.path, &self.superblock(), self.keys(), mode)
    }
}

/// Removes block maps that a killed writer left in shared memory: a reader would
/// take them for those of the writer that comes now. The session's lock is held.
pub(crate) fn forget_old_maps(place: &Place) -> Result<()> {
    // Layers are called ID in the one folder, and ID.layer beside other files in the other.
    for (folder, extension) in [(place.side_files(), None), (place.client_files(), Some("layer"))] {
        let what = || format!("reading {}", folder.display());
        let entries = match std::fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            entries => entries.context(what)?,
        };
        for entry in entries {
            let path = entry.context(what)?.path();
            let id = path.file_stem().and_then(|name| name.to_str()).map(LayerId::parse);
            if let (true, Some(Ok(id))) = (path.extension() == extension.map(OsStr::new), id) {
                remove_file(&map_path(&id))?;
                Layer::forget_private_map(&path);
            }
        }
    }
    Ok(())
}

/// A side file open for writing, in the process that writes the session.
pub(crate) struct SideFile {
    key: SideFileKey,
    /// What shows where nothing was written.
    below: Arc<dyn Disk>,
    poison: Poison,
    writing: Arc<FileLock>,
    /// Held while the layer comes into being.
    making: Mutex<()>,
    /// Nothing until something was written.
    written: OnceLock<LayeredDisk>,
}

impl SideFile {
    pub(crate) fn open(
        key: SideFileKey,
        below: Arc<dyn Disk>,
        poison: Poison,
        writing: Arc<FileLock>,
    ) -> Result<SideFile> {
        let is_there = is_there(&key.path)?;
        let (making, written) = (Mutex::new(()), OnceLock::new());
        let file = SideFile { key, below, poison, writing, making, written };
        if is_there {
            file.written()?;
        }
        Ok(file)
    }

    fn written(&self) -> Result<&LayeredDisk> {
        if let Some(written) = self.written.get() {
            return Ok(written);
        }
        let _making = self.making.lock();
        if let Some(written) = self.written.get() {
            return Ok(written);
        }
        self.poison.check()?;
        let key = &self.key;
        if !is_there(&key.path)? {
            self.create()?;
        }
        let layer = Layer::open_for_writing(
            &key.path,
            &key.superblock(),
            key.keys(),
            &map_path(&key.id),
            self.poison.clone(),
            Some(Arc::clone(&self.writing)),
        )?;
        let stack = Stack { base: Arc::clone(&self.below), layers: vec![layer] };
        let disk = LayeredDisk::new(key.size_bytes, false, stack);
        Ok(self.written.get_or_init(|| disk))
    }

    fn create(&self) -> Result<()> {
        let Some(folder) = self.key.path.parent() else { return Ok(()) };
        if !is_there(folder)? {
            Place::make_folder(folder)?;
            folder.parent().map_or(Ok(()), sync_directory)?;
        }
        let unfinished = self.key.path.with_extension("new");
        remove_file(&unfinished)?;
        Layer::create(&unfinished, &self.key.superblock(), &self.key.keys())?;
        std::fs::rename(&unfinished, &self.key.path)
            .context(|| format!("creating {}", self.key.path.display()))?;
        sync_directory(folder)
    }

    /// What reads see now.
    fn shown(&self) -> &dyn Disk {
        self.written.get().map_or(&*self.below, |written| written)
    }
}

impl Disk for SideFile {
    fn size_bytes(&self) -> u64 {
        self.key.size_bytes
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read_at(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.shown().read_at(buffer, offset_bytes)
    }

    fn read_in_memory(&self, buffer: &mut [u8], offset_bytes: u64) -> Result<()> {
        self.shown().read_in_memory(buffer, offset_bytes)
    }

    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        check_range(self.key.size_bytes, offset_bytes, bytes.len() as u64)?;
        self.written()?.write_at(bytes, offset_bytes)
    }

    fn write_zeroes(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        check_range(self.key.size_bytes, offset_bytes, length_bytes)?;
        self.written()?.write_zeroes(offset_bytes, length_bytes)
    }

    fn trim(&self, offset_bytes: u64, length_bytes: u64) -> Result<()> {
        check_range(self.key.size_bytes, offset_bytes, length_bytes)?;
        self.written()?.trim(offset_bytes, length_bytes)
    }

    fn flush(&self) -> Result<()> {
        self.written.get().map_or(Ok(()), |written| written.flush())
    }

    fn extents(&self, offset_bytes: u64, length_bytes: u64, limit: usize) -> Result<Vec<Extent>> {
        self.shown().extents(offset_bytes, length_bytes, limit)
    }
}
