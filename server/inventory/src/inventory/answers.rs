//! The answers of an [`Inventory`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coldrise_block::Result;
use coldrise_session::{ActivityDetail, Catalog};
use coldrise_store::{Address, MachineName, PointSelector, RetentionRules, SessionName};

use super::Inventory;
use crate::activity::{ActivityTotals, ActivityWatch};
use crate::content::Content;
use crate::damage::DamageListing;
use crate::difference::Difference;
use crate::listing::Listing;
use crate::machines::{MachineSummary, PointPage, PointQuery};
use crate::marks::MarksDetails;
use crate::occupied::Occupied;
use crate::points::PointDetails;
use crate::retention::RetentionPlan;
use crate::sessions::{SessionDetails, SessionListing};
use crate::space::Stats;
use coldrise_block::now_ms;

/// Each call fails with the error of the last refresh while the repository is away.
impl Inventory {
    /// The state of every machine, sorted by name.
    ///
    /// # Errors
    /// Only those of [`Inventory::refresh`].
    pub fn machines(&self) -> Result<Vec<MachineSummary>> {
        Ok(self.index()?.summaries(now_ms()))
    }

    /// As [`Inventory::machines`], but while the repository is away, as it was last seen: ages keep growing.
    pub fn last_known_machines(&self) -> Vec<MachineSummary> {
        let index = Arc::clone(&self.state.read().index);
        index.summaries(now_ms())
    }

    /// The display names of the machines that have one, by the machine's name.
    ///
    /// # Errors
    /// Only those of [`Inventory::refresh`].
    pub fn display_names(&self) -> Result<BTreeMap<String, String>> {
        Ok(self.index()?.display_names())
    }

    /// The state of one machine.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn machine(&self, machine: &MachineName) -> Result<MachineSummary> {
        self.index()?.summary(machine, now_ms())
    }

    /// The points of one machine or of all, as `list --json` prints them.
    ///
    /// # Errors
    /// `NotFound` for an unknown machine.
    pub fn listing(&self, only: Option<&MachineName>) -> Result<Listing> {
        self.index()?.listing(only)
    }

    /// Points of a machine.
    ///
    /// # Errors
    /// `NotFound` for an unknown machine.
    pub fn points(&self, machine: &MachineName, query: &PointQuery) -> Result<PointPage> {
        self.index()?.page(machine, query)
    }

    /// One point, as `show --json` prints it. An unreadable boot check is left out.
    ///
    /// # Errors
    /// `NotFound`, naming the existing machines or points; `Corrupt` if the point is lost.
    pub fn point(&self, machine: &MachineName, selector: &PointSelector) -> Result<PointDetails> {
        let repository = self.repository()?;
        let point = Catalog::new(&repository).point(machine, selector)?;
        let boot = repository.boot_check(machine, &point.point).ok().flatten();
        PointDetails::new(&point, None, boot.map(|(check, _)| check))
    }

    /// The repository's id.
    ///
    /// # Errors
    /// Only those of [`Inventory::refresh`].
    pub fn id(&self) -> Result<String> {
        Ok(self.repository()?.id().to_string())
    }

    /// The space that the repository's folder takes on its drive, in bytes. Reads the sizes of all its files.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn occupied_bytes(&self) -> Result<u64> {
        Ok(Occupied::measure(&*self.repository()?)?.sum())
    }

    /// The picture of the screen at the end of the point's last boot check, as PNG; `None` without a
    /// check or a picture.
    ///
    /// # Errors
    /// As [`Inventory::point`]; `Corrupt` for a damaged check.
    pub fn boot_screenshot(
        &self,
        machine: &MachineName,
        selector: &PointSelector,
    ) -> Result<Option<Vec<u8>>> {
        let repository = self.repository()?;
        let point = Catalog::new(&repository).point(machine, selector)?;
        Ok(repository.boot_check(machine, &point.point)?.and_then(|(_, picture)| picture))
    }

    /// The sessions as they are now.
    ///
    /// # Errors
    /// `Corrupt` if a document does not authenticate.
    pub fn sessions(&self) -> Result<SessionListing> {
        SessionListing::read(&self.repository()?)
    }

    /// The time marks of a session.
    ///
    /// # Errors
    /// As of [`MarksDetails::read`].
    pub fn session_marks(&self, name: &SessionName) -> Result<MarksDetails> {
        MarksDetails::read(&self.repository()?, name)
    }

    /// One session as it is now, with what its clients do.
    ///
    /// # Errors
    /// `NotFound`, naming the existing sessions.
    pub fn session(&self, name: &SessionName, detail: ActivityDetail) -> Result<SessionDetails> {
        SessionDetails::read(&self.repository()?, name, detail)
    }

    /// The I/O of the clients of all served sessions, where it differs from the last call with `watch`.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn activity(&self, watch: &mut ActivityWatch) -> Result<Vec<ActivityTotals>> {
        watch.next(&*self.repository()?)
    }

    /// The space of the repository, as `stats --json` prints it. Reads every page of every chunk
    /// map: minutes in a large repository.
    ///
    /// # Errors
    /// `Corrupt` if a page does not authenticate; `Interrupted` once `cancel` is set.
    pub fn space(&self, cancel: &AtomicBool) -> Result<Stats> {
        Stats::read(&self.repository()?, cancel).map(|(stats, _)| stats)
    }

    /// The points that rules would keep and remove now, as `prune --dry-run --json` prints it: see
    /// [`RetentionPlan::preview`].
    ///
    /// # Errors
    /// `NotFound` for an unknown machine; `Interrupted` once `cancel` is set.
    pub fn retention_preview(
        &self,
        rules: &RetentionRules,
        machines: &[MachineName],
        cancel: Option<&AtomicBool>,
    ) -> Result<RetentionPlan> {
        RetentionPlan::preview(&self.repository()?, rules, machines, cancel)
    }

    /// The differences of two points or sessions, as `diff --json` prints them: see
    /// [`Difference::read`].
    ///
    /// # Errors
    /// Those of [`Difference::read`].
    pub fn difference(
        &self,
        from: &Address,
        to: &Address,
        most_ranges: usize,
        cancel: &AtomicBool,
    ) -> Result<Difference> {
        Difference::read(&self.repository()?, from, to, most_ranges, cancel)
    }

    /// Known damage. Reads no disk.
    ///
    /// # Errors
    /// Errors of the operating system; `Corrupt` if the list of damaged chunks cannot be read.
    pub fn damage(&self) -> Result<DamageListing> {
        let index = self.index()?;
        DamageListing::of_parts(&self.repository()?, index.lost(), index.damaged())
    }

    /// Opens `MACHINE/POINT/DISK` or `live/SESSION/DISK` for reading, or an image file of the disk,
    /// such as `web01/latest/vda.qcow2`. Its data is leased until it is dropped.
    ///
    /// # Errors
    /// `InvalidInput` for an impossible name; `NotFound`; `Unsupported` if that format cannot hold
    /// the disk.
    pub fn content(&self, address: &str) -> Result<Content> {
        let opened = self.opened()?;
        let tree = opened.tree(self.cache_bytes)?;
        Content::open(tree, address)
    }
}
