//! Backs up sources into one restore point.
//!
//! Every disk is read through its source: only the stored ranges and, with a dirty bitmap,
//! only the changed ones. The point becomes visible at the very end, complete, with all its
//! disks. A failed or cancelled backup leaves nothing visible; the next run finds its
//! committed chunks by deduplication.

mod pipeline;
mod plan;
mod rate;
mod same_disk;
mod shared;

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Phase, Progress, ProgressState, Result};
use coldrise_store::{
    BackupTarget, ClockGuard, Configuration, DiskDocument, DiskName, DisplayName, MAX_DISKS,
    MachineName, MachinePart, MapRoot, PointDocument, PointName, PointOrigin, Repository,
    RepositoryWriter, WriteCounts, WriteOptions,
};
use jiff::{SignedDuration, Timestamp};

use crate::source::{Location, Source, SourceOptions, SourceSpec, open_source, round_down};
pub use pipeline::Watch;
pub(crate) use pipeline::{Sink, store_disk};
pub(crate) use plan::Plan;
pub use rate::{Flow, Rate, RateLimit};
pub use same_disk::unrecorded_difference;
pub use shared::{Proof, store_shared};

/// How often the clock is read while a backup waits for a free name.
const NAME_INTERVAL: Duration = Duration::from_millis(20);
/// Upper bound of the threads.
const MAX_THREADS: usize = 64;

/// The parameters of a backup.
#[derive(Clone, Debug)]
pub struct BackupRequest {
    /// The machine.
    pub machine: MachineName,
    /// Its disks and their sources; at least one.
    pub disks: Vec<SourceSpec>,
    /// The dirty bitmap with the changes since the machine's latest backup. Every source
    /// must have it.
    pub bitmap: Option<String>,
    /// Whether backing files belong to their images and may be opened.
    pub follow_backing: bool,
    /// The machine's configuration.
    pub configuration: Option<Configuration>,
    /// The machine's parts beside its disks.
    pub parts: Vec<MachinePart>,
    /// What people call the machine, if that differs from its name.
    pub display_name: Option<DisplayName>,
    /// The point's name; `None`: the time at the start of the backup.
    pub point: Option<PointName>,
    /// Threads that hash and compress; 0: one per processor.
    pub threads: usize,
    /// The limit on the bytes read from all sources together; `None`: no limit.
    pub rate: Option<Rate>,
}

/// The result for one disk.
#[derive(Clone, Debug)]
pub struct DiskSummary {
    /// The disk.
    pub disk: DiskName,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes read from the source.
    pub read_bytes: u64,
    /// The point that shares the unchanged pages of its map with this disk.
    pub base: Option<PointName>,
    /// True if a bitmap decided what to read; false if every stored range was read.
    pub is_incremental: bool,
    /// The store's figures for the bytes read.
    pub counts: WriteCounts,
}

/// The result of a backup.
#[derive(Clone, Debug)]
pub struct BackupSummary {
    /// The machine.
    pub machine: MachineName,
    /// The new point.
    pub point: PointName,
    /// Its disks.
    pub disks: Vec<DiskSummary>,
    /// Warnings for the user about a complete backup.
    pub warnings: Vec<String>,
}

