//! libvirt's backup job of a domain: at most one at a time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};

use coldrise_hypervisors::libvirt::PATIENCE;
use coldrise_hypervisors::virsh::Virsh;

/// Interval of asking how far a job is.
const INTERVAL: Duration = Duration::from_millis(200);
/// How long libvirt may take for the end of a job until it is asked again.
const ABORT_INTERVAL: Duration = Duration::from_secs(10);

/// The backup job of a domain, running or not.
pub(super) struct Job<'a> {
    pub(super) virsh: &'a Virsh,
    pub(super) uuid: &'a str,
}

impl Job<'_> {
    /// Ends a job of ours whose process was killed, if `answer`, that of domjobinfo, has a job. Returns whether there was one.
    ///
    /// # Errors
    /// `Busy` if the job's process lives, or if another program owns the job.
    pub(super) fn end_abandoned(&self, answer: &str) -> Result<bool> {
        if field(answer, "Job type") == "None" {
            return Ok(false);
        }
        // Fails for another kind of job.
        let xml = self.virsh.run(&["backup-dumpxml", self.uuid], PATIENCE).unwrap_or_default();
        let Some(folder) = our_folder(&xml) else {
            let text = "libvirt runs another job in this domain, such as a backup or a migration";
            return Err(Error::new(ErrorKind::Busy, text)
                .advise("wait for its end; virsh domjobinfo shows it, virsh domjobabort ends it"));
        };
        if self.virsh.host().is_in_use(&folder)? {
            let text = "another process is backing up this machine";
            return Err(Error::new(ErrorKind::Busy, text).advise("wait for its end"));
        }
        self.end(&folder, true).map(|()| true)
    }

    /// Ends the job with scratch files in `folder`, if it `is_running`, and waits for its end. The next job, of another
    /// program or repository, may begin at once: so each look asks whose job it is, and an abort that libvirt has
    /// taken is not repeated soon.
    ///
    /// # Errors
    /// `ToolFailed` with libvirt's reason.
    pub(super) fn end(&self, folder: &Path, mut is_running: bool) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let mut next_abort = Instant::now();
        let mut aborted = Ok(String::new());
        while is_running {
            let now = Instant::now();
            if now >= until {
                aborted?;
                let text = "libvirt does not end the backup job";
                return Err(Error::new(ErrorKind::ToolFailed, text));
            }
            if now >= next_abort {
                // It may end by itself meanwhile, or be about to end.
                aborted = self.virsh.run(&["domjobabort", self.uuid], PATIENCE);
                next_abort = Instant::now() + ABORT_INTERVAL;
            } else {
                std::thread::sleep(Duration::from_millis(20));
            }
            is_running = self.is_of(folder)?;
        }
        Ok(())
    }

    /// Waits for the end of the push into `folder`.
    ///
    /// # Errors
    /// `Interrupted` if cancelled, `ToolFailed` if the copy failed.
    pub(super) fn wait(&self, folder: &Path, cancel: &AtomicBool) -> Result<()> {
        while self.is_of(folder)? {
            if cancel.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Interrupted, "cancelled"));
            }
            std::thread::sleep(INTERVAL);
        }
        let words = ["domjobinfo", self.uuid, "--completed", "--keep-completed"];
        let answer = self.virsh.run(&words, PATIENCE)?;
        if field(&answer, "Job type") == "Completed" && field(&answer, "Operation") == "Backup" {
            return Ok(());
        }
        let text = format!("libvirt failed to copy the disks: {}", field(&answer, "Error message"));
        Err(Error::new(ErrorKind::ToolFailed, text))
    }

    /// Whether the job with scratch files in `folder` runs.
    ///
    /// # Errors
    /// `ToolFailed` if libvirt does not tell.
    pub(super) fn is_of(&self, folder: &Path) -> Result<bool> {
        // The one that fails without a job comes last.
        let ask = || {
            let answer = self.virsh.run(&["domjobinfo", self.uuid], PATIENCE)?;
            match field(&answer, "Operation") {
                "Backup" => self.virsh.run(&["backup-dumpxml", self.uuid], PATIENCE).map(Some),
                _ => Ok(None),
            }
        };
        // A job may end, and another one begin, between the questions.
        let xml = ask().or_else(|_| ask())?;
        Ok(xml.is_some_and(|xml| is_in(&xml, folder)))
    }
}

/// Whether the job of this document has its scratch files in `folder`.
pub(super) fn is_in(xml: &str, folder: &Path) -> bool {
    our_folder(xml).as_deref() == Some(folder)
}

/// A line such as `Job type:         None`.
fn field<'a>(answer: &'a str, name: &str) -> &'a str {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    answer.lines().find_map(value).unwrap_or_default().trim()
}

/// The private folder of the job's first scratch file, if its name is one of ours.
fn our_folder(xml: &str) -> Option<PathBuf> {
    let document = roxmltree::Document::parse(xml).ok()?;
    let mut files = document
        .descendants()
        .filter(|node| node.has_tag_name("scratch") || node.has_tag_name("target"));
    let folder = Path::new(files.find_map(|node| node.attribute("file"))?).parent()?;
    let name = folder.file_name()?.to_str()?;
    name.starts_with("coldrise-backup-").then(|| folder.to_owned())
}

#[cfg(test)]
mod tests {
    use super::{field, our_folder};

    #[test]
    fn answers_are_read() {
        assert_eq!(
            field("Job type:         None        \nOperation:  Backup\n", "Job type"),
            "None"
        );
        let xml = |file: &str| {
            format!(
                "<domainbackup mode='pull'><disks><disk name='fda' backup='no'/><disk name='vda'><scratch file='{file}'/></disk></disks></domainbackup>"
            )
        };
        let folder = our_folder(&xml("/var/tmp/coldrise-backup-Ab/disk-vda")).unwrap();
        assert_eq!(folder.to_str(), Some("/var/tmp/coldrise-backup-Ab"));
        assert_eq!(our_folder(&xml("/var/lib/libvirt/x.scratch")), None);
        assert_eq!(our_folder(""), None);
    }
}
