//! The repository of a running service.
//!
//! [`Inventory::refresh`] is called again and again. It follows the writer, and a repository that
//! goes away and comes back. The other calls ([`answers`]) answer from the index of the last refresh, or read the
//! repository.
//!
//! Locks, in order: `refreshing`, `state`, the tree's. `state` is held only to copy or replace
//! references.

mod answers;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_export::{ExportTree, TreeOptions};
use coldrise_session::{SessionStamp, session_stamps, waiting_points};
use coldrise_store::{
    CatalogStamp, MachineName, OpenOptions, PassphraseSource, Repository, RepositoryId,
};
use parking_lot::{Mutex, RwLock};

use crate::index::{Index, Sources};
use crate::sessions::SessionListing;

/// The result of [`Inventory::refresh`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Machines whose points changed, appeared or went, sorted.
    pub machines: Vec<MachineName>,
    /// Sessions that changed, appeared or went, or were opened or closed by a front end; sorted.
    pub sessions: Vec<String>,
    /// The repository was opened: by the first refresh, and after it was away.
    pub is_opened: bool,
}

impl Changes {
    /// True if nothing changed.
    pub fn is_empty(&self) -> bool {
        *self == Changes::default()
    }
}

/// A repository as a service sees it. All calls block and may come from many threads.
pub struct Inventory {
    path: PathBuf,
    passphrase: PassphraseSource,
    cache_bytes: u64,
    refreshing: Mutex<Refreshing>,
    state: RwLock<State>,
}

/// The state of the refreshes.
#[derive(Default)]
struct Refreshing {
    /// The repository that was opened first: another one in its place is refused.
    id: Option<RepositoryId>,
    /// The state from which the present index was read; `None` if it must be read.
    signs: Option<Signs>,
    sessions: SessionListing,
}

#[derive(PartialEq)]
struct Signs {
    sessions: Vec<SessionStamp>,
    /// `None` never equals a later state.
    markers: Option<(u64, i64, i64)>,
    catalog: CatalogStamp,
}

struct State {
    /// The open repository, or why there is none.
    opened: std::result::Result<Arc<Opened>, (ErrorKind, String)>,
    index: Arc<Index>,
}

struct Opened {
    // Dropped before the repository.
    tree: Mutex<Option<Arc<ExportTree>>>,
    repository: Arc<Repository>,
    /// Device and number of the database's folder: another one is another database.
    place: (u64, u64),
}

impl Inventory {
    /// Names a repository without opening it: the first refresh does. `cache_bytes` is the size of
    /// the cache of decoded chunks for [`Inventory::content`].
    pub fn new(path: &Path, passphrase: &PassphraseSource, cache_bytes: u64) -> Inventory {
        let text = format!("{} is not open yet", path.display());
        Inventory {
            path: path.to_owned(),
            passphrase: passphrase.clone(),
            cache_bytes,
            refreshing: Mutex::default(),
            state: RwLock::new(State {
                opened: Err((ErrorKind::NoRepository, text)),
                index: Arc::default(),
            }),
        }
    }

    /// Opens a repository and reads its index.
    ///
    /// # Errors
    /// As [`Inventory::refresh`].
    pub fn open(path: &Path, passphrase: &PassphraseSource, cache_bytes: u64) -> Result<Inventory> {
        let inventory = Inventory::new(path, passphrase, cache_bytes);
        inventory.refresh()?;
        Ok(inventory)
    }

    /// Follows the repository, and returns what changed since the last refresh that succeeded. Takes
    /// well under a millisecond if nothing changed.
    ///
    /// # Errors
    /// `NoRepository` and errors of the operating system if the repository is away; `Unsupported` if
    /// another one is in its place; `WrongPassphrase`. All other calls return the same error until a
    /// refresh succeeds. `Corrupt` if the catalog cannot be read; the next refresh opens the repository
    /// again.
    pub fn refresh(&self) -> Result<Changes> {
        let mut refreshing = self.refreshing.lock();
        let (opened, is_opened) = match self.follow(&mut refreshing) {
            Ok(followed) => followed,
            Err(error) => {
                refreshing.signs = None;
                self.state.write().opened = Err((error.kind(), error.full_message()));
                return Err(error);
            }
        };
        let read = self.read(&opened.repository, &mut refreshing);
        match read {
            Ok(changes) => {
                // Only now: an index that is not read yet must not pass for an empty repository.
                if is_opened {
                    self.state.write().opened = Ok(opened);
                }
                Ok(Changes { is_opened, ..changes })
            }
            Err(error) => {
                refreshing.signs = None;
                let error = error.context(self.path.display());
                if is_opened {
                    self.state.write().opened = Err((error.kind(), error.full_message()));
                }
                Err(error)
            }
        }
    }