/// Reads all disks of `request` and stores them as one new restore point.
///
/// A set `cancel` ends the work with `Interrupted` within about 50 ms of work. After any
/// error nothing of the point is visible, and the repository stays usable. Backups of other
/// machines may run at the same time, from other threads.
///
/// Errors: `InvalidInput` for a contradictory request, `AlreadyExists` if the point's name
/// exists, `Busy` during another backup of the machine, errors of the sources (with their
/// name and the offset) and of the store.
pub fn backup(
    writer: &RepositoryWriter,
    request: &BackupRequest,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<BackupSummary> {
    let _claim = writer.repository().claim_machine(&request.machine)?;
    let start = BackupStart::choose(writer.repository(), request, cancel)?;
    let StoredDisks { document, mut summary } =
        read_disks(writer, request, &start, progress, cancel)?;
    writer.put_point(&document)?;
    summary.warnings.extend(start.clock_warnings(writer.repository(), request)?);
    Ok(summary)
}

/// The starting point of a backup: what the repository holds of its machine. Valid while
/// the machine is claimed.
pub struct BackupStart {
    point: PointName,
    /// The machine's latest backup.
    latest: Option<PointDocument>,
    /// All points of the machine.
    names: Vec<PointName>,
}

impl BackupStart {
    /// Chooses the point's name and the base of each disk. The disks themselves may be found out
    /// later.
    ///
    /// # Errors
    /// As of [`backup`], for a contradictory request.
    pub fn choose(
        repository: &Repository,
        request: &BackupRequest,
        cancel: &AtomicBool,
    ) -> Result<BackupStart> {
        let names = repository.point_names_of(&request.machine)?;
        let clock_guard = repository.clock_guard(&request.machine)?;
        let point = choose_name(request, &names, &clock_guard, cancel)?;
        let is_base = |point: &PointDocument| {
            matches!(point.origin, PointOrigin::Backup { .. })
                && !clock_guard.is_passed_over(&point.point)
        };
        let latest = repository.newest_point_that(&request.machine, is_base)?;
        check_bitmap(repository, request, latest.as_ref())?;
        Ok(BackupStart { point, latest, names })
    }

    /// Warnings about clocks that are or were wrong, once the point is stored.
    ///
    /// # Errors
    /// Errors of reading the catalog.
    pub fn clock_warnings(
        &self,
        repository: &Repository,
        request: &BackupRequest,
    ) -> Result<Vec<String>> {
        let clock_guard = repository.clock_guard(&request.machine)?;
        let names = self.names.iter().chain([&self.point]);
        let mut warnings = Vec::from_iter(clock_guard.warning(&request.machine, names));
        warnings.extend(ahead_of_clock(request, &self.point, &clock_guard));
        Ok(warnings)
    }

    /// The name of the point.
    pub fn point(&self) -> &PointName {
        &self.point
    }

    /// The backup, and the disk in it, from which a dirty bitmap has to count to be believed.
    /// `None`: no bitmap is believed, the disk is read completely.
    ///
    /// # Errors
    /// Errors of reading the catalog.
    pub fn bitmap_base(
        &self,
        repository: &Repository,
        disk: &DiskName,
    ) -> Result<Option<(&PointName, &DiskDocument)>> {
        let Some(base) = self.latest.as_ref().filter(|base| base.quarantine.is_none()) else {
            return Ok(None);
        };
        if distrust(repository, base)?.is_some() {
            return Ok(None);
        }
        let disk = base.disk(disk).filter(|disk| disk.layers.is_empty());
        Ok(disk.map(|disk| (&base.point, disk)))
    }

    /// The point whose maps are the base of the new ones.
    pub fn base(&self) -> Option<&PointDocument> {
        self.latest.as_ref()
    }
}

/// A backup that has stored everything except the point.
pub struct StoredDisks {
    /// The point to add.
    pub document: PointDocument,
    /// The result.
    pub summary: BackupSummary,
}

/// Reads all disks of `request` and stores them at `target`: [`backup`] without its start
/// and its end, for a target in another process.
///
/// # Errors
/// As of [`backup`].
pub fn read_disks(
    target: &dyn BackupTarget,
    request: &BackupRequest,
    start: &BackupStart,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<StoredDisks> {
    check_disks(&request.disks)?;
    let BackupStart { point, latest: base, .. } = start;
    let base = base.as_ref();
    // A distrusted point is not a base: its chunks are read from the source, which heals them,
    // and its chunk maps are not shared.
    let quarantined = base.filter(|point| point.quarantine.is_some());
    // Opens all sources before it reads the first: a mistake in the last shows at once.
    let mut sources = Vec::with_capacity(request.disks.len());
    for spec in &request.disks {
        let disk = spec.disk.as_str();
        let state = ProgressState {
            phase: Phase::Opening,
            disk,
            done_bytes: 0,
            total_bytes: 0,
            read_bytes: 0,
            stored_bytes: 0,
        };
        progress.update(&state);
        let watch = Watch { disk, progress, cancel };
        watch.check_cancel()?;
        let bitmap = match &spec.location {
            Location::Live { bitmap, .. } => bitmap.as_ref().map(|bitmap| bitmap.name.clone()),
            _ => request.bitmap.clone(),
        };
        let options = SourceOptions { bitmap, follow_backing: request.follow_backing };
        let source = open_source(spec, &options, cancel)?;
        let base = match quarantined {
            Some(_) => Base::NONE,
            None => Base::choose(&spec.disk, base, source.size_bytes(), &options)?,
        };
        base.check_live(&spec.location)?;
        sources.push((spec, source, base));
    }
    let limit = request.rate.map(|rate| RateLimit::new(Flow::At(rate)));
    let mut disks = Vec::with_capacity(sources.len());
    let mut documents = Vec::with_capacity(sources.len());
    let mut warnings = Vec::new();
    if let (Some(point), Some(bitmap)) = (quarantined, &request.bitmap) {
        warnings.push(format!(
            "{}/{}, which bitmap '{bitmap}' counts from, is quarantined: everything was read",
            point.machine, point.point
        ));
    }
    for (spec, source, base) in sources {
        let watch = Watch { disk: spec.disk.as_str(), progress, cancel };
        let pace = Pace { threads: request.threads, limit: limit.as_ref() };
        let store = |base: &Base| store_one(target, spec, source.as_ref(), base, pace, &watch);
        let stored = match store(&base) {
            // A chunk map without all its pages is not a base; the rest of the point is
            // usable.
            Err(error) if error.kind() == ErrorKind::Corrupt && base.is_only_a_saving() => {
                warnings.push(format!(
                    "{}: the latest backup is damaged ({}); nothing was taken over from it",
                    spec.disk,
                    error.full_message()
                ));
                store(&Base::NONE)
            }
            stored => stored,
        };
        let (document, summary, warning) = stored.map_err(|error| error.context(&spec.disk))?;
        documents.push(document);
        disks.push(summary);
        warnings.extend(source.remark());
        warnings.extend(warning);
    }
    let document = PointDocument {
        machine: request.machine.clone(),
        point: point.clone(),
        created_at_ms: coldrise_block::now_ms(),
        origin: PointOrigin::Backup {
            sources: request.disks.iter().map(|spec| spec.location.to_string()).collect(),
        },
        disks: documents,
        configuration: request.configuration.clone(),
        parts: request.parts.clone(),
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: None,
        display_name: request.display_name.clone(),
        came_by: Vec::new(),
    };
    let last_disk = disks.last().map_or("", |summary| summary.disk.as_str());
    Watch { disk: last_disk, progress, cancel }.check_cancel()?;
    let point = point.clone();
    let summary = BackupSummary { machine: request.machine.clone(), point, disks, warnings };
    Ok(StoredDisks { document, summary })
}

fn check_disks(disks: &[SourceSpec]) -> Result<()> {
    if disks.is_empty() || disks.len() > MAX_DISKS {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("a backup has 1 to {MAX_DISKS} disks, not {}", disks.len()),
        ));
    }
    let mut names: Vec<_> = disks.iter().map(|spec| &spec.disk).collect();
    names.sort();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            Err(Error::new(ErrorKind::InvalidInput, format!("disk {} is named twice", pair[0])))
        }
        None => Ok(()),
    }
}

