//! Builds an index from the repository and the index before.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_session::Catalog;
use coldrise_store::{
    CatalogDamage, MachineId, MachineName, MarkerFiles, MarkerId, PointDocument, PointName,
    Quarantine, Repository, ScanEntry, ScannedMachine, ScannedPoint,
};

use super::{BootResult, Index, IndexedBoot, IndexedMachine, IndexedPoint, PointFlags, PointShape};
use crate::listing::DiskList;

/// The inputs of an index. Read before the catalog, in this order: a point that moves from a
/// session to the catalog is then seen in one of them, and a point without a document is lost.
pub(crate) struct Sources {
    /// The sealed points in the sessions' documents.
    pub(crate) waiting: Vec<PointDocument>,
    /// The markers of the sessions.
    pub(crate) sessions: Vec<MarkerId>,
    /// The files of all markers.
    pub(crate) markers: HashMap<MarkerId, MarkerFiles>,
}

/// A machine that is being built.
#[derive(Default)]
struct Draft {
    /// Unknown while its document is unreadable and no point was opened.
    name: Option<MachineName>,
    machine: IndexedMachine,
}

/// The index before, by the keys of the catalog.
type Known<'a> = HashMap<MachineId, (&'a MachineName, &'a IndexedMachine)>;

impl Index {
    /// Reads the catalog and takes over unchanged points of `before`.
    ///
    /// # Errors
    /// `Corrupt` if the catalog cannot be walked; errors of the operating system. An unreadable
    /// document is not an error.
    pub(crate) fn build(
        repository: &Arc<Repository>,
        before: &Index,
        sources: Sources,
    ) -> Result<Index> {
        let known: Known = before
            .machines
            .iter()
            .map(|(name, machine)| (machine.id, (name, machine.as_ref())))
            .collect();
        let mut drafts: HashMap<MachineId, Draft> = HashMap::new();
        let mut damaged = Vec::new();
        repository.scan_catalog(|entry| match entry {
            ScanEntry::Machine(entry) => {
                let draft = drafts.entry(entry.id).or_default();
                draft.read(&known, &entry).or_else(|e| note(&mut damaged, machine_name(draft), e))
            }
            ScanEntry::Point(entry) => {
                let draft = drafts.entry(entry.machine).or_default();
                let read = draft.read_point(repository, &known, &entry);
                read.or_else(|e| note(&mut damaged, point_name(draft, &entry), e))
            }
        })?;
        let mut machines: BTreeMap<MachineName, IndexedMachine> = BTreeMap::new();
        for (id, Draft { name, mut machine }) in drafts {
            machine.id = id;
            machines.extend(name.map(|name| (name, machine)));
        }
        for point in &sources.waiting {
            machines.entry(point.machine.clone()).or_default().add_waiting(repository, point);
        }
        let mut markers = sources.markers;
        for (name, machine) in &mut machines {
            machine.apply(repository, name, &mut markers);
        }
        markers.retain(|marker, _| !sources.sessions.contains(marker));
        let mut lost = Vec::new();
        // A removed point's other files may outlive its marker for a moment.
        if markers.values().any(|files| files.is_marked) {
            lost = Catalog::new(repository).lost_points(None)?;
        }
        for (machine, point) in &lost {
            if let Some(machine) = machines.get_mut(machine) {
                machine.lost.push(point.clone());
            }
        }
        let machines = machines.into_iter().map(|(name, machine)| {
            let before = before.machines.get(&name).filter(|before| ***before == machine);
            (name, before.cloned().unwrap_or_else(|| Arc::new(machine)))
        });
        Ok(Index { machines: machines.collect(), lost, damaged })
    }
}

/// Adds damage. Any other error ends the reading.
fn note(damaged: &mut Vec<CatalogDamage>, what: String, error: Error) -> Result<()> {
    match error.kind() {
        ErrorKind::Corrupt => damaged.push(CatalogDamage::new(what, error.full_message())),
        _ => return Err(error),
    }
    Ok(())
}

fn machine_name(draft: &Draft) -> String {
    match &draft.name {
        Some(name) => format!("the machine {name}"),
        None => "a machine of the catalog".to_owned(),
    }
}

fn point_name(draft: &Draft, entry: &ScannedPoint<'_>) -> String {
    let machine = draft.name.as_ref().map_or("a machine whose name is lost", MachineName::as_str);
    match PointName::from_sort_key(&entry.key) {
        Some(point) => format!("{machine}/{point}"),
        None => format!("a point of {machine}"),
    }
}

