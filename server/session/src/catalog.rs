//! Points, wherever they are: in the catalog, or sealed and on their way there.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{
    CatalogDamage, MachineName, PointDocument, PointName, PointOrigin, PointSelector, Repository,
    RepositoryWriter,
};

use crate::client_files::CarriedFiles;
use crate::document::SessionDocument;
use crate::lock::FileLock;
use crate::place::Place;
use crate::reclaim::remove_layers;
use crate::sealed_files;
use crate::unpublish::tidy;
use crate::verify::session_name;

/// Every restore point of a repository.
pub struct Catalog {
    repository: Arc<Repository>,
}

impl Catalog {
    /// The catalog of a repository.
    pub fn new(repository: &Arc<Repository>) -> Catalog {
        Catalog { repository: Arc::clone(repository) }
    }

    /// Points that stand in sessions' documents. Read before the repository's
    /// catalog: a point on its way from one to the other is then in the second.
    fn sealed(&self) -> Result<Vec<PointDocument>> {
        let documents = SessionDocument::readable(&self.repository)?;
        self.repository.catch_up()?;
        Ok(documents.into_iter().flat_map(|(_, document)| document.sealed).collect())
    }

    /// The machines, sorted.
    ///
    /// # Errors
    /// `Corrupt` when a document does not authenticate.
    pub fn machines(&self) -> Result<Vec<MachineName>> {
        let sealed = self.sealed()?;
        let mut machines: BTreeSet<_> = self.repository.machines()?.into_iter().collect();
        machines.extend(sealed.into_iter().map(|point| point.machine));
        Ok(machines.into_iter().collect())
    }

    /// The points of a machine, oldest first; none for an unknown machine.
    ///
    /// # Errors
    /// `Corrupt` when a document does not authenticate.
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

    /// The same without those that are set aside.
    ///
    /// # Errors
    /// As of [`Catalog::points`].
    pub fn offered(&self, machine: &MachineName) -> Result<Vec<PointDocument>> {
        let mut points = self.points(machine)?;
        points.retain(|point| point.quarantine.is_none());
        Ok(points)
    }

    /// Says whether a machine has any point, set aside or not.
    ///
    /// # Errors
    /// `NotFound`, telling which machines there are; `Corrupt` where all of its points are
    /// lost.
    pub fn check_machine(&self, machine: &MachineName) -> Result<()> {
        let is_known = !self.repository.newest_points(machine, 1)?.is_empty()
            || self.sealed()?.iter().any(|point| point.machine == *machine);
        match is_known {
            true => Ok(()),
            false => Err(self.missing(machine, &PointSelector::Latest(0))?),
        }
    }

    /// One point of a machine. `latest` means no point that is set aside, and passes over
    /// points dated in the future: see [`Horizon`](coldrise_store::Horizon).
    ///
    /// # Errors
    /// `NotFound`, telling which machines or points there are; `Corrupt` for one that has
    /// to be there and is lost.
    pub fn point(&self, machine: &MachineName, selector: &PointSelector) -> Result<PointDocument> {
        match self.find(machine, selector)? {
            Some(point) => Ok(point),
            None => Err(self.missing(machine, selector)?),
        }
    }

    /// One point of a machine by the address that it had before it was set aside: `latest`
    /// counts points that are set aside, too.
    ///
    /// # Errors
    /// As of [`Catalog::point`].
    pub fn point_or_quarantined(
        &self,
        machine: &MachineName,
        selector: &PointSelector,
    ) -> Result<PointDocument> {
        let PointSelector::Latest(back) = selector else { return self.point(machine, selector) };
        let points = self.points(machine)?.into_iter().rev();
        let horizon = self.repository.horizon(machine)?;
        let mut counted = points.filter(|point| !horizon.is_passed_over(&point.point));
        match counted.nth(*back as usize) {
            Some(point) => Ok(point),
            None => Err(self.missing(machine, selector)?),
        }
    }