/// A bitmap counts from the latest backup. If that backup was forgotten or lost, an older
/// base would miss the changes between the two.
fn check_bitmap(
    repository: &Repository,
    request: &BackupRequest,
    base: Option<&PointDocument>,
) -> Result<()> {
    let (Some(bitmap), Some(base)) = (&request.bitmap, base) else { return Ok(()) };
    match distrust(repository, base)? {
        Some(why) => {
            let text = format!(
                "bitmap '{bitmap}' records the changes since the last backup of {}, {why}: run \
                 once without --bitmap",
                request.machine
            );
            Err(Error::new(ErrorKind::NotFound, text))
        }
        None => Ok(()),
    }
}

/// Why no bitmap counts from `base`, if so.
fn distrust(repository: &Repository, base: &PointDocument) -> Result<Option<String>> {
    let machine = &base.machine;
    if let Some((_, lost)) = repository.lost_points(Some(machine))?.last() {
        return Ok(Some(format!("and {lost} is lost (see coldrise verify)")));
    }
    Ok(match repository.last_backup(machine)? {
        Some(last) if last == base.point => None,
        Some(last) => Some(format!("{last}, but that backup was forgotten or is not the newest")),
        None => Some("and it is unknown which backup that was".to_owned()),
    })
}

/// The requested name, or the present time. Names have a resolution of one second. If this
/// second's name exists, waits for the next second, so that no name is wrong.
///
/// If the newest point is in the future, but by less than a wrong clock would cause,
/// another host's clock is a little ahead. The new name is then the second after it: a new
/// backup comes after the older ones.
fn choose_name(
    request: &BackupRequest,
    names: &[PointName],
    clock_guard: &ClockGuard,
    cancel: &AtomicBool,
) -> Result<PointName> {
    let is_taken = |name: &PointName| names.contains(name);
    if let Some(name) = &request.point {
        if is_taken(name) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{}/{name} exists: points never change", request.machine),
            ));
        }
        if name.lineage().1 != 0 {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("{name} is the name of a synthetic point: only a seal makes those"),
            ));
        }
        return Ok(name.clone());
    }
    let watch = Watch { disk: "", progress: &coldrise_block::NoProgress, cancel };
    let newest = names.iter().rfind(|name| !clock_guard.is_in_future(name));
    let newest_seconds = newest.map_or(0, PointName::unix_seconds);
    loop {
        let now = Timestamp::now();
        let ahead_seconds = newest_seconds.saturating_sub(seconds(now));
        let name = match ahead_seconds {
            0 => PointName::from_time(now)?,
            ahead => PointName::from_time(now + SignedDuration::from_secs(ahead as i64 + 1))?,
        };
        if !is_taken(&name) {
            return Ok(name);
        }
        watch.check_cancel()?;
        std::thread::sleep(NAME_INTERVAL);
    }
}

