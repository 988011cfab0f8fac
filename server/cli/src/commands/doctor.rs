//! `coldrise doctor`: checks of this machine and the repository.

mod nfs;

use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_ingest::import_confinement;
use coldrise_session::{open_live_disk, open_point_disk, Catalog};
use coldrise_store::{LayerId, Repository};
use serde::Serialize;

use crate::invocation::Invocation;
use crate::nbdkit;
use crate::qemu;
use crate::report::Report;
use crate::units::{show_count, show_size};

/// Free space below which is warned, in bytes.
const LITTLE_SPACE_BYTES: u64 = 4 << 30;
/// Free space below which nothing can be relied on, in bytes.
const NO_SPACE_BYTES: u64 = 64 << 20;
/// Free memory for the maps of open sessions below which is warned, in bytes.
const LITTLE_MEMORY_BYTES: u64 = 64 << 20;
/// Where open sessions keep their maps.
const SHARED_MEMORY: &str = "/dev/shm";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warn,
    Fail,
}

/// One line.
#[derive(Serialize)]
struct Finding {
    check: &'static str,
    status: Status,
    message: String,
    /// What to do; empty where there is nothing to do.
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

    /// An error that already says what to do.
    fn error(&mut self, check: &'static str, error: &Error) {
        self.add(check, Status::Fail, error.full_message(), "");
    }
}

pub(crate) fn run(invocation: &Invocation) -> Result<Report> {
    let mut found = Findings { is_healthy: true, findings: Vec::new() };
    check_nbdkit(&mut found);
    check_tool(&mut found, "qemu-img", "qemu-utils", "backups of images that are not raw");
    check_tool(&mut found, "qemu-nbd", "qemu-utils", "backups of images that are not raw");
    check_confinement(&mut found);
    check_tool(&mut found, qemu::PROGRAM, "qemu-system-x86", "coldrise boot");
    check_kvm(&mut found);
    check_tool(&mut found, "fusermount3", "fuse3", "coldrise mount by others than root");
    nfs::check(&mut found);
    check_shared_memory(&mut found);
    match invocation.repository_path() {
        Err(_) => found.add(
            "repository",
            Status::Warn,
            "none was named, so none was checked".to_owned(),
            "give --repo DIR, or set COLDRISE_REPO",
        ),
        Ok(path) => match invocation.open_for_disks() {
            Err(error) => found.error("repository", &error),
            Ok(repository) => {
                check_repository(&mut found, &repository);
                check_space(&mut found, path);
                check_points(&mut found, &repository);
                check_sessions(&mut found, &repository);
                check_leftovers(&mut found, &repository);
            }
        },
    }
    found.is_healthy = found.findings.iter().all(|finding| finding.status != Status::Fail);
    let text = text(&found.findings);
    let mut report = Report::answer(&found, text);
    if !found.is_healthy {
        report.exit_code = ErrorKind::Io.exit_code();
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

/// Foreign images are parsed by QEMU, in a process that should reach nothing else.
fn check_confinement(found: &mut Findings) {
    const CHECK: &str = "import";
    match import_confinement() {
        Err(error) => found.error(CHECK, &error),
        Ok(confinement) => match confinement.missing() {
            None => found.ok(CHECK, "images are read in a confined process".to_owned()),
            Some(missing) => found.add(
                CHECK,
                Status::Warn,
                format!("{missing}: a hostile image has more within reach than itself"),
                "boot with lsm= naming landlock (Linux 5.13 and later), or import images that \
                 you trust only",
            ),
        },
    }
}

fn check_kvm(found: &mut Findings) {
    match qemu::kvm_works() {
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
            "remove what is not needed there, or mount it larger",
        ),
        Ok(free) => found.ok(CHECK, format!("{} free in {SHARED_MEMORY}", show_size(free))),
    }
}

fn free_bytes(path: &Path) -> Result<u64> {
    let facts = rustix::fs::statvfs(path)
        .map_err(std::io::Error::from)
        .context(|| format!("asking for the free space of {}", path.display()))?;
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

/// The catalog is read whole, and every disk with layers is opened: a layer that is
/// missing or was changed shows.
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
                "set the clock; a point with a wrong date goes with coldrise forget",
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
    for state in &states {
        let name = &state.document.name;
        for disk in &state.document.disks {
            if let Err(error) = open_live_disk(repository, name, &disk.name) {
                broken += 1;
                found.error(CHECK, &error.context(format!("live/{name}/{}", disk.name)));
            }
        }
    }
    if broken == 0 {
        let served = states.iter().filter(|state| state.is_served).count();
        found.ok(CHECK, format!("{} published, {served} in use", states.len()));
    }
}

/// What a crash left behind. The next backup tidies it up, so there is little to do.
fn check_leftovers(found: &mut Findings, repository: &Arc<Repository>) {
    const CHECK: &str = "leftovers";
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
    // Read before the documents: a layer that is new since then is in them.
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
        leftovers.push(format!(
            "{} of captured writes that nothing needs",
            show_count(unowned, "layer")
        ));
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
