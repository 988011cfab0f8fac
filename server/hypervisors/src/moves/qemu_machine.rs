//! The block layer of a running QEMU, through its monitor. State is asked for; events only end a wait.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_qmp::Monitor;
use coldrise_session::SessionDocument;
use coldrise_store::{DiskName, SessionName};
use serde_json::{Value, json};

use super::target::{ImageFormat, OpenTarget};

/// For a command. A busy host under emulation answers late.
const PATIENCE: Duration = Duration::from_secs(30);
/// Another client may use the monitor.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// Bytes that a copy has under way. A request of the machine waits behind them; fewer make the copy slower.
const BUFFER_BYTES: u64 = 4 << 20;

/// A disk of the session in the machine.
pub(super) struct Source {
    /// QEMU's name for it.
    pub(super) node: String,
    pub(super) size_bytes: u64,
}

/// A job of QEMU.
pub(super) struct Job {
    /// QEMU's word, such as `running`, `ready`, `pending`, `concluded`.
    pub(super) status: String,
    pub(super) done_bytes: u64,
    pub(super) total_bytes: u64,
    pub(super) error: Option<String>,
}

/// The connection.
pub(super) struct QemuMachine {
    monitor: Monitor,
}

impl QemuMachine {
    /// # Errors
    /// `NotFound` or `Io` if no QEMU listens there; `ToolFailed` if it does not answer.
    pub(super) fn connect(socket: &Path) -> Result<QemuMachine> {
        let monitor = Monitor::connect(socket, CONNECT_PATIENCE).map_err(|error| {
            let advice = "the machine may be off, or another program uses this monitor: it serves one client";
            match error.kind() {
                ErrorKind::ToolFailed => error.advise(advice),
                _ => error,
            }
        })?;
        Ok(QemuMachine { monitor })
    }

    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.monitor.execute(command, arguments, PATIENCE)
    }

    /// Waits for an event, at most for `patience`.
    pub(super) fn wait(&mut self, patience: Duration) -> Result<()> {
        self.monitor.wait(patience)?;
        self.monitor.take_events();
        Ok(())
    }

    /// The machine's nodes of the session's disks, in the session's order.
    ///
    /// # Errors
    /// `NotFound` if it does not use one of them.
    pub(super) fn sources(&mut self, session: &SessionDocument) -> Result<Vec<Source>> {
        let devices = self.execute("query-block", Value::Null)?;
        let devices = devices.as_array().map(Vec::as_slice).unwrap_or_default();
        let source = |disk: &DiskName| {
            let mut found = devices.iter().map(|device| &device["inserted"]).filter(|inserted| {
                inserted["file"].as_str().is_some_and(|file| serves(file, &session.name, disk))
            });
            let (Some(inserted), None) = (found.next(), found.next()) else {
                let text = format!(
                    "the machine has no disk live/{}/{disk}, or has it twice",
                    session.name
                );
                return Err(Error::new(ErrorKind::NotFound, text)
                    .advise("is this the monitor of the machine that runs on the session?"));
            };
            let node = inserted["node-name"].as_str().unwrap_or_default().to_owned();
            let size_bytes = inserted["image"]["virtual-size"].as_u64().unwrap_or(0);
            Ok(Source { node, size_bytes })
        };
        session.disks.iter().map(|disk| source(&disk.name)).collect()
    }

    /// The nodes that the machine's devices use.
    pub(super) fn used_nodes(&mut self) -> Result<Vec<String>> {
        let devices = self.execute("query-block", Value::Null)?;
        let devices = devices.as_array().map(Vec::as_slice).unwrap_or_default();
        let nodes = devices.iter().filter_map(|device| device["inserted"]["node-name"].as_str());
        Ok(nodes.map(str::to_owned).collect())
    }

    /// Opens a target as node `id`, and makes the image.
    pub(super) fn add_target(
        &mut self,
        id: &str,
        target: &OpenTarget,
        file: &File,
        size_bytes: u64,
    ) -> Result<()> {
        // A confined QEMU cannot open files: it gets an open one.
        let arguments = json!({ "opaque": id });
        let added = self.monitor.execute_with_file("add-fd", arguments, file.as_fd(), PATIENCE)?;
        let number = added["fdset-id"].as_u64().unwrap_or(0);
        let driver = if target.facts.device_bytes.is_some() { "host_device" } else { "file" };
        // Threads: with Linux' own asynchronous I/O a write that makes a file longer holds up QEMU's main loop.
        let cache = json!({ "direct": target.facts.is_direct, "no-flush": false });
        self.execute(
            "blockdev-add",
            json!({ "driver": driver, "node-name": file_node(id), "discard": "unmap",
                    "cache": cache, "aio": "threads", "filename": format!("/dev/fdset/{number}") }),
        )?;
        let mut node = json!({ "driver": target.format.word(), "node-name": id, "cache": cache,
                               "discard": "unmap", "file": file_node(id) });
        match target.format {
            // A device may be larger.
            ImageFormat::Raw => node["size"] = size_bytes.into(),
            ImageFormat::Qcow2 => self.make_qcow2(id, size_bytes)?,
        }
        self.execute("blockdev-add", node).map(drop)
    }

    fn make_qcow2(&mut self, id: &str, size_bytes: u64) -> Result<()> {
        let job = format!("{id}-make");
        let options = json!({ "driver": "qcow2", "file": file_node(id), "size": size_bytes });
        self.execute("blockdev-create", json!({ "job-id": job, "options": options }))?;
        let error = self.await_end(&job)?;
        self.dismiss(&job)?;
        error.map_or(Ok(()), |error| Err(job_failed("making an image", &error)))
    }

    /// Waits until a job has concluded; returns its error.
    pub(super) fn await_end(&mut self, id: &str) -> Result<Option<String>> {
        let until = std::time::Instant::now() + PATIENCE;
        loop {
            match self.jobs(id)?.remove(id) {
                None => return Ok(None),
                Some(job) if job.status == "concluded" => return Ok(job.error),
                Some(_) if std::time::Instant::now() >= until => {
                    let text = format!("QEMU's job {id} does not end");
                    return Err(Error::new(ErrorKind::ToolFailed, text));
                }
                Some(_) => self.wait(Duration::from_millis(20))?,
            }
        }
    }

    /// Starts the copy of a disk to node `id`; the job has the same id. The copy follows the machine's writes: a
    /// QEMU whose writes go to both sides can crash when the copy ends (docs/decisions/0055).
    pub(super) fn mirror(&mut self, source: &Source, id: &str, rate: u64) -> Result<()> {
        self.execute(
            "blockdev-mirror",
            json!({ "job-id": id, "device": source.node, "target": id, "sync": "full",
                    "copy-mode": "background", "speed": rate, "buf-size": BUFFER_BYTES,
                    "auto-finalize": false, "auto-dismiss": false }),
        )
        .map(drop)
    }

    /// The jobs whose ids begin with `prefix`.
    pub(super) fn jobs(&mut self, prefix: &str) -> Result<BTreeMap<String, Job>> {
        let jobs = self.execute("query-jobs", Value::Null)?;
        let jobs = jobs.as_array().map(Vec::as_slice).unwrap_or_default();
        let job = |job: &Value| {
            let id = job["id"].as_str().filter(|id| id.starts_with(prefix))?;
            let number = |name: &str| job[name].as_u64().unwrap_or(0);
            let known = Job {
                status: job["status"].as_str().unwrap_or_default().to_owned(),
                done_bytes: number("current-progress"),
                total_bytes: number("total-progress"),
                error: job["error"].as_str().map(shown),
            };
            Some((id.to_owned(), known))
        };
        Ok(jobs.iter().filter_map(job).collect())
    }

    /// Limits a copy, in bytes per second; 0 for no limit.
    pub(super) fn set_speed(&mut self, id: &str, bytes_per_s: u64) -> Result<()> {
        let arguments = json!({ "device": id, "speed": bytes_per_s });
        self.execute("block-job-set-speed", arguments).map(drop)
    }

    /// The time of all requests of the machine's disks so far, summed up, in nanoseconds.
    pub(super) fn busy_ns(&mut self) -> Result<u64> {
        let devices = self.execute("query-blockstats", Value::Null)?;
        let devices = devices.as_array().map(Vec::as_slice).unwrap_or_default();
        let times = ["rd_total_time_ns", "wr_total_time_ns", "flush_total_time_ns"];
        let of_device = |device: &Value| {
            times.map(|time| device["stats"][time].as_u64().unwrap_or(0)).into_iter().sum::<u64>()
        };
        Ok(devices.iter().map(of_device).fold(0, u64::saturating_add))
    }

    /// Whether the machine's processors run.
    pub(super) fn is_running(&mut self) -> Result<bool> {
        let status = self.execute("query-status", Value::Null)?;
        Ok(status["status"].as_str() == Some("running"))
    }

    /// Lets the processors stand still; returns when no request is under way.
    pub(super) fn stop(&mut self) -> Result<()> {
        self.execute("stop", Value::Null).map(drop)
    }

    /// Lets them run on.
    pub(super) fn resume(&mut self) -> Result<()> {
        self.execute("cont", Value::Null).map(drop)
    }

    /// Ends the copy as soon as both sides are equal.
    pub(super) fn complete(&mut self, id: &str) -> Result<()> {
        self.execute("job-complete", json!({ "id": id })).map(drop)
    }

    /// Lets the machine use the target.
    pub(super) fn finalize(&mut self, id: &str) -> Result<()> {
        self.execute("job-finalize", json!({ "id": id })).map(drop)
    }

    pub(super) fn dismiss(&mut self, id: &str) -> Result<()> {
        self.execute("job-dismiss", json!({ "id": id })).map(drop)
    }

    /// Ends all jobs with this prefix; the machine keeps its disks.
    pub(super) fn cancel_all(&mut self, prefix: &str) -> Result<()> {
        let jobs = self.jobs(prefix)?;
        for id in jobs.iter().filter(|(_, job)| job.status != "concluded").map(|(id, _)| id) {
            // It may have ended just now.
            let _ = self.execute("job-cancel", json!({ "id": id }));
        }
        for id in jobs.keys() {
            self.await_end(id)?;
            let _ = self.dismiss(id);
        }
        Ok(())
    }

    /// Removes nodes with this prefix that no device uses, and their open files.
    pub(super) fn remove_nodes(&mut self, prefix: &str) -> Result<()> {
        let nodes = self.execute("query-named-block-nodes", json!({ "flat": true }))?;
        let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
        let own = nodes.iter().filter_map(|node| node["node-name"].as_str());
        let mut own: Vec<&str> = own.filter(|name| name.starts_with(prefix)).collect();
        let used = self.used_nodes()?;
        own.retain(|name| !used.iter().any(|used| used == name || file_node(used) == *name));
        // The image before its file.
        own.sort_unstable();
        for name in own {
            self.remove_node(name)?;
        }
        let sets = self.execute("query-fdsets", Value::Null)?;
        for set in sets.as_array().map(Vec::as_slice).unwrap_or_default() {
            let files = set["fds"].as_array().map(Vec::as_slice).unwrap_or_default();
            let of_ours = |file: &Value| file["opaque"].as_str().unwrap_or("").starts_with(prefix);
            if files.iter().any(of_ours) {
                // QEMU keeps what it still uses.
                let _ = self.execute("remove-fd", json!({ "fdset-id": set["fdset-id"] }));
            }
        }
        Ok(())
    }

    /// Closes a node that no device uses.
    pub(super) fn remove_node(&mut self, name: &str) -> Result<()> {
        self.execute("blockdev-del", json!({ "node-name": name })).map(drop)
    }
}