/// A warning if a generated name is later than the clock.
fn ahead_of_clock(
    request: &BackupRequest,
    point: &PointName,
    clock_guard: &ClockGuard,
) -> Option<String> {
    let ahead = point.unix_seconds().saturating_sub(seconds(Timestamp::now()));
    (request.point.is_none() && ahead > 1 && !clock_guard.is_in_future(point)).then(|| {
        format!(
            "{}/{point} is named {ahead} s ahead of the clock, to come after the point before it: \
             set the clocks of all hosts",
            request.machine
        )
    })
}

fn seconds(time: Timestamp) -> u64 {
    u64::try_from(time.as_second()).unwrap_or(0)
}

/// The base of a disk.
struct Base {
    point: Option<PointName>,
    disk: Option<DiskDocument>,
    /// The end of the range that the bitmap covers; `None`: everything is read.
    bitmap_size_bytes: Option<u64>,
}

impl Base {
    /// The disk has no base.
    const NONE: Base = Base { point: None, disk: None, bitmap_size_bytes: None };

    /// Refuses a live bitmap that counts from another point, or does not cover the disk. That point may
    /// have been removed or quarantined since the instant. Nothing else can be read instead: a
    /// source may offer only what its bitmap marks.
    fn check_live(&self, location: &Location) -> Result<()> {
        let Location::Live { bitmap: Some(bitmap), .. } = location else { return Ok(()) };
        if self.bitmap_size_bytes.is_some() && self.point.as_ref() == Some(&bitmap.since) {
            return Ok(());
        }
        let text = format!(
            "{location}: changes are known only since {}, which is no longer the latest backup",
            bitmap.since
        );
        Err(Error::new(ErrorKind::Incomplete, text).advise("run the backup again"))
    }

    /// Whether the disk is read completely.
    fn is_only_a_saving(&self) -> bool {
        self.disk.is_some() && self.bitmap_size_bytes.is_none()
    }

