//! QEMU without a user: its monitor and its serial port are sockets in a private folder.

use std::ffi::OsString;
use std::io::{ErrorKind as IoErrorKind, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_host::Host;
use coldrise_qmp::Monitor;
use serde_json::{Value, json};

use super::agent::Agent;
use super::packets::MAX_PACKET_BYTES;
use super::process::MachineProcess;
use crate::caller::Caller;
use crate::place::QemuPlace;
use crate::qemu_host::QemuHost;
use crate::signals::ChildSignals;
use coldrise_inventory::{DiskBus, Hardware};

/// How long QEMU may take to connect, and to answer its monitor.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// How long QEMU may take to end.
pub(super) const END_PATIENCE: Duration = Duration::from_secs(5);
const START_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum size of a picture's file, in bytes.
const MAX_PICTURE_BYTES: u64 = 64 << 20;
/// Bytes read from such a file at once.
const MAX_PART_BYTES: u64 = 8 << 20;
/// Bytes taken from a port of the machine at once.
const MAX_READ_BYTES: u64 = 1 << 20;
/// Names of the virtio ports' sockets and devices.
pub(super) const AGENT: &str = "agent";
pub(super) const WORD: &str = "word";
/// The dump of the packets.
const DUMP: &str = "packets";

/// A port of this host's loopback that leads to a port of the machine.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// The port of this host's loopback that leads to it.
    pub host_port: u16,
    /// The port of loopback on QEMU's host.
    pub(super) qemu_port: u16,
    pub(crate) machine_port: u16,
}

impl Forward {
    /// With a free port of QEMU's host.
    ///
    /// # Errors
    /// Those of [`Host::free_port`].
    pub fn to(machine_port: u16, qemu: &QemuHost) -> Result<Forward> {
        let (qemu_port, host_port) = qemu.host.free_port()?;
        Ok(Forward { host_port, qemu_port, machine_port })
    }
}

/// A running QEMU. Dropping it ends it.
pub(super) struct Machine {
    process: MachineProcess,
    pub(super) monitor: Monitor,
    pub(super) serial: UnixStream,
    /// The port of the machine's own word.
    pub(super) word: UnixStream,
    pub(super) agent: Agent,
    /// QEMU's host, and its folder there.
    pub(super) host: Host,
    folder: PathBuf,
}

impl Machine {
    /// Starts QEMU with the arguments `words` for hardware, console and disks. `place` is
    /// private to this machine. QEMU reaches its folder there only.
    ///
    /// # Errors
    /// `ToolFailed` if QEMU is missing, ends or does not answer; `Interrupted` if this program
    /// receives a signal to end meanwhile; errors of the connection.
    pub(super) fn start(
        caller: &Caller,
        mut words: Vec<OsString>,
        hardware: &Hardware,
        forward: Option<Forward>,
        place: &QemuPlace,
        signals: &mut ChildSignals,
    ) -> Result<Machine> {
        // QEMU connects to these, so that not a byte is lost at the start.
        let listen = |name: &str| {
            let listener = UnixListener::bind(place.sockets.join(name));
            listener
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
                .context(|| format!("making the socket {name}"))
        };
        let [monitor, serial, agent, word] =
            [listen("monitor")?, listen("serial")?, listen(AGENT)?, listen(WORD)?];
        let observation = observation(hardware, forward, place)?;
        words.extend(observation.into_iter().map(OsString::from));
        let port = forward.map(|forward| forward.qemu_port);
        let process = MachineProcess::start(caller, words, place, port)?;
        let mut starting = Starting(Some(process));
        let serial = starting.accept(&serial, signals)?;
        let monitor = starting.accept(&monitor, signals)?;
        let agent = starting.accept(&agent, signals)?;
        let word = starting.accept(&word, signals)?;
        monitor.set_nonblocking(false).context(|| "preparing the monitor")?;
        let monitor = Monitor::greet(monitor, PATIENCE)?;
        let Some(process) = starting.0.take() else {
            return Err(Error::new(ErrorKind::Internal, "QEMU was ended at its start"));
        };
        let (host, folder) = (place.qemu.host.clone(), place.folder.clone());
        Ok(Machine { process, monitor, serial, word, agent: Agent::new(agent), host, folder })
    }

    /// Checks that QEMU still runs.
    ///
    /// # Errors
    /// `ToolFailed` if it has ended: it never does so by itself.
    pub(super) fn check(&mut self) -> Result<()> {
        self.process.check()
    }

    /// Checks that QEMU's host is still connected: without that nothing is proven.
    ///
    /// # Errors
    /// `Io` if the connection is lost.
    pub(super) fn check_connection(&self) -> Result<()> {
        self.process.check_connection()
    }

    /// The error of a broken monitor, or the end of QEMU that explains it and comes just after.
    pub(super) fn explain(&mut self, error: Error) -> Error {
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until {
            if let Err(ended) = self.check() {
                return ended;
            }
            std::thread::sleep(START_INTERVAL);
        }
        error
    }

