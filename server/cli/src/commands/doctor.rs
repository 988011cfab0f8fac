//! `coldrise doctor`: checks of this machine and the repository.

mod copies;
mod killed;
mod moves;
mod nfs;

use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::import_confinement;
use coldrise_session::{
    Catalog, SessionDamage, damaged_sessions, open_live_disk, open_point_disk, session_damage,
};
use coldrise_store::{CatalogDamage, LayerId, Repository, SessionName};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::{show_count, show_size};
use coldrise_hosting::leftovers;
use coldrise_hosting::nbdkit;
use coldrise_hosting::qemu;

/// Free space below which doctor warns, in bytes.
const LITTLE_SPACE_BYTES: u64 = 4 << 30;
/// Free space below which doctor reports a failure, in bytes.
const NO_SPACE_BYTES: u64 = 64 << 20;
/// Free memory for the maps of open sessions below which doctor warns, in bytes.
const LITTLE_MEMORY_BYTES: u64 = 64 << 20;
/// The folder of the maps of open sessions.
const SHARED_MEMORY: &str = "/dev/shm";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warn,
    Fail,
}

/// One line of the answer.
#[derive(Serialize)]
struct Finding {
    check: &'static str,
    status: Status,
    message: String,
    /// The suggested command; empty if there is none.
    advice: String,
}

#[derive(Serialize)]
struct Findings {
    is_healthy: bool,
    findings: Vec<Finding>,
}

impl Findings {
    fn add(&mut self, check: &'static str, status: Status, message: String, advice: &str) {
        self.findings.push(Finding { check, status, message, advice: advice.to_owned() });
    }

    fn ok(&mut self, check: &'static str, message: String) {
        self.add(check, Status::Ok, message, "");
    }

    fn damage(&mut self, check: &'static str, damage: &CatalogDamage) {
        self.add(check, Status::Fail, damage.message(), "");
    }

    /// An error whose text includes the suggestion.
    fn error(&mut self, check: &'static str, error: &Error) {
        self.add(check, Status::Fail, error.full_message(), "");
    }
}

pub(crate) fn run(invocation: &Invocation) -> Result<Report> {
    let mut found = Findings { is_healthy: true, findings: Vec::new() };
    let mut exit_code = coldrise_runs::exit_code(ErrorKind::Io);
    check_nbdkit(&mut found);
    check_tool(&mut found, "qemu-img", "qemu-utils", "backups of images that are not raw");
    check_tool(&mut found, "qemu-nbd", "qemu-utils", "backups of images that are not raw");
    match coldrise_ingest::check_libnbd() {
        Ok(()) => found.ok("libnbd", "can be loaded".to_owned()),
        Err(error) => {
            found.add("libnbd", Status::Warn, error.full_message(), "Debian: apt install libnbd0")
        }
    }
    check_confinement(&mut found);
    check_tool(&mut found, qemu::PROGRAM, "qemu-system-x86", "coldrise boot");
    check_kvm(&mut found);
    check_tool(&mut found, "fusermount3", "fuse3", "coldrise mount for users other than root");
    nfs::check(&mut found);
    check_tool(&mut found, "smbd", "samba", "coldrise serve smb");
    check_tool(&mut found, "tgtd", "tgt", "coldrise serve iscsi");
    check_shared_memory(&mut found);
    match invocation.repository_path() {
        Err(_) => found.add(
            "repository",
            Status::Warn,
            "no repository is named, so none was checked".to_owned(),
            "give --repo DIR, or set COLDRISE_REPO",
        ),
        Ok(path) => match invocation.open_for_disks() {
            Err(error) => {
                found.error("repository", &error);
                exit_code = coldrise_runs::exit_code(error.kind());
            }
            Ok(repository) => {
                if let Some(removed) = leftovers::remove(&repository) {
                    found.ok("killed commands", removed);
                }
                check_repository(&mut found, &repository);
                check_space(&mut found, path);
                check_writing(&mut found, &repository);
                check_points(&mut found, &repository);
                check_sessions(&mut found, &repository);
                moves::check(&mut found, &repository);
                killed::check(&mut found, &repository);
                copies::check(&mut found, &repository);
                check_leftovers(&mut found, &repository);
            }
        },
    }
    found.is_healthy = found.findings.iter().all(|finding| finding.status != Status::Fail);
    let text = text(&found.findings);
    let mut report = Report::answer(&found, text);
    if !found.is_healthy {
        report.exit_code = exit_code;
    }
    Ok(report)
}

fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let word = match finding.status {
            Status::Ok => "ok  ",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        };
        text.push_str(&format!("{word}  {:<width$}  {}\n", finding.check, finding.message));
        if !finding.advice.is_empty() {
            text.push_str(&format!("      {:<width$}  -> {}\n", "", finding.advice));
        }
    }
    text
}

/// The first line that a program prints.
fn first_line(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Error::io(format!("starting {program}"), error))?;
    let shown = if output.status.success() { &output.stdout } else { &output.stderr };
    let line: String =
        String::from_utf8_lossy(shown).lines().next().unwrap_or("").chars().take(200).collect();
    if output.status.success() {
        Ok(line)
    } else {
        Err(Error::new(ErrorKind::ToolFailed, format!("{program} failed: {line}")))
    }
}

fn check_nbdkit(found: &mut Findings) {
    match first_line("nbdkit", &["--version"]) {
        Ok(version) => found.ok("nbdkit", version),
        Err(error) => {
            let message = error.full_message();
            found.add("nbdkit", Status::Fail, message, "Debian: apt install nbdkit");
            return;
        }
    }
    let plugin = nbdkit::plugin();
    match first_line("nbdkit", &["--dump-plugin", &plugin.to_string_lossy()]) {
        Ok(_) => found.ok("nbdkit plugin", plugin.display().to_string()),
        Err(error) => found.add(
            "nbdkit plugin",
            Status::Fail,
            error.full_message(),
            &format!("put {} beside the coldrise program", nbdkit::PLUGIN_FILE),
        ),
    }
}

fn check_tool(found: &mut Findings, program: &'static str, package: &str, needed_for: &str) {
    match first_line(program, &["--version"]) {
        Ok(version) => found.ok(program, version),
        Err(error) => found.add(
            program,
            Status::Warn,
            format!("{}; needed for {needed_for}", error.full_message()),
            &format!("Debian: apt install {package}"),
        ),
    }
}

/// QEMU parses foreign images, in a process that should have no access to anything else.
fn check_confinement(found: &mut Findings) {
    const CHECK: &str = "import";
    match import_confinement() {
        Err(error) => found.error(CHECK, &error),
        Ok(confinement) => match confinement.missing() {
            None => found.ok(CHECK, "images are read in a confined process".to_owned()),
            Some(missing) => found.add(
                CHECK,
                Status::Warn,
                format!("{missing}: a hostile image could access other files"),
                "boot with lsm= naming landlock (Linux 5.13 and later), or import only \
                 images that you trust",
            ),
        },
    }
}

fn check_kvm(found: &mut Findings) {
    match coldrise_host::kvm_works() {
        Ok(()) => found.ok("kvm", "machines boot at full speed".to_owned()),
        Err(why) => found.add(
            "kvm",
            Status::Warn,
            format!("{why}: machines that coldrise boot starts are slow"),
            "use a host with virtualisation, and let this user open /dev/kvm",
        ),
    }
}

fn check_shared_memory(found: &mut Findings) {
    const CHECK: &str = "shared memory";
    let probe = tempfile::Builder::new().prefix("coldrise-doctor-").tempfile_in(SHARED_MEMORY);
    if let Err(error) = probe {
        let message = format!("{SHARED_MEMORY} cannot be written ({error}): sessions need it");
        found.add(CHECK, Status::Fail, message, "mount a tmpfs there");
        return;
    }
    match free_bytes(Path::new(SHARED_MEMORY)) {
        Err(error) => found.error(CHECK, &error),
        Ok(free) if free < LITTLE_MEMORY_BYTES => found.add(
            CHECK,
            Status::Warn,
            format!("{} free in {SHARED_MEMORY}: few sessions fit", show_size(free)),
            "remove unneeded files there, or enlarge the mount",
        ),
        Ok(free) => found.ok(CHECK, format!("{} free in {SHARED_MEMORY}", show_size(free))),
    }
}

