//! Restore points in the catalog, and sealed points that are not yet in it.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    CatalogDamage, MachineName, OpenOptions, PassphraseSource, PointDocument, PointName,
    PointOrigin, PointSelector, ReopenReport, Repository, RepositoryWriter, order_states,
};

use crate::client_files::CarriedFiles;
use crate::client_files::sealed;
use crate::incoming::IncomingPoint;
use crate::locks::file_lock::FileLock;
use crate::paths::SessionPaths;
use crate::points::in_use::remove_layers;
use crate::session_folder::addresses::{point_name, session_name};
use crate::session_folder::document::SessionDocument;
use crate::session_folder::ended::remove_remains;
use crate::session_folder::rollback_guard::heal_progress;

/// Every restore point of a repository.
pub struct Catalog {
    repository: Arc<Repository>,
}

impl Catalog {
    /// The catalog of a repository.
    pub fn new(repository: &Arc<Repository>) -> Catalog {
        Catalog { repository: Arc::clone(repository) }
    }

    /// Points in the sessions' documents. Read them before the repository's catalog: a point that
    /// moves to the catalog in between is then found there.
    fn sealed(&self) -> Result<Vec<PointDocument>> {
        let documents = SessionDocument::readable(&self.repository)?;
        self.repository.catch_up()?;
        Ok(documents.into_iter().flat_map(|(_, document)| document.sealed).collect())
    }