/// The node of a target's file.
fn file_node(id: &str) -> String {
    format!("{id}-file")
}

/// The error of a job.
pub(super) fn job_failed(what: &str, error: &str) -> Error {
    Error::new(ErrorKind::ToolFailed, format!("{what} failed: {error}"))
}

/// The beginning of QEMU's text.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

/// Whether QEMU's name of a file is that of a session's disk: an export, or an image file of the mount or the
/// NFS server.
fn serves(file: &str, session: &SessionName, disk: &DiskName) -> bool {
    if let Some(options) = file.strip_prefix("json:") {
        let options: Value = serde_json::from_str(options).unwrap_or_default();
        return serves_json(&options, session, disk);
    }
    let path = file.split_once('?').map_or(file, |(path, _)| path);
    let path = path.strip_suffix('/').unwrap_or(path);
    let wanted = format!("live/{session}/{disk}");
    let Some(at) = path.rfind(&wanted) else { return false };
    let (before, after) =
        (path.get(..at).unwrap_or(""), path.get(at + wanted.len()..).unwrap_or(""));
    let is_image = after.starts_with('.') && !after.contains('/');
    (before.is_empty() || before.ends_with('/')) && (after.is_empty() || is_image)
}

fn serves_json(options: &Value, session: &SessionName, disk: &DiskName) -> bool {
    match options {
        Value::Object(fields) => fields.iter().any(|(name, value)| match value.as_str() {
            Some(text) => {
                ["export", "path", "filename"].contains(&name.as_str())
                    && serves(text, session, disk)
            }
            None => serves_json(value, session, disk),
        }),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_recognized_by_their_export() {
        let (session, disk) = ("a".parse().unwrap(), DiskName::parse("vda").unwrap());
        for file in [
            "nbd+unix:///live/a/vda?socket=/tmp/live/b/vdb",
            "nbd://127.0.0.1:10809/live/a/vda",
            "nfs://127.0.0.1/coldrise/live/a/vda.raw",
            "/mnt/live/a/vda.vhdx",
            r#"json:{"driver":"raw","file":{"driver":"nbd","export":"live/a/vda"}}"#,
        ] {
            assert!(serves(file, &session, &disk), "{file}");
        }
        for file in [
            "nbd+unix:///live/aa/vda?socket=/live/a/vda",
            "nbd+unix:///xlive/a/vda",
            "nbd+unix:///live/a/vdaa",
            "/live/a/vda.d/x",
            "json:{",
            "/var/lib/vda",
        ] {
            assert!(!serves(file, &session, &disk), "{file}");
        }
    }
}