fn free_bytes(path: &Path) -> Result<u64> {
    let facts = rustix::fs::statvfs(path)
        .map_err(std::io::Error::from)
        .context(|| format!("reading the free space of {}", path.display()))?;
    Ok(facts.f_bavail.saturating_mul(facts.f_frsize))
}

fn check_repository(found: &mut Findings, repository: &Repository) {
    let chunk = show_size(u64::from(repository.chunk_size_bytes()));
    let place = repository.path().display();
    if repository.is_encrypted() {
        found.ok("repository", format!("{place} opens: encrypted, chunks of {chunk}"));
    } else {
        found.add(
            "repository",
            Status::Warn,
            format!("{place} opens: NOT encrypted, chunks of {chunk}"),
            "anyone with access to the files can read the data; only coldrise init can choose encryption",
        );
    }
}

fn check_space(found: &mut Findings, path: &Path) {
    const CHECK: &str = "free space";
    let advice = "make room: backups and captured writes stop when it is full";
    match free_bytes(path) {
        Err(error) => found.error(CHECK, &error),
        Ok(free) => {
            let message = format!("{} free for the repository", show_size(free));
            match free {
                0..NO_SPACE_BYTES => found.add(CHECK, Status::Fail, message, advice),
                NO_SPACE_BYTES..LITTLE_SPACE_BYTES => {
                    found.add(CHECK, Status::Warn, message, advice);
                }
                _ => found.ok(CHECK, message),
            }
        }
    }
}

/// A backup would be refused for the same reason, with the same sentence.
fn check_writing(found: &mut Findings, repository: &Repository) {
    const CHECK: &str = "database";
    match repository.check_writable() {
        Err(error) => found.error(CHECK, &error),
        Ok(()) => found.ok(CHECK, "can be opened for writing".to_owned()),
    }
    for damage in repository.damaged_marks() {
        found.add(CHECK, Status::Warn, damage.message(), "");
    }
}

/// Reads the whole catalog and opens every disk with layers, so that missing or changed
/// layers show.
fn check_points(found: &mut Findings, repository: &Arc<Repository>) {
    const CHECK: &str = "restore points";
    let catalog = Catalog::new(repository);
    let machines = match catalog.machines() {
        Ok(machines) => machines,
        Err(error) => return found.error(CHECK, &error),
    };
    let (mut count, mut broken) = (0_u64, 0_u64);
    for machine in &machines {
        let points = match catalog.points(machine) {
            Ok(points) => points,
            Err(error) => {
                broken += 1;
                found.error(CHECK, &error.context(machine));
                continue;
            }
        };
        match catalog.future_warning(machine) {
            Err(error) => found.error(CHECK, &error),
            Ok(None) => {}
            Ok(Some(warning)) => found.add(
                "clock",
                Status::Warn,
                warning,
                "set the clock; remove a point with a wrong date with coldrise forget",
            ),
        }
        for point in points {
            count += 1;
            for disk in &point.disks {
                if let Err(error) = open_point_disk(repository, &point, &disk.name) {
                    broken += 1;
                    let address = format!("{machine}/{}/{}", point.point, disk.name);
                    found.error(CHECK, &error.context(address));
                }
            }
        }
    }
    match catalog.lost_points(None) {
        Err(error) => found.error(CHECK, &error),
        Ok(lost) => {
            for (machine, point) in lost {
                broken += 1;
                found.damage(CHECK, &catalog.lost(&machine, &point));
            }
        }
    }
    if broken == 0 {
        let machines = show_count(machines.len() as u64, "machine");
        found.ok(CHECK, format!("{count} of {machines}, all in order"));
    }
}