impl Draft {
    fn read(&mut self, known: &Known<'_>, entry: &ScannedMachine<'_>) -> Result<()> {
        let (name, last_backup) = match known.get(&entry.id) {
            Some((name, before)) if before.version == entry.version => {
                ((*name).clone(), before.last_backup.clone())
            }
            _ => entry.open()?,
        };
        self.name = Some(name);
        self.machine.version = entry.version;
        self.machine.last_backup = last_backup;
        Ok(())
    }

    fn read_point(
        &mut self,
        repository: &Repository,
        known: &Known<'_>,
        entry: &ScannedPoint<'_>,
    ) -> Result<()> {
        if let Some((name, before)) = known.get(&entry.machine) {
            let point = before.find(&entry.key).filter(|point| point.version == entry.version);
            if let Some(point) = point {
                let shape = before.shapes.get(point.shape as usize).cloned();
                let shape = self.machine.shape(shape.unwrap_or_default());
                self.name.get_or_insert_with(|| (*name).clone());
                self.machine.points.push(IndexedPoint { shape, ..point.clone() });
                return Ok(());
            }
        }
        let document = entry.open()?;
        let point = self.machine.new_point(repository, &document, entry.version);
        self.machine.points.push(point);
        self.name.get_or_insert(document.machine);
        Ok(())
    }
}

impl IndexedMachine {
    /// The number of this shape. A machine has few different ones.
    fn shape(&mut self, shape: PointShape) -> u32 {
        let known = self.shapes.iter().rposition(|known| *known == shape);
        let at = known.unwrap_or_else(|| {
            self.shapes.push(shape);
            self.shapes.len() - 1
        });
        u32::try_from(at).unwrap_or(u32::MAX)
    }

    fn new_point(
        &mut self,
        repository: &Repository,
        document: &PointDocument,
        version: u64,
    ) -> IndexedPoint {
        let name = document.display_name.as_ref();
        let shape = PointShape {
            disks: DiskList::new(document),
            display_name: name.map(|name| name.as_str().into()),
        };
        IndexedPoint {
            key: document.point.sort_key(),
            shape: self.shape(shape),
            version,
            created_at_ms: document.created_at_ms,
            marked_at_ms: document.marked_at_ms().unwrap_or(0),
            marker: repository.marker_id(&format!("{}/{}", document.machine, document.point)),
            boot: None,
            flags: PointFlags {
                is_synthetic: document.point.is_synthetic(),
                has_protection: document.is_protected,
                document_quarantine: document.quarantine,
                is_protected: document.is_protected,
                quarantine: document.quarantine,
            },
        }
    }

    /// Adds a point that waits in a session's document.
    fn add_waiting(&mut self, repository: &Repository, document: &PointDocument) {
        let key = document.point.sort_key();
        if let Err(at) = self.points.binary_search_by(|point| point.key.cmp(&key)) {
            let point = self.new_point(repository, document, 0);
            self.points.insert(at, point);
        }
    }

    /// Adds what the files of the markers show, and takes these markers out.
    fn apply(
        &mut self,
        repository: &Repository,
        machine: &MachineName,
        markers: &mut HashMap<MarkerId, MarkerFiles>,
    ) {
        for point in &mut self.points {
            let files = markers.remove(&point.marker).unwrap_or_default();
            let flags = &mut point.flags;
            flags.is_protected = flags.has_protection || files.is_protected;
            let chosen = files.is_quarantined.then_some(Quarantine::Chosen);
            flags.quarantine = flags.document_quarantine.or(chosen);
            let known = point.boot.as_ref().map(|boot| boot.version);
            if known != files.boot {
                point.boot = files.boot.zip(point.name()).map(|(version, name)| {
                    let result = read_boot(repository, machine, &name);
                    Arc::new(IndexedBoot { version, result })
                });
            }
        }
    }
}

/// A boot check that cannot be read is none; verify names it.
fn read_boot(
    repository: &Repository,
    machine: &MachineName,
    point: &PointName,
) -> Option<BootResult> {
    let (check, _) = repository.boot_check(machine, point).ok()??;
    let stage = check.stages.last().map(|stage| stage.stage.as_str().into());
    let (verdict, is_worse) = (check.verdict, check.is_worse);
    Some(BootResult { verdict, is_worse, checked_at_ms: check.checked_at_ms, stage })
}