    /// The files that a point carries; none for one that carries none.
    ///
    /// # Errors
    /// `Corrupt` where they are missing or are not its own; `NotFound` where the point
    /// itself is gone.
    pub fn files(&self, point: &PointDocument) -> Result<CarriedFiles> {
        if point.files.is_none() {
            return Ok(CarriedFiles::default());
        }
        let repository = &self.repository;
        let cataloged = || repository.point_files(&point.machine, &point.point);
        let mut found = cataloged()?;
        if let (None, PointOrigin::Synthetic { session, .. }) = (&found, &point.origin) {
            found = sealed_files::read(repository, &Place::of(repository, session), point)?;
            if found.is_none() {
                // It may have gone into the catalog just now.
                repository.catch_up()?;
                found = cataloged()?;
            }
        }
        match found {
            Some(bytes) => sealed_files::decode(repository, point, &bytes),
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

    /// The point, with no look at more of the machine's others than it takes: a
    /// machine may have thousands.
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
                // After the catalog was caught up with.
                let horizon = self.repository.horizon(machine)?;
                let counts = |point: &PointName| !horizon.is_passed_over(point);
                match self.newest(machine, &sealed, *back as usize, &counts)? {
                    // All of them are dated in the future: that tells nothing of the clock.
                    None if self.newest(machine, &sealed, 0, &counts)?.is_none() => {
                        self.newest(machine, &sealed, *back as usize, &|_| true)
                    }
                    found => Ok(found),
                }
            }
        }
    }

    /// The point that has `back` newer ones beside it, of those that are not set aside and
    /// whose name `counts`.
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
            if is_all || points.len() >= count {
                break points;
            }
            looked = looked.saturating_mul(2);
        };
        points.extend(sealed.iter().filter(|point| is_meant(point)).cloned());
        points.sort_by(|a, b| b.point.cmp(&a.point));
        // A point on its way into the catalog stands in both.
        points.dedup_by(|a, b| a.point == b.point);
        Ok(points.into_iter().nth(back))
    }

    /// A point that was found before, as it is now: to be asked once it is written down
    /// that it is used (a lease, a session). What is not there any more must not be
    /// used, and where a fold has moved its disks, what was written down names what is
    /// no longer used. See `reclaim`.
    ///
    /// # Errors
    /// `NotFound` where it was forgotten meanwhile.
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

    /// What a user should know of a machine's points that are dated in the future; `None`
    /// where there are none.
    ///
    /// # Errors
    /// As of [`Catalog::points`].
    pub fn future_warning(&self, machine: &MachineName) -> Result<Option<String>> {
        let points = self.points(machine)?;
        let horizon = self.repository.horizon(machine)?;
        Ok(horizon.warning(machine, points.iter().map(|point| &point.point)))
    }

    /// The points that have to be there and are nowhere, of one machine or of all, the oldest of
    /// a machine first.
    ///
    /// # Errors
    /// `Corrupt` where the catalog cannot be read; what the operating system says.
    pub fn lost_points(&self, only: Option<&MachineName>) -> Result<Vec<(MachineName, PointName)>> {
        if self.repository.lost_points(only)?.is_empty() {
            return Ok(Vec::new());
        }
        // As of `is_lost`.
        let sealed = self.sealed()?;
        let mut lost = self.repository.lost_points(only)?;
        lost.retain(|(machine, point)| !holds(&sealed, machine, point));
        Ok(lost)
    }

    /// Whether this point has to be there and is nowhere: neither in the catalog, nor sealed and
    /// on its way there.
    ///
    /// # Errors
    /// As of [`Catalog::lost_points`].
    pub fn is_lost(&self, machine: &MachineName, point: &PointName) -> Result<bool> {
        // Last: it may go into the catalog meanwhile.
        Ok(self.repository.is_lost(machine, point)?
            && !holds(&self.sealed()?, machine, point)
            && self.repository.is_lost(machine, point)?)
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
            let lost = CatalogDamage::lost(format!("{machine}/{point}"));
            return Ok(Error::new(ErrorKind::Corrupt, lost.message()));
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

/// What [`enter_sealed_points`] has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entered {
    /// Sealed points that are in the catalog from now on.
    pub points: usize,
    /// Markers of other points, and of sessions, that were missing or could not be read.
    pub markers: u64,
}

/// Enters sealed points into the catalog, removes what ended sessions left
/// behind, and layers that a crash left without an owner. Every command that
/// writes the repository calls it first. Makes the markers that are missing as well.
///
/// # Errors
/// As writing to the catalog; what was not entered stays where it is.
pub fn enter_sealed_points(writer: &RepositoryWriter) -> Result<Entered> {
    let repository = writer.repository();
    let documents = FileLock::documents(repository)?;
    let mut entered = Entered::default();
    for (place, mut document) in SessionDocument::readable(repository)? {
        if !document.sealed.is_empty() {
            for point in &document.sealed {
                let files = match &point.files {
                    Some(_) => sealed_files::read(repository, &place, point)?,
                    None => None,
                };
                match writer.put_point_with_files(point, files.as_deref()) {
                    Ok(()) => entered.points += 1,
                    // A crash came between entering it and taking it off the list.
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(error),
                }
            }
            document.sealed.clear();
            document.write(repository, &place)?;
        }
        sealed_files::tidy(repository, &place, &document.sealed)?;
        tidy(repository, &place, &document)?;
        if !document.is_ended {
            entered.markers += u64::from(repository.mark(&session_name(&document))?);
        }
    }
    entered.markers += repository.mark_points()?;
    match remove_layers(repository, &documents) {
        Ok(_) => {}
        // What is damaged is told by whoever needs it, and by verify.
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {
            tracing::info!(error = %error.full_message(), "layers without an owner stay");
        }
        Err(error) => return Err(error),
    }
    Ok(entered)
}