fn check_sessions(found: &mut Findings, repository: &Arc<Repository>) {
    const CHECK: &str = "sessions";
    let states = match coldrise_session::sessions(repository) {
        Ok(states) => states,
        Err(error) => return found.error(CHECK, &error),
    };
    let mut broken = 0_u64;
    match damaged_sessions(repository) {
        Err(error) => found.error(CHECK, &error),
        Ok(damaged) => {
            broken += damaged.len() as u64;
            damaged.iter().for_each(|damaged| found.damage(CHECK, damaged));
        }
    }
    for state in &states {
        let name = &state.document.name;
        for disk in &state.document.disks {
            if let Err(error) = open_live_disk(repository, name, &disk.name) {
                if has_ended(repository, name) {
                    break;
                }
                broken += 1;
                found.error(CHECK, &error.context(format!("live/{name}/{}", disk.name)));
            }
        }
        match session_damage(repository, &state.document) {
            Err(_) if has_ended(repository, name) => {}
            Err(error) => found.error(CHECK, &error),
            Ok(SessionDamage { older, guards }) => {
                broken += u64::from(older.is_some());
                let damage = older.into_iter().map(|older| (Status::Fail, older));
                for (status, damage) in damage.chain(guards.into_iter().map(|g| (Status::Warn, g)))
                {
                    found.add(CHECK, status, damage.message(), "");
                }
            }
        }
    }
    if broken == 0 {
        let served = states.iter().filter(|state| state.is_served).count();
        found.ok(CHECK, format!("{} published, {served} in use", states.len()));
    }
}

/// Whether a session of the list has ended since.
fn has_ended(repository: &Arc<Repository>, name: &SessionName) -> bool {
    coldrise_session::session(repository, name)
        .is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Remains of a crash. The next backup removes them, so there is little to do.
fn check_leftovers(found: &mut Findings, repository: &Arc<Repository>) {
    const CHECK: &str = "leftovers";
    if found.findings.iter().any(|finding| {
        finding.status == Status::Fail && ["restore points", "sessions"].contains(&finding.check)
    }) {
        let message = "not counted: the lost items above may still need them".to_owned();
        return found.add(CHECK, Status::Warn, message, "");
    }
    match count_leftovers(repository) {
        Err(error) => found.error(CHECK, &error),
        Ok(leftovers) if leftovers.is_empty() => found.ok(CHECK, "none".to_owned()),
        Ok(leftovers) => found.add(
            CHECK,
            Status::Warn,
            leftovers.join(", "),
            "nothing is lost: the next backup removes them (or one is running now)",
        ),
    }
}

fn count_leftovers(repository: &Arc<Repository>) -> Result<Vec<String>> {
    let mut leftovers = Vec::new();
    let staging = repository.path().join("db").join("coldrise-staging");
    let staged = names(&staging).unwrap_or_default().len() as u64;
    if staged > 0 {
        leftovers.push(format!("{} of an unfinished backup", show_count(staged, "file")));
    }
    // Read before the documents: these then contain every layer that is new since.
    let layers = names(&repository.layers_dir())?;
    let mut owned: HashSet<LayerId> = HashSet::new();
    let catalog = Catalog::new(repository);
    for state in coldrise_session::sessions(repository)? {
        for disk in &state.document.disks {
            owned.insert(disk.top);
            owned.extend(disk.layers.iter().map(|layer| layer.id));
        }
    }
    for machine in catalog.machines()? {
        for point in catalog.points(&machine)? {
            owned.extend(point.disks.iter().flat_map(|d| d.layers.iter().map(|l| l.id)));
        }
    }
    let unowned = layers
        .iter()
        .filter_map(|name| LayerId::parse(name).ok())
        .filter(|id| !owned.contains(id))
        .count() as u64;
    if unowned > 0 {
        leftovers.push(format!("{} of unneeded captured writes", show_count(unowned, "layer")));
    }
    Ok(leftovers)
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let what = || format!("reading {}", folder.display());
    std::fs::read_dir(folder)
        .context(what)?
        .map(|entry| Ok(entry.context(what)?.file_name().to_string_lossy().into_owned()))
        .collect()
}
