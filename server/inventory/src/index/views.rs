//! The documents that the index fills.

use std::collections::BTreeMap;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::{ClockGuard, MachineName, PointName, StateTime, order_states};

use super::{Index, IndexedMachine, IndexedPoint};
use crate::listing::{DiskList, ListedMachine, ListedPoint, Listing, PointKind};
use crate::machines::{BootBadge, MachineSummary, PointPage, PointQuery, PointSummary};

impl Index {
    /// One machine or all, with all points: as `list`.
    ///
    /// # Errors
    /// `NotFound` for an unknown machine.
    pub(crate) fn listing(&self, only: Option<&MachineName>) -> Result<Listing> {
        if let Some(only) = only {
            self.machine(only)?;
        }
        let is_shown = |name: &MachineName| only.is_none_or(|only| only == name);
        let shown = self.machines.iter().filter(|(name, _)| is_shown(name));
        let lost = self.lost.iter().filter(|(machine, _)| is_shown(machine));
        Ok(Listing {
            machines: shown
                .map(|(name, machine)| {
                    let clock_guard = machine.clock_guard();
                    let points = machine.points.iter();
                    let points =
                        points.filter_map(|p| machine.listed(name, p, &clock_guard)).collect();
                    let display_name = machine.display_name();
                    ListedMachine { machine: name.to_string(), display_name, points }
                })
                .collect(),
            lost: lost.map(|(machine, point)| format!("{machine}/{point}")).collect(),
        })
    }

    /// Every machine, sorted by name.
    pub(crate) fn summaries(&self, now_ms: u64) -> Vec<MachineSummary> {
        self.machines.iter().map(|(name, machine)| machine.summary(name, now_ms)).collect()
    }

    /// The display names of the machines that have one, by the machine's name.
    pub(crate) fn display_names(&self) -> BTreeMap<String, String> {
        let named = |(name, machine): (&MachineName, &Arc<IndexedMachine>)| {
            machine.display_name().map(|display_name| (name.to_string(), display_name))
        };
        self.machines.iter().filter_map(named).collect()
    }

    /// One machine.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn summary(&self, name: &MachineName, now_ms: u64) -> Result<MachineSummary> {
        Ok(self.machine(name)?.summary(name, now_ms))
    }

    /// A part of a machine's points.
    ///
    /// # Errors
    /// `NotFound`.
    pub(crate) fn page(&self, name: &MachineName, query: &PointQuery) -> Result<PointPage> {
        let machine = self.machine(name)?;
        let points = &machine.points;
        let position = |key: [u8; 12], is_counted: fn([u8; 12], [u8; 12]) -> bool| {
            points.partition_point(|point| is_counted(point.key, key))
        };
        let from = query.after.as_ref().map_or(0, |p| position(p.sort_key(), |at, key| at <= key));
        let before = query.before.as_ref().map(PointName::sort_key);
        let to = before.map_or(points.len(), |key| position(key, |at, key| at < key));
        let limit = query.limit.unwrap_or(usize::MAX);
        let start = from.max(to.saturating_sub(limit));
        let clock_guard = machine.clock_guard();
        let shown = points.get(start..to).unwrap_or_default();
        let next = points.get(start).filter(|_| start > from && start < to);
        Ok(PointPage {
            machine: name.to_string(),
            total: points.len() as u64,
            points: shown.iter().filter_map(|p| machine.listed(name, p, &clock_guard)).collect(),
            next_before: next.and_then(IndexedPoint::name).map(String::from),
        })
    }

    fn machine(&self, name: &MachineName) -> Result<&IndexedMachine> {
        let machine = self.machines.get(name).map(|machine| &**machine);
        machine.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("there is no machine {name}"))
                .advise("coldrise list names the machines")
        })
    }
}

impl IndexedMachine {
    fn disks_of(&self, point: &IndexedPoint) -> DiskList {
        self.shapes.get(point.shape as usize).map(|shape| shape.disks.clone()).unwrap_or_default()
    }

    /// The display name of its newest point. Backups take it over from point to point.
    fn display_name(&self) -> Option<String> {
        let shape = self.shapes.get(self.points.last()?.shape as usize)?;
        shape.display_name.as_deref().map(str::to_owned)
    }

    fn listed(
        &self,
        machine: &MachineName,
        point: &IndexedPoint,
        clock_guard: &ClockGuard,
    ) -> Option<ListedPoint> {
        let name = point.name()?;
        let disks = self.disks_of(point);
        Some(ListedPoint {
            address: format!("{machine}/{name}"),
            kind: point.kind(),
            created_at_ms: point.created_at_ms,
            marked_at_ms: point.marked_at_ms(),
            size_bytes: disks.size_bytes(),
            is_protected: point.flags.is_protected,
            is_in_future: clock_guard.is_in_future(&name),
            is_passed_over: clock_guard.is_passed_over(&name),
            quarantine: point.flags.quarantine,
            boot: point.boot().map(|boot| boot.verdict),
            is_boot_worse: point.boot().is_some_and(|boot| boot.is_worse),
            disks,
            point: name.into(),
        })
    }

