//! Polls the sources of a machine until it has come up, has failed, or the time is over.

mod own_proofs;

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_qmp::Event;
use coldrise_store::BootVerdict;
use serde_json::Value;

use super::command::{OwnCheck, RunningCheck};
use super::machine::{Forward, Machine, read_available};
use super::packets::{Packets, Sent};
use super::screen::{Font, Picture};
use super::signs;
use super::stages::{BootStage, Reached, Stages};
use crate::caller::Caller;
use crate::disk_server::DiskServer;
use crate::qemu;
use crate::serial_log::SerialLog;
use crate::signals::ChildSignals;
use coldrise_block::units::is_printable;
use coldrise_block::units::show_size;
use coldrise_inventory::Firmware;

/// Interval of the looks at the serial port: a prompt is the proof of most machines.
const SERIAL_INTERVAL: Duration = Duration::from_millis(20);
/// Number of looks at the serial port for each one at the other sources but the screen.
const SERIAL_LOOKS: u32 = 12;
/// Interval of the looks at the screen, and of the connections to the checked port.
const SLOW_INTERVAL: Duration = Duration::from_secs(1);
/// How long a connection to this host's own port may take.
const CONNECT_PATIENCE: Duration = Duration::from_millis(100);
/// A boot record and the menus of firmware read less, in bytes.
const SYSTEM_BYTES: u64 = 1 << 20;
/// Boot loaders write less, in bytes: GRUB saves its choice in 1 KiB.
const WRITTEN_BYTES: u64 = 16 << 10;
/// A machine that restarts so often is in a loop.
const MAX_RESETS: u32 = 3;
/// Number of last serial lines in the findings.
const TAIL_LINES: usize = 20;
/// Default time limits: with KVM and without it. Once the kernel lives, this host's speed is
/// known, and the limit is at least this multiple of the time to that, up to an hour.
const LIMIT_KVM: Duration = Duration::from_secs(10 * 60);
const LIMIT_EMULATED: Duration = Duration::from_secs(20 * 60);
const LIMIT_FACTOR: u32 = 20;
const LONGEST_LIMIT: Duration = Duration::from_secs(60 * 60);

/// The goal of the machine.
pub struct Goal {
    /// The stage to reach.
    pub until: BootStage,
    /// `None`: scaled by the speed of this host.
    pub time_limit: Option<Duration>,
    /// A port of the machine that has to accept connections.
    pub forward: Option<Forward>,
    /// Proves the service, in place of the port.
    pub own_check: Option<OwnCheck>,
    /// The machine's firmware.
    pub firmware: Firmware,
    /// Whether the machine runs under KVM.
    pub has_kvm: bool,
}

/// The evidence of a check.
pub(super) struct Findings {
    pub verdict: BootVerdict,
    pub stages: Vec<Reached>,
    /// The proof of the failure.
    pub failure: Option<String>,
    /// Why the own check proved nothing.
    pub note: Option<String>,
    /// The last text of the screen, if it had any.
    pub screen_text: Option<String>,
    pub serial_tail: Vec<String>,
    /// A PNG; `None` if QEMU cannot make one.
    pub screenshot: Option<Vec<u8>>,
}

/// Watches a machine and its disks until there is a verdict.
///
/// # Errors
/// `ToolFailed` if QEMU or the server of the disks ends, `Interrupted` if this program is asked
/// to end. Neither is a verdict.
pub(super) fn watch(
    caller: &Caller,
    machine: &mut Machine,
    server: &mut DiskServer,
    signals: &mut ChildSignals,
    goal: &Goal,
    on_stage: &dyn Fn(&Reached),
) -> Result<Findings> {
    let font = Font::installed(&machine.host);
    if font.is_none() {
        caller.remark("warning: without a video ROM the text of the screen is not read");
    }
    let packets = Packets::new(machine.host.clone(), machine.dump_path());
    let mut watch = Watch::new(goal, font, packets);
    watch.stages.reach(BootStage::Started, "the disks are served and QEMU runs");
    let mut reported = 0;
    let verdict = loop {
        let reached = watch.stages.reached();
        reached.iter().skip(reported).for_each(on_stage);
        reported = reached.len();
        if watch.failure.is_some() {
            break BootVerdict::Failed;
        } else if watch.stages.has(goal.until) {
            break BootVerdict::Ok;
        } else if watch.note.is_some() || watch.is_late() {
            break BootVerdict::NotProven;
        }
        watch.has_server_restarted = server.has_restarted();
        let looked = watch.look(machine).and_then(|()| server.look_after(caller, signals));
        if signals.was_asked_to_end() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted: the machine was ended"));
        }
        looked.map_err(|error| machine.explain(error))?;
        machine.check()?;
    };
    let screenshot = machine.picture("png");
    machine.check_connection()?;
    Ok(Findings {
        verdict,
        screenshot,
        stages: watch.stages.reached().to_vec(),
        note: watch.note.or_else(|| {
            let is_cut = verdict == BootVerdict::NotProven && watch.running_check.is_some();
            is_cut.then(|| "the command of --check had not ended".to_owned())
        }),
        failure: watch.failure,
        screen_text: watch.screen_text,
        serial_tail: watch.serial.tail(TAIL_LINES),
    })
}

