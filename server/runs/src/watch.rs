//! Tells which runs have changed, by inotify: nothing is polled per run.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use crate::folder::{RunsFolder, planned_id};

use crate::RunId;
use crate::run_files::RunFiles;

/// Interval of looking whether the folder of all runs is still the same one.
const SAME_INTERVAL: Duration = Duration::from_secs(1);
/// The same while there is none.
const MISSING_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of telling runs that the system does not let us watch: it has too many watches.
const UNWATCHED_INTERVAL: Duration = Duration::from_millis(150);
/// The system tells that a lock is closed shortly before it is free.
const UNLOCK_INTERVAL: Duration = Duration::from_millis(1);
const UNLOCK_PATIENCE: Duration = Duration::from_millis(500);
const BUFFER_BYTES: usize = 64 << 10;

/// Watches a folder of runs.
pub struct Watch {
    folder: RunsFolder,
    inotify: OwnedFd,
    /// The folder that is watched, as it was opened; `None` if there is none.
    root: Option<RunFiles>,
    /// Running runs, by watch.
    living: HashMap<i32, RunId>,
    /// Runs whose lock is about to be free, and until when to believe that.
    ending: BTreeMap<RunId, Instant>,
    /// Running runs without a watch, and when to tell them next.
    unwatched: BTreeSet<RunId>,
    next_unwatched: Instant,
    changed: BTreeSet<RunId>,
}

impl Watch {
    /// Watches a folder, which need not exist. The first call of [`Watch::next`] tells every run.
    ///
    /// # Errors
    /// Errors of the operating system, such as too many users of inotify.
    pub fn new(folder: &RunsFolder) -> Result<Watch> {
        Ok(Watch {
            folder: folder.clone(),
            inotify: new_inotify()?,
            root: None,
            living: HashMap::new(),
            ending: BTreeMap::new(),
            unwatched: BTreeSet::new(),
            next_unwatched: Instant::now(),
            changed: BTreeSet::new(),
        })
    }

    /// The runs that have changed, or may have: their state, their log, or that they exist.
    /// Waits until there is one, at most for `timeout`, and is empty then. Planned runs count.
    /// Tells every run if changes may have been missed: the folder was replaced, or there were too many.
    ///
    /// # Errors
    /// Errors of reading the folder, after a pause. The next call tries again.
    pub fn next(&mut self, timeout: Duration) -> Result<Vec<RunId>> {
        self.next_or_error(timeout).inspect_err(|_| std::thread::sleep(timeout.min(SAME_INTERVAL)))
    }

    fn next_or_error(&mut self, timeout: Duration) -> Result<Vec<RunId>> {
        let deadline = Instant::now() + timeout;
        loop {
            self.keep_root()?;
            self.look_for_ends();
            let now = Instant::now();
            if !self.changed.is_empty() || now >= deadline {
                return Ok(std::mem::take(&mut self.changed).into_iter().collect());
            }
            self.read_events((deadline - now).min(self.interval(now)))?;
        }
    }

    fn interval(&self, now: Instant) -> Duration {
        let unwatched = match self.unwatched.is_empty() {
            true => Duration::MAX,
            false => self.next_unwatched.saturating_duration_since(now),
        };
        match &self.root {
            None => MISSING_INTERVAL,
            Some(_) if !self.ending.is_empty() => UNLOCK_INTERVAL,
            Some(_) => SAME_INTERVAL.min(unwatched),
        }
    }

    /// Watches the folder that is at the path now.
    fn keep_root(&mut self) -> Result<()> {
        let found = match RunFiles::open_any(self.folder.path()) {
            Err(error) if error.kind() == coldrise_block::ErrorKind::NotFound => None,
            found => Some(found?),
        };
        match (&self.root, &found) {
            (None, None) => return Ok(()),
            (Some(root), Some(found)) if root.is_same(found)? => return Ok(()),
            _ => {}
        }
        // Runs of the former folder are gone.
        self.changed.extend(std::mem::take(&mut self.living).into_values());
        self.changed.append(&mut self.unwatched);
        self.ending.clear();
        self.root = None;
        self.inotify = new_inotify()?;
        let Some(found) = found else { return Ok(()) };
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF;
        inotify::add_watch(&self.inotify, found.own_path(), flags)
            .map_err(std::io::Error::from)
            .context(|| format!("watching {}", self.folder.path().display()))?;
        for name in self.folder.names()? {
            self.tell_name(&name);
        }
        self.root = Some(found);
        Ok(())
    }