    fn summary(&self, machine: &MachineName, now_ms: u64) -> MachineSummary {
        let clock_guard = self.clock_guard();
        let state = |point: &&IndexedPoint| StateTime {
            name_seconds: point.name().map_or(0, |name| name.unix_seconds()),
            created_at_ms: point.created_at_ms,
            marked_at_ms: point.marked_at_ms(),
        };
        let by_state = order_states(self.points.iter(), state);
        let newest = || by_state.iter().rev().copied().filter(|p| p.flags.quarantine.is_none());
        let test = |point: &IndexedPoint, test: fn(&ClockGuard, &PointName) -> bool| {
            point.name().is_some_and(|name| !test(&clock_guard, &name))
        };
        // If all points are dated in the future, all of them count.
        let latest = newest()
            .find(|point| test(point, ClockGuard::is_passed_over))
            .or_else(|| newest().next());
        let mut good = newest().filter(|point| test(point, ClockGuard::is_in_future)).peekable();
        let last_good = good.peek().copied();
        let last_good_backup = good.find(|point| !point.flags.is_synthetic);
        let is_proven = |point: &&IndexedPoint| {
            point.boot().is_some_and(|boot| boot.verdict == coldrise_store::BootVerdict::Ok)
        };
        let count = |is_counted: fn(&IndexedPoint) -> bool| {
            self.points.iter().filter(|point| is_counted(point)).count() as u64
        };
        let summary = |point: &IndexedPoint| self.point_summary(machine, point, now_ms);
        let sizes: Vec<u64> = self.shapes.iter().map(|shape| shape.disks.size_bytes()).collect();
        let size = |p: &IndexedPoint| sizes.get(p.shape as usize).copied().unwrap_or(0);
        MachineSummary {
            machine: machine.to_string(),
            display_name: self.display_name(),
            points: self.points.len() as u64,
            latest: latest.and_then(summary),
            last_good: last_good.and_then(summary),
            last_good_backup: last_good_backup.and_then(summary),
            last_verified_boot: newest().find(is_proven).and_then(|p| p.badge(machine)),
            last_boot_check: newest()
                .filter(|point| test(point, ClockGuard::is_passed_over))
                .find_map(|point| point.badge(machine)),
            boot: latest.and_then(|point| point.badge(machine)),
            protected: count(|point| point.flags.is_protected),
            quarantined: count(|point| point.flags.quarantine.is_some()),
            lost: self.lost.iter().map(|point| format!("{machine}/{point}")).collect(),
            total_bytes: self.points.iter().map(size).fold(0, u64::saturating_add),
            warning: self.warning(machine, &clock_guard),
        }
    }

    /// Points in the future are the newest ones.
    fn warning(&self, machine: &MachineName, clock_guard: &ClockGuard) -> Option<String> {
        let names = self.points.iter().rev().filter_map(IndexedPoint::name);
        let future: Vec<_> = names.take_while(|name| clock_guard.is_in_future(name)).collect();
        clock_guard.warning(machine, &future)
    }

    fn point_summary(
        &self,
        machine: &MachineName,
        point: &IndexedPoint,
        now_ms: u64,
    ) -> Option<PointSummary> {
        let name = point.name()?;
        let since_ms = match point.kind() {
            PointKind::Backup => name.unix_seconds().saturating_mul(1000),
            PointKind::Synthetic => point.marked_at_ms().unwrap_or(point.created_at_ms),
        };
        Some(PointSummary {
            address: format!("{machine}/{name}"),
            kind: point.kind(),
            created_at_ms: point.created_at_ms,
            marked_at_ms: point.marked_at_ms(),
            age_seconds: now_ms.saturating_sub(since_ms) / 1000,
            size_bytes: self.disks_of(point).size_bytes(),
            point: name.into(),
        })
    }
}

impl IndexedPoint {
    fn kind(&self) -> PointKind {
        match self.flags.is_synthetic {
            true => PointKind::Synthetic,
            false => PointKind::Backup,
        }
    }

    fn badge(&self, machine: &MachineName) -> Option<BootBadge> {
        let boot = self.boot()?;
        Some(BootBadge {
            address: format!("{machine}/{}", self.name()?),
            verdict: boot.verdict,
            is_worse: boot.is_worse,
            checked_at_ms: boot.checked_at_ms,
            stage: boot.stage.as_deref().map(str::to_owned),
        })
    }
}