    /// The machines, sorted.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn machines(&self) -> Result<Vec<MachineName>> {
        let sealed = self.sealed()?;
        let mut machines: BTreeSet<_> = self.repository.machines()?.into_iter().collect();
        machines.extend(sealed.into_iter().map(|point| point.machine));
        Ok(machines.into_iter().collect())
    }

    /// The points of a machine, oldest first. An unknown machine has none.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn points(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        let sealed = self.sealed()?;
        let mut points = self.repository.points(machine)?;
        let known: HashSet<_> = points.iter().map(|point| point.point.clone()).collect();
        points.extend(
            sealed
                .into_iter()
                .filter(|point| point.machine == *machine && !known.contains(&point.point)),
        );
        points.sort_by(|a, b| a.point.cmp(&b.point));
        Ok(points)
    }

    /// The points of a machine that are not quarantined, oldest first.
    ///
    /// # Errors
    /// As for [`Catalog::points`].
    pub fn offered(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        let mut points = self.points(machine)?;
        points.retain(|point| point.quarantine.is_none());
        Ok(points)
    }

    /// Checks that a machine has a point, quarantined or not.
    ///
    /// # Errors
    /// `NotFound`, naming the existing machines; `Corrupt` if all its points are lost.
    pub fn check_machine(&self, machine: &MachineName) -> Result<()> {
        let is_cataloged =
            || Ok::<_, Error>(!self.repository.newest_points(machine, 1)?.is_empty());
        // A point of another process may be in the catalog only after the sealed ones are read, which catches up.
        let is_known = is_cataloged()?
            || self.sealed()?.iter().any(|point| point.machine == *machine)
            || is_cataloged()?;
        if is_known { Ok(()) } else { Err(self.missing(machine, &PointSelector::Latest(0))?) }
    }

    /// One point of a machine. `latest` skips quarantined points and points dated in the future:
    /// see [`ClockGuard`](coldrise_store::ClockGuard).
    ///
    /// # Errors
    /// `NotFound`, naming the existing machines or points, or saying that the point is still on its
    /// way here; `Corrupt` if the point must exist and is lost.
    pub fn point(&self, machine: &MachineName, selector: &PointSelector) -> Result<PointDocument> {
        match self.find(machine, selector)? {
            Some(point) => Ok(point),
            None => Err(self.missing(machine, selector)?),
        }
    }

    /// One point of a machine by the address that it had before its quarantine: `latest` also
    /// counts quarantined points.
    ///
    /// # Errors
    /// As for [`Catalog::point`].
    pub fn point_or_quarantined(
        &self,
        machine: &MachineName,
        selector: &PointSelector,
    ) -> Result<PointDocument> {
        let PointSelector::Latest(back) = selector else { return self.point(machine, selector) };
        let points = self.points(machine)?.into_iter();
        let points = order_states(points, PointDocument::state_time).into_iter().rev();
        let clock_guard = self.repository.clock_guard(machine)?;
        let mut counted = points.filter(|point| !clock_guard.is_passed_over(&point.point));
        match counted.nth(*back as usize) {
            Some(point) => Ok(point),
            None => Err(self.missing(machine, selector)?),
        }
    }

    /// The files that a point carries; none if it carries none.
    ///
    /// # Errors
    /// `Corrupt` if the files are missing or belong to another point; `NotFound` if the point no
    /// longer exists.
    pub fn files(&self, point: &PointDocument) -> Result<CarriedFiles> {
        if point.files.is_none() {
            return Ok(CarriedFiles::default());
        }
        let repository = &self.repository;
        let cataloged = || repository.point_files(&point.machine, &point.point);
        let mut found = cataloged()?;
        if let (None, PointOrigin::Synthetic { session, .. }) = (&found, &point.origin) {
            found = sealed::read(repository, &SessionPaths::of(repository, session), point)?;
            if found.is_none() {
                // A writer may have entered the point into the catalog just now.
                repository.catch_up()?;
                found = cataloged()?;
            }
        }
        match found {
            Some(bytes) => sealed::decode(repository, point, &bytes),
            None => {
                let name = PointSelector::Exact(point.point.clone());
                let (kind, what) = match self.find(&point.machine, &name)? {
                    Some(_) => (ErrorKind::Corrupt, "the files that it carries are missing"),
                    None => (ErrorKind::NotFound, "it is gone"),
                };
                Err(Error::new(kind, format!("{}/{}: {what}", point.machine, point.point)))
            }
        }
    }

    /// Finds the point and reads as few of the machine's other points as possible: a machine may
    /// have thousands.
    fn find(
        &self,
        machine: &MachineName,
        selector: &PointSelector,
    ) -> Result<Option<PointDocument>> {
        match selector {
            PointSelector::Exact(name) => {
                if let Some(point) = self.cataloged(machine, name)? {
                    return Ok(Some(point));
                }
                let mut sealed = self.sealed()?.into_iter();
                match self.cataloged(machine, name)? {
                    Some(point) => Ok(Some(point)),
                    None => Ok(sealed.find(|p| p.machine == *machine && p.point == *name)),
                }
            }
            PointSelector::Latest(back) => {
                let mut sealed = self.sealed()?;
                sealed.retain(|point| point.machine == *machine);
                // Read the guard after `catch_up`.
                let clock_guard = self.repository.clock_guard(machine)?;
                let counts = |point: &PointName| !clock_guard.is_passed_over(point);
                match self.newest(machine, &sealed, *back as usize, &counts)? {
                    // All points are dated in the future. That says nothing about the clock, so all
                    // of them count.
                    None if self.newest(machine, &sealed, 0, &counts)?.is_none() => {
                        self.newest(machine, &sealed, *back as usize, &|_| true)
                    }
                    found => Ok(found),
                }
            }
        }
    }

    /// The point with exactly `back` points of newer states. Counts only points that are not
    /// quarantined and whose name satisfies `counts`.
    fn newest(
        &self,
        machine: &MachineName,
        sealed: &[PointDocument],
        back: usize,
        counts: &dyn Fn(&PointName) -> bool,
    ) -> Result<Option<PointDocument>> {
        let is_meant = |point: &PointDocument| point.quarantine.is_none() && counts(&point.point);
        let count = back.saturating_add(1);
        let mut looked = count;
        let mut points = loop {
            let mut points = self.repository.newest_points(machine, looked)?;
            let is_all = points.len() < looked;
            points.retain(is_meant);
            // A point of a mark may show an older state than others with lower numbers. `count` other
            // points suffice: what has a lower number than all of them is older.
            let others = points.iter().filter(|point| point.marked_at_ms().is_none()).count();
            if is_all || others >= count {
                break points;
            }
            looked = looked.saturating_mul(2);
        };
        points.extend(sealed.iter().filter(|point| is_meant(point)).cloned());
        points.sort_by(|a, b| a.point.cmp(&b.point));
        // A point that is moving into the catalog is listed twice.
        points.dedup_by(|a, b| a.point == b.point);
        Ok(order_states(points.into_iter(), PointDocument::state_time).into_iter().nth_back(back))
    }

    /// The current document of a point that was read earlier. Call this after the use of the point
    /// is recorded (in a lease or a session). A point that no longer exists must not be used. If a
    /// fold has moved its disks, the recorded chunk maps and layers are no longer used. See
    /// `in_use`.
    ///
    /// # Errors
    /// `NotFound` if the point was forgotten meanwhile.
    pub fn confirm(&self, point: &PointDocument) -> Result<PointDocument> {
        self.repository.catch_up()?;
        let name = PointSelector::Exact(point.point.clone());
        match self.find(&point.machine, &name)? {
            Some(found) if found.created_at_ms == point.created_at_ms => Ok(found),
            _ => Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{}/{} was forgotten just now: see coldrise list {}",
                    point.machine, point.point, point.machine
                ),
            )),
        }
    }

    /// A warning about the points of a machine that are dated in the future; `None` if there are
    /// none.
    ///
    /// # Errors
    /// As for [`Catalog::points`].
    pub fn future_warning(&self, machine: &MachineName) -> Result<Option<String>> {
        let sealed = self.sealed()?.into_iter().filter(|point| point.machine == *machine);
        let mut names: BTreeSet<_> = sealed.map(|point| point.point).collect();
        names.extend(self.repository.point_names_of(machine)?);
        let clock_guard = self.repository.clock_guard(machine)?;
        Ok(clock_guard.warning(machine, &names))
    }

    /// The points that must exist and are missing, of one machine or of all. Each machine's points
    /// are sorted oldest first.
    ///
    /// # Errors
    /// `Corrupt` if the catalog cannot be read; the operating system's error.
    pub fn lost_points(&self, only: Option<&MachineName>) -> Result<Vec<(MachineName, PointName)>> {
        if self.repository.lost_points(only)?.is_empty() {
            return Ok(Vec::new());
        }
        // Read in the same order as in `is_lost`.
        let sealed = self.sealed()?;
        let mut lost = self.repository.lost_points(only)?;
        lost.retain(|(machine, point)| !holds(&sealed, machine, point));
        Ok(lost)
    }

    /// True if this point must exist and is missing: it is neither in the catalog nor sealed and
    /// waiting for it.
    ///
    /// # Errors
    /// As for [`Catalog::lost_points`].
    pub fn is_lost(&self, machine: &MachineName, point: &PointName) -> Result<bool> {
        // Read the sealed points last: a writer may enter the point into the catalog meanwhile.
        Ok(self.repository.is_lost(machine, point)?
            && !holds(&self.sealed()?, machine, point)
            && self.repository.is_lost(machine, point)?)
    }

    /// The damage of a lost point, with the command that restores or removes it.
    pub fn lost(&self, machine: &MachineName, point: &PointName) -> CatalogDamage {
        self.repository.lost(format!("{machine}/{point}"))
    }

    fn cataloged(&self, machine: &MachineName, name: &PointName) -> Result<Option<PointDocument>> {
        match self.repository.point(machine, name) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            found => found.map(Some),
        }
    }

    fn missing(&self, machine: &MachineName, selector: &PointSelector) -> Result<Error> {
        let points = self.points(machine)?;
        let lost = match selector {
            PointSelector::Exact(name) => self.is_lost(machine, name)?.then(|| name.clone()),
            PointSelector::Latest(_) if points.is_empty() => {
                self.lost_points(Some(machine))?.pop().map(|(_, point)| point)
            }
            PointSelector::Latest(_) => None,
        };
        if let Some(point) = lost {
            return Ok(Error::new(ErrorKind::Corrupt, self.lost(machine, &point).message()));
        }
        // `latest` means a point on its way only if the machine has no restore point.
        if points.is_empty() || matches!(selector, PointSelector::Exact(_)) {
            if let Some(incoming) = IncomingPoint::find(&self.repository, machine, selector)? {
                return Ok(incoming.not_complete());
            }
        }
        if points.is_empty() {
            let names: Vec<_> = self.machines()?.iter().map(ToString::to_string).collect();
            let there = match names.len() {
                0 => "the repository holds none; make a backup first".to_owned(),
                _ => format!("there are: {}", shorten(&names)),
            };
            return Ok(Error::new(
                ErrorKind::NotFound,
                format!("there is no machine {machine}; {there}"),
            ));
        }
        let name = |p: &PointDocument| match p.quarantine {
            Some(_) => format!("{} (quarantined)", p.point),
            None => p.point.to_string(),
        };
        let names: Vec<_> = points.iter().rev().map(name).collect();
        Ok(Error::new(
            ErrorKind::NotFound,
            format!("machine {machine} has no point {selector}; it has: {}", shorten(&names)),
        ))
    }
}