    /// The open repository, and whether it was opened just now.
    fn follow(&self, refreshing: &mut Refreshing) -> Result<(Arc<Opened>, bool)> {
        let id = Repository::id_of(&self.path)?;
        if let Some(expected) = refreshing.id.filter(|expected| *expected != id) {
            let text = format!(
                "{} now holds another repository: its id is {id}, not {expected}",
                self.path.display()
            );
            return Err(Error::new(ErrorKind::Unsupported, text)
                .advise("put the right one back, or restart the service to use this one"));
        }
        let place = self.place()?;
        let known = self.state.read().opened.as_ref().ok().cloned();
        // Without signs the last reading failed.
        let is_sound = |known: &Arc<Opened>| known.place == place && refreshing.signs.is_some();
        if let Some(known) = known.filter(is_sound) {
            return Ok((known, false));
        }
        let options = OpenOptions { cache_bytes: self.cache_bytes };
        let repository = Repository::open(&self.path, &self.passphrase, &options)?;
        refreshing.id = Some(id);
        refreshing.signs = None;
        Ok((Arc::new(Opened { tree: Mutex::default(), repository, place }), true))
    }

    fn place(&self) -> Result<(u64, u64)> {
        let folder = self.path.join("db");
        let what = || format!("reading {}", folder.display());
        let found = folder.metadata().context(what)?;
        Ok((found.dev(), found.ino()))
    }

    fn read(&self, repository: &Arc<Repository>, refreshing: &mut Refreshing) -> Result<Changes> {
        let before = refreshing.signs.take();
        let sessions = session_stamps(repository)?;
        let markers = repository.markers_stamp()?;
        let is_same = before.as_ref().is_some_and(|before| {
            before.sessions == sessions && markers.is_some() && before.markers == markers
        });
        // Read before the catalog, which the stamp shows.
        let (listing, waiting) = match is_same {
            true => (None, Vec::new()),
            false => (Some(SessionListing::read(repository)?), waiting_points(repository)?),
        };
        let catalog = repository.catch_up_stamped(before.as_ref().map(|before| &before.catalog))?;
        let is_same = is_same && before.is_some_and(|before| before.catalog == catalog);
        let mut changes = Changes::default();
        if !is_same {
            changes = self.rebuild(repository, refreshing, listing, waiting)?;
        }
        refreshing.signs = Some(Signs { sessions, markers, catalog });
        Ok(changes)
    }

    fn rebuild(
        &self,
        repository: &Arc<Repository>,
        refreshing: &mut Refreshing,
        listing: Option<SessionListing>,
        waiting: Vec<coldrise_store::PointDocument>,
    ) -> Result<Changes> {
        let listing = match listing {
            Some(listing) => listing,
            None => SessionListing::read(repository)?,
        };
        let names = listing.sessions.iter().map(|session| format!("live/{}", session.session));
        let sessions = names.map(|name| repository.marker_id(&name)).collect();
        let sources = Sources { waiting, sessions, markers: repository.marker_files()? };
        let before = Arc::clone(&self.state.read().index);
        let index = Arc::new(Index::build(repository, &before, sources)?);
        let changes = Changes {
            machines: index.changed_since(&before),
            sessions: refreshing.sessions.changed_since(&listing),
            is_opened: false,
        };
        refreshing.sessions = listing;
        self.state.write().index = index;
        Ok(changes)
    }

    /// The index of the last refresh, if the repository is there.
    fn index(&self) -> Result<Arc<Index>> {
        let state = self.state.read();
        state.opened().map(|_| Arc::clone(&state.index))
    }

    fn opened(&self) -> Result<Arc<Opened>> {
        self.state.read().opened().cloned()
    }

    /// The open repository, for what this crate does not know, such as notes of recoveries.
    ///
    /// # Errors
    /// Only those of [`Inventory::refresh`].
    pub fn repository(&self) -> Result<Arc<Repository>> {
        self.opened().map(|opened| Arc::clone(&opened.repository))
    }
}

impl State {
    fn opened(&self) -> Result<&Arc<Opened>> {
        self.opened.as_ref().map_err(|(kind, text)| Error::new(*kind, text.clone()))
    }
}

impl Opened {
    /// The tree of all disks. It is made for the first content, and takes this process's lease.
    fn tree(&self, cache_bytes: u64) -> Result<Arc<ExportTree>> {
        let mut tree = self.tree.lock();
        if let Some(tree) = &*tree {
            return Ok(Arc::clone(tree));
        }
        let options = TreeOptions { program: "coldrised", cache_bytes, folder: None };
        let made = Arc::new(ExportTree::new(&self.repository, &options)?);
        *tree = Some(Arc::clone(&made));
        Ok(made)
    }
}