struct Watch<'a> {
    goal: &'a Goal,
    font: Option<Font>,
    stages: Stages,
    failure: Option<String>,
    note: Option<String>,
    serial: SerialLog,
    word: SerialLog,
    packets: Packets,
    resets: u32,
    has_server_restarted: bool,
    screen_text: Option<String>,
    /// Kept open until the next one, so that the machine has time to answer.
    connection: Option<TcpStream>,
    port_answers: bool,
    running_check: Option<RunningCheck>,
    next_slow: Instant,
}

impl<'a> Watch<'a> {
    fn new(goal: &'a Goal, font: Option<Font>, packets: Packets) -> Watch<'a> {
        Watch {
            goal,
            font,
            stages: Stages::new(),
            failure: None,
            note: None,
            serial: SerialLog::default(),
            word: SerialLog::default(),
            packets,
            resets: 0,
            has_server_restarted: false,
            screen_text: None,
            connection: None,
            port_answers: false,
            running_check: None,
            next_slow: Instant::now(),
        }
    }

    fn look(&mut self, machine: &mut Machine) -> Result<()> {
        for _ in 0..SERIAL_LOOKS {
            machine.monitor.wait(SERIAL_INTERVAL)?;
            let bytes = read_available(&mut machine.serial);
            if !bytes.is_empty() {
                self.look_at_serial(&bytes);
            }
            if self.is_decided() {
                return Ok(());
            }
        }
        self.look_at_disks(&machine.execute("query-blockstats", Value::Null)?);
        for event in machine.monitor.take_events() {
            self.look_at_event(&event)?;
            self.look_at_port(&event, &mut machine.agent);
        }
        self.look_at_word(&read_available(&mut machine.word));
        if machine.agent.poll() {
            self.stages.reach(BootStage::Login, "the guest agent answers");
        }
        self.look_at_packets(machine)?;
        self.look_at_own_check();
        if Instant::now() >= self.next_slow {
            self.next_slow = Instant::now() + SLOW_INTERVAL;
            if let Some(font) = &self.font {
                let picture = machine.picture("ppm").and_then(|file| Picture::parse(&file));
                self.screen_text = picture.and_then(|picture| font.read(&picture));
            }
            for line in self.screen_text.clone().unwrap_or_default().lines() {
                self.look_at_line(line, "screen");
            }
            self.connect();
        }
        Ok(())
    }

    fn is_decided(&self) -> bool {
        self.failure.is_some() || self.stages.has(self.goal.until)
    }

    fn look_at_disks(&mut self, answer: &Value) {
        let devices = answer.as_array().into_iter().flatten();
        let disks = devices.filter(|device| {
            device["node-name"].as_str().is_some_and(|name| name.starts_with(qemu::DISK_NODE))
        });
        let (mut read, mut written) = (0_u64, 0_u64);
        for disk in disks {
            let bytes = |field| disk["stats"][field].as_u64().unwrap_or(0);
            read = read.saturating_add(bytes("rd_bytes"));
            written = written.saturating_add(bytes("wr_bytes"));
        }
        if read >= SYSTEM_BYTES {
            let evidence = format!("{} read from the disks", show_size(read));
            self.stages.reach(BootStage::Firmware, evidence);
        }
        if written >= WRITTEN_BYTES {
            let evidence = format!("{} written to the disks", show_size(written));
            self.stages.reach(BootStage::Userspace, evidence);
        }
    }

    /// # Errors
    /// `NoSpace`, `Io`: a write failed. Writes go to the session, so this says nothing about the
    /// point. `ToolFailed`: a read failed after a crash of the disks' server.
    fn look_at_event(&mut self, event: &Event) -> Result<()> {
        let text = |field: &str| event.fields[field].as_str().unwrap_or("unknown");
        match event.name.as_str() {
            "GUEST_PANICKED" => self.fail("the guest reported a panic"),
            "BLOCK_IO_ERROR" if text("operation") == "write" => {
                let is_full = event.fields["nospace"] == true;
                let kind = if is_full { ErrorKind::NoSpace } else { ErrorKind::Io };
                let text =
                    "no verdict: the machine's writes cannot be stored; the lines above say why";
                return Err(Error::new(kind, text));
            }
            // The disks were away for a while, which may have been the cause.
            "BLOCK_IO_ERROR" if self.has_server_restarted => {
                let text = "no verdict: a read failed after the server of the disks was restarted";
                let error = Error::new(ErrorKind::ToolFailed, text);
                return Err(error.advise("the lines above say why; check again"));
            }
            "BLOCK_IO_ERROR" => {
                let (operation, disk) = (text("operation"), text("node-name"));
                self.fail(format!("a {operation} of {disk} failed: {}", text("reason")));
            }
            "SHUTDOWN" if event.fields["guest"] == true => {
                self.fail("the machine switched itself off")
            }
            "RESET" if event.fields["guest"] == true => {
                self.resets += 1;
                if self.resets == MAX_RESETS {
                    self.fail(format!("the machine restarted {MAX_RESETS} times"));
                }
            }
            "NIC_RX_FILTER_CHANGED" if self.is_network_the_systems() => {
                self.stages.reach(BootStage::Kernel, "a driver set up the network card");
            }
            _ => {}
        }
        Ok(())
    }

    fn look_at_serial(&mut self, bytes: &[u8]) {
        let mut lines = Vec::new();
        self.serial.feed(bytes, |line| lines.push(line.to_owned()));
        lines.push(self.serial.pending());
        for line in lines.iter().filter(|line| !line.is_empty()) {
            // UEFI talks on this port, too.
            if self.goal.firmware == Firmware::Bios {
                self.stages.reach(BootStage::Firmware, quoted("serial port", line));
            }
            self.look_at_line(line, "serial port");
        }
    }

    fn look_at_packets(&mut self, machine: &mut Machine) -> Result<()> {
        for sent in self.packets.read() {
            let what = match sent {
                Sent::Dhcp => "a DHCP request",
                Sent::Arp => "an ARP request",
                Sent::RouterSolicitation => "a router solicitation",
                Sent::Accepted(_) | Sent::Other => "a packet",
            };
            match (sent, self.goal.forward) {
                (Sent::Accepted(port), Some(forward)) if port == forward.machine_port => {
                    self.port_answers = true;
                    let is_proof = self.goal.own_check.is_none();
                    let stage = if is_proof { BootStage::Service } else { BootStage::Userspace };
                    self.stages.reach(stage, format!("port {port} accepts connections"));
                }
                _ if self.is_network_the_systems() => {
                    self.stages.reach(BootStage::Userspace, format!("the machine sent {what}"));
                }
                _ => {}
            }
        }
        if self.packets.is_full() {
            machine.restart_dump()?;
            self.packets.restart();
        }
        Ok(())
    }

    /// Whether what happens on the network is the system's work. UEFI has drivers for network
    /// cards, and tries to boot from there after a boot loader has failed.
    fn is_network_the_systems(&self) -> bool {
        let is_bios = self.goal.firmware == Firmware::Bios;
        self.stages.has(if is_bios { BootStage::Firmware } else { BootStage::Kernel })
    }

    fn look_at_line(&mut self, line: &str, source: &str) {
        if let Some(stage) = signs::stage(line) {
            self.stages.reach(stage, quoted(source, line));
        }
        if signs::is_failure(line, self.stages.has(BootStage::Kernel)) {
            self.fail(quoted(source, line));
        }
    }

    /// QEMU accepts this at once, whatever the machine does: the proof is the machine's packet.
    fn connect(&mut self) {
        let Some(forward) = self.goal.forward.filter(|_| self.stages.has(BootStage::Kernel)) else {
            return;
        };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, forward.host_port));
        self.connection = TcpStream::connect_timeout(&address, CONNECT_PATIENCE).ok();
    }

    /// The first proof counts: later ones are its consequence.
    fn fail(&mut self, proof: impl Into<String>) {
        // QEMU's words are not trusted.
        let proof: String = proof.into().chars().filter(|c| is_printable(*c)).collect();
        self.failure.get_or_insert(proof);
    }

    fn is_late(&self) -> bool {
        let elapsed = Duration::from_millis(self.stages.elapsed_ms());
        let kernel = self.stages.after_ms(BootStage::Kernel).map(Duration::from_millis);
        elapsed >= self.goal.time_limit.unwrap_or_else(|| default_limit(self.goal.has_kvm, kernel))
    }
}

/// The time limit where a kernel took that long to come up.
fn default_limit(has_kvm: bool, kernel: Option<Duration>) -> Duration {
    let least = if has_kvm { LIMIT_KVM } else { LIMIT_EMULATED };
    kernel.map_or(least, |kernel| least.max(kernel * LIMIT_FACTOR).min(LONGEST_LIMIT))
}

fn quoted(source: &str, line: &str) -> String {
    format!("{source}: {}", line.trim())
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;