fn holds(points: &[PointDocument], machine: &MachineName, point: &PointName) -> bool {
    points.iter().any(|known| known.machine == *machine && known.point == *point)
}

fn shorten(names: &[String]) -> String {
    const SHOWN: usize = 5;
    match names.len() {
        0..=SHOWN => names.join(", "),
        more => format!("{} and {} more", names[..SHOWN].join(", "), more - SHOWN),
    }
}

/// The result of [`enter_sealed_points`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EnteredPoints {
    /// Number of sealed points entered into the catalog.
    pub points: usize,
    /// Number of markers of other points and of sessions that were missing or unreadable.
    pub markers: u64,
}

/// Opens a repository for writing even if parts of it are lost, restores duplicated parts from
/// their copies, and enters sealed points into the catalog.
///
/// # Errors
/// As for [`RepositoryWriter::open_for_repair`] and [`enter_sealed_points`].
pub fn open_for_repair(
    path: &Path,
    passphrase: &PassphraseSource,
    options: &OpenOptions,
) -> Result<(RepositoryWriter, ReopenReport, EnteredPoints)> {
    // These points need no marker to enter the catalog.
    let waiting = |repository: &Repository| {
        let documents = SessionDocument::readable(repository)?;
        let sealed = documents.iter().flat_map(|(_, document)| &document.sealed);
        Ok(sealed.map(point_name).collect())
    };
    let (writer, reopened) =
        RepositoryWriter::open_for_repair_beside(path, passphrase, options, &waiting)?;
    let mut entered = enter_sealed_points(&writer)?;
    entered.markers += writer.repository().mark_points(usize::MAX)?;
    Ok((writer, reopened, entered))
}

