//! Side files: writes of clients into an image file around the disk.
//!
//! A session's disks are also shown as image files. The writes of a client outside the disk (a
//! VMDK's descriptor, the headers and the log of a VHDX) belong to that one image file. They are
//! captured in a separate layer, over the computed layout, and stay until the session ends, whether
//! it is sealed or not: a client that continues must find its own writes. They are in no restore
//! point, whose images are computed again.
//!
//! # Order of writes
//!
//! The first such write creates the layer's file under another name (synced), renames it (synced)
//! and then goes into it. A crash in between leaves no layer, or an empty one, which reads as if
//! there were none. The layer handles all later writes. When the session ends, `session.json` is
//! marked as ended before the files are removed.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use coldrise_block::{
    Context, Disk, Extent, ReadContext, Result, check_range, path_exists, remove_if_present,
    sync_directory,
};
use coldrise_store::{LayerId, Repository};
use parking_lot::Mutex;

use crate::disks::layered_disk::{LayeredDisk, Stack};
use crate::layer::{Layer, LayerKeys, Poison, ReadMode, Superblock};
use crate::locks::file_lock::FileLock;
use crate::paths::{SessionPaths, map_path};
use crate::session_folder::document::SessionDocument;

/// Identifies a side file: its path, and the expected superblock of its layer.
#[derive(Clone)]
pub(crate) struct SideFileKey {
    path: PathBuf,
    id: LayerId,
    size_bytes: u64,
    repository: Arc<Repository>,
}

impl SideFileKey {
    /// The side file of the image file `name` of a session. It is bound to the time of the publish:
    /// a session that is published again has other side files.
    pub(crate) fn new(
        repository: &Arc<Repository>,
        document: &SessionDocument,
        name: &str,
        size_bytes: u64,
    ) -> SideFileKey {
        // Names contain no slash.
        let material = format!("{}/{}/{name}", document.name, document.created_at_ms);
        let hash = repository.derive_key("side file", material.as_bytes());
        let mut id = [0; 16];
        id.copy_from_slice(&hash[..16]);
        let id = LayerId(id);
        let path = SessionPaths::of(repository, &document.name).side_files().join(id.to_string());
        SideFileKey { path, id, size_bytes, repository: Arc::clone(repository) }
    }

    /// A layer with this id at `path`.
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
        LayerKeys::of(&self.repository, &self.id)
    }

    /// Opens the layer for reading. With `is_served`, reads through the writer's block map if the
    /// session's writer has the file open.
    pub(crate) fn open_for_reading(&self, is_served: bool) -> Result<Arc<Layer>> {
        let map = map_path(&self.id);
        let mode = if is_served { ReadMode::PerhapsAttached(&map) } else { ReadMode::Idle(0) };
        Layer::open_for_reading(&self.path, &self.superblock(), self.keys(), mode)
    }
}

/// Removes block maps that a killed writer left in shared memory: a reader would mistake them for
/// those of the new writer. The caller holds the session's lock.
pub(crate) fn forget_old_maps(place: &SessionPaths) -> Result<()> {
    // Layers are named ID in one folder, and ID.layer beside other files in the other.
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
                remove_if_present(&map_path(&id))?;
                Layer::forget_private_map(&path);
            }
        }
    }
    Ok(())
}

/// A side file open for writing, in the process that writes the session.
pub(crate) struct SideFile {
    key: SideFileKey,
    /// The content of unwritten parts.
    below: Arc<dyn Disk>,
    poison: Poison,
    writing: Arc<FileLock>,
    /// Held while the layer is created.
    making: Mutex<()>,
    /// Empty until the first write.
    written: OnceLock<LayeredDisk>,
}

impl SideFile {
    pub(crate) fn open(
        key: SideFileKey,
        below: Arc<dyn Disk>,
        poison: Poison,
        writing: Arc<FileLock>,
    ) -> Result<SideFile> {
        let is_there = path_exists(&key.path)?;
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
        if !path_exists(&key.path)? {
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
        if !path_exists(folder)? {
            SessionPaths::make_folder(folder)?;
            folder.parent().map_or(Ok(()), sync_directory)?;
        }
        let unfinished = self.key.path.with_extension("new");
        remove_if_present(&unfinished)?;
        Layer::create(&unfinished, &self.key.superblock(), &self.key.keys())?;
        std::fs::rename(&unfinished, &self.key.path)
            .context(|| format!("creating {}", self.key.path.display()))?;
        sync_directory(folder)
    }

    /// The disk that reads currently see.
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

    fn read(&self, buffer: &mut [u8], offset_bytes: u64, context: &mut ReadContext) -> Result<()> {
        self.shown().read(buffer, offset_bytes, context)
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