    pub(super) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.monitor.execute(command, arguments, PATIENCE)
    }

    /// A picture of the screen as a file of that format, `ppm` or `png`. `None` if QEMU cannot
    /// make one.
    pub(super) fn picture(&mut self, format: &str) -> Option<Vec<u8>> {
        let path = self.folder.join("picture");
        self.execute("screendump", json!({ "filename": path, "format": format })).ok()?;
        let mut picture = Vec::new();
        while picture.len() as u64 <= MAX_PICTURE_BYTES {
            let mut part = self.host.read_from(&path, picture.len() as u64, MAX_PART_BYTES).ok()?;
            let is_last = (part.len() as u64) < MAX_PART_BYTES;
            picture.append(&mut part);
            if is_last {
                return Some(picture);
            }
        }
        None
    }

    /// The dump of the packets.
    pub(super) fn dump_path(&self) -> PathBuf {
        self.folder.join(DUMP)
    }

    /// Empties the dump of the packets.
    ///
    /// # Errors
    /// The errors of `execute`.
    pub(super) fn restart_dump(&mut self) -> Result<()> {
        self.execute("object-del", json!({ "id": "dump" }))?;
        let path = self.dump_path();
        let dump = json!({
            "qom-type": "filter-dump", "id": "dump", "netdev": "net", "file": path,
            "maxlen": MAX_PACKET_BYTES,
        });
        self.execute("object-add", dump).map(|_| ())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // QEMU reports an end by a signal on stderr.
        let quit = self.monitor.execute("quit", Value::Null, END_PATIENCE);
        let until = Instant::now() + END_PATIENCE;
        while quit.is_ok() && Instant::now() < until && self.check().is_ok() {
            std::thread::sleep(START_INTERVAL);
        }
        self.process.end();
    }
}

/// QEMU before it has connected. Dropping it ends it.
struct Starting(Option<MachineProcess>);

impl Starting {
    fn accept(
        &mut self,
        listener: &UnixListener,
        signals: &mut ChildSignals,
    ) -> Result<UnixStream> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true).context(|| "preparing a socket")?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == IoErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context(|| "waiting for QEMU"),
            }
            if signals.was_asked_to_end() {
                return Err(Error::new(ErrorKind::Interrupted, "interrupted while QEMU started"));
            }
            self.0.as_mut().map_or(Ok(()), MachineProcess::check)?;
            std::thread::sleep(START_INTERVAL);
        }
        let text = "QEMU did not start in time: this host may be busy; try again later";
        Err(Error::new(ErrorKind::ToolFailed, text))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            process.end();
        }
    }
}

/// The bytes that a socket without blocking holds, at most 1 MiB. QEMU makes the guest wait with
/// more. It ends with an error when there is nothing left, or with QEMU.
pub(super) fn read_available(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.take(MAX_READ_BYTES).read_to_end(&mut bytes);
    bytes
}

/// The arguments for sockets, the isolated network and the sandbox.
fn observation(
    hardware: &Hardware,
    forward: Option<Forward>,
    place: &QemuPlace,
) -> Result<Vec<String>> {
    // A comma separates options.
    let word = |path: PathBuf| path.display().to_string().replace(',', ",,");
    let socket =
        |name: &str| place.offer(name).map(|path| format!("socket,id={name},path={}", word(path)));
    let path = |name: &str| word(place.folder.join(name));
    let mut network = "user,id=net,restrict=on".to_owned();
    if let Some(Forward { qemu_port, machine_port, .. }) = forward {
        network.push_str(&format!(",hostfwd=tcp:127.0.0.1:{qemu_port}-:{machine_port}"));
    }
    let card = match hardware.disk_bus {
        DiskBus::Virtio | DiskBus::Scsi => "virtio-net-pci",
        DiskBus::Sata | DiskBus::Ide => "e1000",
    };
    let dump = path(DUMP);
    let words = [
        ["-chardev", &socket("serial")?],
        ["-serial", "chardev:serial"],
        ["-chardev", &socket("monitor")?],
        ["-mon", "chardev=monitor,mode=control"],
        // For a second observer: a monitor serves one client at a time.
        ["-qmp", &format!("unix:{},server=on,wait=off", path("second-monitor"))],
        ["-device", "virtio-serial-pci"],
        ["-chardev", &socket(AGENT)?],
        [
            "-device",
            &format!("virtserialport,chardev=agent,id={AGENT},name=org.qemu.guest_agent.0"),
        ],
        ["-chardev", &socket(WORD)?],
        ["-device", &format!("virtserialport,chardev=word,id={WORD},name=org.coldrise.check")],
        // It answers DHCP, and leads nowhere.
        ["-netdev", &network],
        ["-device", &format!("{card},netdev=net,romfile=")],
        [
            "-object",
            &format!("filter-dump,id=dump,netdev=net,file={dump},maxlen={MAX_PACKET_BYTES}"),
        ],
        // The guest's kernel can report its panic; a machine that is off can still be looked at.
        ["-device", "pvpanic"],
        ["-action", "shutdown=pause,panic=pause"],
        ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"],
    ];
    Ok(words.iter().flatten().map(|word| (*word).to_owned()).collect())
}