/// Markers that a writing command reads, beside those that it needs, so that its time does not grow with the number
/// of points.
const READ_MARKERS: usize = 256;

/// Enters sealed points into the catalog. Removes the remains of ended sessions, and layers that a
/// crash left without an owner. Creates missing markers, and replaces unreadable ones among the first
/// `READ_MARKERS` that it meets. Every command that writes the repository calls this first.
///
/// # Errors
/// The errors of writing to the catalog. Points that were not entered stay in their sessions.
pub fn enter_sealed_points(writer: &RepositoryWriter) -> Result<EnteredPoints> {
    let repository = writer.repository();
    let documents = FileLock::documents(repository)?;
    let mut entered = EnteredPoints::default();
    for (place, mut document) in SessionDocument::readable(repository)? {
        if !document.sealed.is_empty() {
            for point in &document.sealed {
                let files = match &point.files {
                    Some(_) => sealed::read(repository, &place, point)?,
                    None => None,
                };
                match writer.put_point_with_files(point, files.as_deref()) {
                    Ok(()) => entered.points += 1,
                    // A crash came after the point was entered and before it left the session's
                    // list.
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(error),
                }
            }
            document.sealed.clear();
            document.write(repository, &place)?;
        }
        sealed::remove_others(repository, &place, &document.sealed)?;
        remove_remains(repository, &place, &document)?;
        if !document.is_ended {
            heal_progress(repository, &place, &document);
            entered.markers += u64::from(repository.mark(&session_name(&document))?);
        }
    }
    entered.markers += repository.mark_points(READ_MARKERS)?;
    match remove_layers(repository, &documents) {
        Ok(_) => {}
        // Commands that need the damaged part report the damage, and so does verify.
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {
            tracing::info!(error = %error.full_message(), "layers without an owner stay");
        }
        Err(error) => return Err(error),
    }
    Ok(entered)
}