    /// A name has appeared in the folder, or disappeared.
    fn tell_name(&mut self, name: &str) {
        if let Ok(id) = name.parse::<RunId>() {
            self.watch_run(&id);
            self.changed.insert(id);
        } else if let Some(id) = planned_id(name) {
            self.changed.insert(id);
        }
    }

    /// Watches a run if it is running.
    fn watch_run(&mut self, id: &RunId) {
        let Ok(run) = self.folder.open(id) else { return };
        let is_running = || run.is_locked().unwrap_or(false);
        if !is_running() {
            return;
        }
        let flags = WatchFlags::MODIFY
            | WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ONLYDIR;
        match inotify::add_watch(&self.inotify, run.own_path(), flags) {
            Ok(watch) => drop(self.living.insert(watch, id.clone())),
            Err(_) => drop(self.unwatched.insert(id.clone())),
        }
        // It may have ended before it was watched.
        if !is_running() {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: &RunId) {
        let watches = self.living.iter().filter(|(_, living)| *living == id);
        for watch in watches.map(|(watch, _)| *watch).collect::<Vec<_>>() {
            self.living.remove(&watch);
            // The folder may be gone, and its watch with it.
            let _ = inotify::remove_watch(&self.inotify, watch);
        }
        self.unwatched.remove(id);
        self.ending.remove(id);
        self.changed.insert(id.clone());
    }

    fn look_for_ends(&mut self) {
        let now = Instant::now();
        let is_running =
            |id: &RunId| self.folder.open(id).and_then(|run| run.is_locked()).unwrap_or(false);
        let mut looked: Vec<RunId> = self.ending.keys().cloned().collect();
        if !self.unwatched.is_empty() && now >= self.next_unwatched {
            self.next_unwatched = now + UNWATCHED_INTERVAL;
            looked.extend(self.unwatched.iter().cloned());
            self.changed.extend(self.unwatched.iter().cloned());
        }
        looked.retain(|id| !is_running(id));
        looked.iter().for_each(|id| self.forget(id));
        self.ending.retain(|_, until| *until > now);
    }

    /// Waits for events and reads them.
    fn read_events(&mut self, patience: Duration) -> Result<()> {
        let timeout = Timespec {
            tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: patience.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&self.inotify, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => return Ok(()),
            polled => polled.map_err(std::io::Error::from).context(|| "waiting for events")?,
        };
        let mut names = Vec::new();
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let ended = loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                Err(error) => break error,
            };
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                // Everything is reported again.
                self.root = None;
                return Ok(());
            }
            let name = event.file_name().map(|name| name.to_string_lossy().into_owned());
            match (self.living.get(&event.wd()), name) {
                (Some(id), Some(name)) => {
                    self.changed.insert(id.clone());
                    if name == "lock" && event.events().contains(ReadFlags::CLOSE_WRITE) {
                        self.ending.insert(id.clone(), Instant::now() + UNLOCK_PATIENCE);
                    }
                }
                (Some(_), None) if event.events().contains(ReadFlags::IGNORED) => {
                    self.living.remove(&event.wd());
                }
                (None, Some(name)) => names.push(name),
                _ => {}
            }
        };
        names.iter().for_each(|name| self.tell_name(name));
        match ended {
            Errno::AGAIN => Ok(()),
            error => Err(std::io::Error::from(error)).context(|| "reading events"),
        }
    }
}

fn new_inotify() -> Result<OwnedFd> {
    inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
        .map_err(std::io::Error::from)
        .context(|| "watching the folder of runs")
        .map_err(|error| {
            error.advise("if too many programs watch files, raise fs.inotify.max_user_instances")
        })
}