    /// The same disk in the machine's latest backup. A bitmap needs one: it counts from
    /// there. A synthetic point is not a base: layers hold the session's captured writes, and
    /// the source's bitmap does not contain them.
    fn choose(
        disk: &DiskName,
        latest: Option<&PointDocument>,
        size_bytes: u64,
        options: &SourceOptions,
    ) -> Result<Base> {
        let found = latest.and_then(|point| {
            let disk = point.disk(disk).filter(|disk| disk.layers.is_empty())?;
            Some((point.point.clone(), disk.clone()))
        });
        let bitmap = options.bitmap.as_ref();
        match (found, bitmap) {
            (None, None) => Ok(Base::NONE),
            (None, Some(bitmap)) => Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{disk}: bitmap '{bitmap}' records the changes since the machine's latest \
                     backup, but there is none with this disk: run once without --bitmap"
                ),
            )),
            (Some((point, base)), bitmap) => {
                // A smaller disk was rebuilt: its bitmap does not cover that.
                let is_usable = bitmap.is_some() && base.size_bytes <= size_bytes;
                Ok(Base {
                    point: Some(point),
                    bitmap_size_bytes: is_usable.then_some(base.size_bytes),
                    disk: Some(base),
                })
            }
        }
    }
}

/// How fast a disk is read and stored.
#[derive(Clone, Copy, Default)]
pub struct Pace<'a> {
    /// As of [`BackupRequest`].
    pub threads: usize,
    /// The limit on the bytes read.
    pub limit: Option<&'a RateLimit>,
}

/// Reads and stores one disk.
fn store_one(
    target: &dyn BackupTarget,
    spec: &SourceSpec,
    source: &dyn Source,
    base: &Base,
    pace: Pace<'_>,
    watch: &Watch<'_>,
) -> Result<(DiskDocument, DiskSummary, Option<String>)> {
    let size_bytes = source.size_bytes();
    let root = base.disk.as_ref().map(|disk| disk.root);
    let StoredDisk { root, counts, read_bytes, warning } =
        store_source(target, source, root, base.bitmap_size_bytes, pace, watch)?;
    let name = spec.disk.clone();
    let document = DiskDocument { name, size_bytes, root, layers: Vec::new() };
    let summary = DiskSummary {
        disk: spec.disk.clone(),
        size_bytes,
        read_bytes,
        base: base.point.clone(),
        is_incremental: base.bitmap_size_bytes.is_some(),
        counts,
    };
    Ok((document, summary, warning))
}

/// One disk that is stored.
pub struct StoredDisk {
    /// The root of its chunk map.
    pub root: MapRoot,
    /// The store's figures.
    pub counts: WriteCounts,
    /// Bytes read from the source.
    pub read_bytes: u64,
    /// The source's remark on a content that was read completely.
    pub warning: Option<String>,
}

/// Stores the content of `source` at `target` as the disk `base` with what differs from it. With
/// `changes_end_bytes`, the source's dirty runs say what has changed since `base`, up to there: the size of
/// the disk from which they count. Everything else is read.
///
/// # Errors
/// Errors of the source and of the target; `Interrupted` once cancelled.
pub fn store_source(
    target: &dyn BackupTarget,
    source: &dyn Source,
    base: Option<MapRoot>,
    changes_end_bytes: Option<u64>,
    pace: Pace<'_>,
    watch: &Watch<'_>,
) -> Result<StoredDisk> {
    let size_bytes = source.size_bytes();
    let chunk_bytes = u64::from(target.chunk_size_bytes());
    let unit_bytes = chunk_bytes.max(source.alignment_bytes());
    // The part behind the old end is read completely, with the unit that holds the old end.
    let bitmap_end = changes_end_bytes.map_or(0, |old_bytes| {
        if old_bytes >= size_bytes { size_bytes } else { round_down(old_bytes, unit_bytes) }
    });
    let mut plan = Plan::new(source, unit_bytes, bitmap_end);
    let options = match pace.threads {
        0 => WriteOptions::default(),
        threads => WriteOptions { threads: threads.min(MAX_THREADS) },
    };
    let mut disk_writer = target.start_disk(base, size_bytes, options)?;
    let read_bytes = store_disk(source, &mut plan, disk_writer.as_mut(), pace.limit, watch)?;
    let warning = source.check_after_reading()?;
    watch.progress.update(&ProgressState {
        phase: Phase::Finishing,
        disk: watch.disk,
        done_bytes: size_bytes,
        total_bytes: size_bytes,
        read_bytes,
        stored_bytes: disk_writer.counts().stored_bytes,
    });
    let (root, counts) = disk_writer.finish()?;
    Ok(StoredDisk { root, counts, read_bytes, warning })
}
