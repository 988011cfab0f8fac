//! Who writes to a bucket, who compacts it, and who makes a repository in it.
//!
//! A compaction removes what no point needs; a writer may have found just that, and name it in the next point. So they never
//! run at the same time. There is no lock in an object store: each puts an object of its own in `busy/` first, and then looks for
//! those that exclude it. If both begin at once, at least one sees the other. An object that was not renewed for [`FORGOTTEN`] is of a
//! process that was killed. All times are the server's.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use super::in_parallel::in_parallel;
use super::pack_reader::REQUESTS;
use super::probe::unusable;
use coldrise_block::hex;
use coldrise_objects::Objects;

pub(super) const FOLDER: &str = "busy/";
/// An object is renewed in this time.
const RENEWAL: Duration = Duration::from_secs(60);
/// One that was not renewed for this time is of a killed process.
const FORGOTTEN: Duration = Duration::from_secs(15 * 60);
/// A writer that could not renew its object for this time adds no point: a compaction may have run.
const LATE: Duration = Duration::from_secs(10 * 60);

/// The content of an object whose process has ended, and may not remove it.
const ENDED: &[u8] = b"ended";

/// The activity of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Writer,
    Compactor,
    /// Makes a repository.
    Founder,
}

impl Role {
    fn prefix(self) -> &'static str {
        match self {
            Role::Writer => "busy/w-",
            Role::Compactor => "busy/t-",
            Role::Founder => "busy/i-",
        }
    }

    fn others(self) -> &'static [Role] {
        match self {
            Role::Writer => &[Role::Compactor],
            Role::Compactor => &[Role::Writer, Role::Compactor],
            Role::Founder => &[Role::Founder],
        }
    }
}

struct Renewed {
    /// When this was renewed, by both clocks: the first one stands while the host sleeps.
    at: (Instant, SystemTime),
    is_over: bool,
}

/// The object of this process, renewed until it is dropped.
pub(super) struct Busy {
    objects: Arc<dyn Objects>,
    name: String,
    renewed: Arc<(Mutex<Renewed>, Condvar)>,
    renewing: Option<JoinHandle<()>>,
}

impl Busy {
    /// # Errors
    /// `Busy` if another process does what excludes this; `Unsupported` if the store's lists lag behind; errors of reaching the
    /// store.
    pub(super) fn begin(objects: &Arc<dyn Objects>, role: Role) -> Result<Busy> {
        let mut number = [0; 8];
        coldrise_store::random(&mut number)?;
        let name = format!("{}{}", role.prefix(), hex::encode(&number));
        let at = (Instant::now(), SystemTime::now());
        let renewed = Arc::new((Mutex::new(Renewed { at, is_over: false }), Condvar::new()));
        let mut busy = Busy { objects: Arc::clone(objects), name, renewed, renewing: None };
        // From here on it is removed by the drop: a put that fails may have stored it.
        objects.put(&busy.name, Vec::new())?;
        busy.look_for_others(role)?;
        let (objects, name, renewed) =
            (Arc::clone(&busy.objects), busy.name.clone(), Arc::clone(&busy.renewed));
        busy.renewing = Some(std::thread::spawn(move || renew(&*objects, &name, &renewed)));
        Ok(busy)
    }

    fn look_for_others(&self, role: Role) -> Result<()> {
        let listed = self.objects.list(FOLDER)?;
        let own = listed.iter().find(|listed| listed.name == self.name);
        let now_ms = own
            .map(|own| own.modified_ms)
            .ok_or_else(|| unusable(&*self.objects, "a new object is missing from its listing"))?;
        let (over, others): (Vec<_>, Vec<_>) =
            listed.into_iter().filter(|other| other.name != self.name).partition(|other| {
                // The process has ended, was killed, or the server's clock was wrong then.
                other.size_bytes > 0
                    || now_ms.abs_diff(other.modified_ms) >= FORGOTTEN.as_millis() as u64
            });
        for other in others {
            let mut roles = role.others().iter();
            let Some(found) = roles.find(|other_role| other.name.starts_with(other_role.prefix()))
            else {
                continue;
            };
            let what = match found {
                Role::Writer => "a copy writes to it",
                Role::Compactor => "a prune or forget frees space in it",
                Role::Founder => "another coldrise bucket init makes a repository in it",
            };
            let minutes = FORGOTTEN.as_secs() / 60;
            let text = format!(
                "{}: {what}, or did so until it was killed in the last {minutes} minutes",
                self.objects.place()
            );
            return Err(Error::new(ErrorKind::Busy, text).advise("try again later"));
        }
        if role == Role::Compactor {
            // Left by keys that may remove nothing. Some stores keep every object for a time.
            in_parallel(&over, REQUESTS, |other| {
                if let Err(error) = self.objects.delete(&other.name) {
                    tracing::debug!("{}: {}", other.name, error.full_message());
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// An object that counts as one of an ended process while it has content.
    pub(super) fn name_of_probe(&self) -> String {
        format!("{}-probe", self.name)
    }

    /// # Errors
    /// `Incomplete` if this process could not renew its object for too long, or the object was removed; errors
    /// of reaching the store.
    pub(super) fn check(&self) -> Result<()> {
        match self.objects.get(&self.name, 1) {
            Err(error) if error.kind() == ErrorKind::NotFound => Err(self.late()),
            read => read.and_then(|_| self.check_time()),
        }
    }

    /// [`Busy::check`] without a request.
    pub(super) fn check_time(&self) -> Result<()> {
        let (monotonic, wall) = self.renewed.0.lock().at;
        let age = monotonic.elapsed().max(wall.elapsed().unwrap_or_default());
        match age < LATE {
            true => Ok(()),
            false => Err(self.late()),
        }
    }

    fn late(&self) -> Error {
        let text = format!("{} was out of reach for too long", self.objects.place());
        Error::new(ErrorKind::Incomplete, text)
            .advise("run it again: data that is already stored is not sent again")
    }
}

fn renew(objects: &dyn Objects, name: &str, renewed: &(Mutex<Renewed>, Condvar)) {
    let (state, changed) = renewed;
    let mut state = state.lock();
    loop {
        let until = Instant::now() + RENEWAL;
        while !state.is_over && !changed.wait_until(&mut state, until).timed_out() {}
        if state.is_over {
            return;
        }
        let at = (Instant::now(), SystemTime::now());
        parking_lot::MutexGuard::unlocked(&mut state, || match objects.put_sign(name, &[]) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!("{name}: {}", error.full_message());
                false
            }
        })
        .then(|| state.at = at);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.renewed.0.lock().is_over = true;
        self.renewed.1.notify_all();
        if let Some(renewing) = self.renewing.take() {
            let _ = renewing.join();
        }
        let removed = self.objects.delete_sign(&self.name);
        if let Err(error) = removed.or_else(|_| self.objects.put_sign(&self.name, ENDED)) {
            // It is forgotten after a while.
            tracing::debug!("{}: {}", self.name, error.full_message());
        }
    }
}
