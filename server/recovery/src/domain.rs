//! The source of a domain of libvirt: a point that is published, or a session on which it ran.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_firmware::Uefi;
use coldrise_host::{Host, SocketOwner, default_owner};
use coldrise_hosting::{Caller, Origin};
use coldrise_hosts::host_of;
use coldrise_hypervisors::libvirt::{
    Domain, DomainOptions, DomainState, DomainXml, NetworkChoice, RecoveryNote, VariablesPlace,
    check_tpm, default_domain, own_tpm, remove_left, rewrite,
};
use coldrise_hypervisors::moves::move_state;
use coldrise_hypervisors::virsh::Virsh;
use coldrise_inventory::Hardware;
use coldrise_session::{SessionDocument, SessionNotes};
use coldrise_store::{
    FIRMWARE_VARIABLES, LIBVIRT_XML, MachineName, MarkRules, PointDocument, Repository,
    SessionName, TPM_STATE, random,
};

/// What to do about another machine of the name.
pub(crate) const BESIDE: &str =
    "end it first; or recover beside it with --new-uuid, optionally with --name";

/// About a machine beside the original.
const TWO_TPMS: &str =
    "the machine has a copy of the original's TPM: both machines hold the same keys";

/// How a point is recovered under libvirt.
pub struct DomainRequest<'a> {
    /// The host that runs it, by its name in the repository; `None` for this one.
    pub host: Option<&'a MachineName>,
    /// URI of libvirt on that host.
    pub connect: &'a str,
    /// Name of the machine, and of the session; `None` for the stored one.
    pub name: Option<&'a SessionName>,
    /// Which time marks of a new session are kept; `None` for the default.
    pub marks: Option<&'a MarkRules>,
    /// Give the machine a new UUID and new network addresses.
    pub has_new_uuid: bool,
    /// Give it plain hardware in place of the stored.
    pub has_default_hardware: bool,
    /// Its network cards.
    pub network: &'a NetworkChoice,
    /// Path of the NBD server's socket on that host.
    pub socket: Option<&'a Path>,
    /// Owner of the socket there, as USER or USER:GROUP.
    pub socket_owner: Option<&'a str>,
}

/// A session and its note. The note may not be written yet.
pub struct Prepared {
    pub(crate) session: SessionDocument,
    pub(crate) note: RecoveryNote,
    pub(crate) host: Host,
    pub(crate) owner: Option<String>,
    /// Published just now: it ends if the machine cannot be started.
    pub(crate) is_new: bool,
}

/// Who may connect to the NBD server's socket on this host.
pub(crate) fn owner_here(owner: Option<&str>, connect: &str) -> Result<Option<SocketOwner>> {
    owner.map_or_else(|| default_owner(connect), |owner| owner.parse().map(Some))
}

/// The name of a socket for a session. Other repositories may have a session of this name.
pub(crate) fn own_socket_name(repository: &Repository, session: &SessionName) -> String {
    let id = repository.id().to_string();
    format!("{session}-{}.nbd", id.get(..8).unwrap_or(&id))
}

/// The path of the NBD server's socket on the machine's host.
fn socket_on(
    host: &Host,
    repository: &Repository,
    chosen: Option<&Path>,
    session: &SessionName,
) -> Result<PathBuf> {
    let name = match host.name() {
        None => format!("{session}.nbd"),
        Some(_) => own_socket_name(repository, session),
    };
    let is_odd = |path: &Path| {
        path.to_string_lossy().contains(|c: char| c == ':' || c.is_whitespace() || c.is_control())
    };
    if host.name().is_some() && chosen.is_some_and(is_odd) {
        let text = "the path of a socket on another host cannot contain spaces or colons: SSH does not accept them";
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    host.socket_path(chosen.unwrap_or(Path::new(&name)))
}

/// libvirt on that host: of another host that of the system, whose files are known from here.
fn virsh_on(host: &Host, connect: &str) -> Result<Virsh> {
    if host.name().is_some() && !connect.contains(":///system") {
        let text = format!("{connect}: on another host machines run under qemu:///system");
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Virsh::on(host.clone(), Some(connect))
}

impl Prepared {
    /// Checks everything that can be checked, then publishes.
    ///
    /// # Errors
    /// `Busy` if the machine runs already; `InvalidInput` for a socket that libvirt's QEMU cannot open; those of libvirt
    /// and of the repository.
    pub fn publish(
        caller: &Caller,
        repository: &Arc<Repository>,
        request: &DomainRequest<'_>,
        origin: &Origin,
    ) -> Result<Prepared> {
        if request.host.is_none() {
            owner_here(request.socket_owner, request.connect)?;
        }
        let owner = request.socket_owner.map(str::to_owned);
        let point = origin.document();
        let host = host_of(repository, request.host)?;
        let virsh = virsh_on(&host, request.connect)?;
        remove_left(repository, &host)?.removed.iter().for_each(|text| caller.remark(text));
        let on = Hypervisor::of(&host)?;
        let free = |domain: &DomainXml| check_free(&virsh, domain);
        let new_uuid = match point.part(TPM_STATE).filter(|_| request.has_new_uuid) {
            Some(_) => Some(random_uuid()?),
            None => None,
        };
        let new_uuid = new_uuid.as_deref();
        // A first pass: the session has no name yet.
        let nowhere = VariablesPlace { file: PathBuf::new(), template: PathBuf::new() };
        let first = domain(request, &on, point, new_uuid, "x", Path::new("/x"), nowhere)?;
        free(&first)?;
        let tpm = match first.uuid.as_ref().filter(|_| first.has_tpm) {
            Some(uuid) => Some(own_tpm(&host, request.connect, uuid)?),
            None => None,
        };
        let session =
            origin.publish(caller, repository, request.name.cloned(), request.marks.cloned())?;
        let socket = socket_on(&host, repository, request.socket, &session.name);
        let done = socket.and_then(|socket| {
            let variables = VariablesPlace::of(request.connect, &session, &socket);
            let name = session.name.as_str();
            let domain = domain(request, &on, point, new_uuid, name, &socket, variables)?;
            domain.remarks.iter().for_each(|remark| caller.remark(remark));
            if tpm.is_some() && request.has_new_uuid {
                caller.remark(TWO_TPMS);
            }
            let note = RecoveryNote {
                host: request.host.cloned(),
                connect: request.connect.to_owned(),
                name: domain.name,
                socket,
                xml: domain.text,
                variables: domain.variables,
                tpm,
            };
            note.write(&SessionNotes::of(repository, &session.name)?)?;
            if let Some(why) = &on.lacks_kvm {
                caller.remark(&format!("without KVM the machine is slow: {why}"));
            }
            Ok(note)
        });
        match done {
            Ok(note) => Ok(Prepared { session, note, host, owner, is_new: true }),
            Err(error) => {
                let _ = coldrise_session::unpublish(repository, &session.name, true);
                Err(error)
            }
        }
    }

    /// A session on which a domain was recovered.
    ///
    /// # Errors
    /// `NotFound` without such a session; `Busy` if its newest state is elsewhere.
    pub fn of_session(
        repository: &Arc<Repository>,
        name: &SessionName,
        owner: Option<&str>,
    ) -> Result<Prepared> {
        let state = coldrise_session::session(repository, name)?;
        if let Some(moved) = move_state(repository, name)? {
            moved.check_session_counts()?;
        }
        let notes = SessionNotes::of(repository, name)?;
        let note = RecoveryNote::read(&notes)?.ok_or_else(|| {
            let text = format!("no machine was recovered on session {name}");
            Error::new(ErrorKind::NotFound, text)
                .advise("recover MACHINE/POINT, or boot live/SESSION")
        })?;
        let (host, owner) = (host_of(repository, note.host.as_ref())?, owner.map(str::to_owned));
        Ok(Prepared { session: state.document, note, host, owner, is_new: false })
    }
}

/// A UUID of version 4.
fn random_uuid() -> Result<String> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    let number = u128::from_be_bytes(bytes);
    let (version, variant) = (0x4000_u128 << 64, 0x8000_u128 << 48);
    let number = number & !(0xf000_u128 << 64) & !(0xc000_u128 << 48) | version | variant;
    let digits = format!("{number:032x}");
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| digits.get(range).unwrap_or(""));
    Ok(parts.join("-"))
}

/// What a host has for machines.
struct Hypervisor<'a> {
    host: &'a Host,
    /// Why KVM does not work there; `None` if it does.
    lacks_kvm: Option<String>,
    uefi: Vec<Uefi>,
}

impl Hypervisor<'_> {
    fn of(host: &Host) -> Result<Hypervisor<'_>> {
        let lacks_kvm = host.facts()?.lacks_kvm;
        Ok(Hypervisor { host, lacks_kvm, uefi: coldrise_firmware::installed(host)? })
    }
}

/// The domain of a point, on the exports of a session.
fn domain(
    request: &DomainRequest<'_>,
    on: &Hypervisor<'_>,
    point: &PointDocument,
    new_uuid: Option<&str>,
    session: &str,
    socket: &Path,
    variables: VariablesPlace,
) -> Result<DomainXml> {
    let disks = point.disks.iter();
    let options = DomainOptions {
        host: on.host,
        name: request.name.map(SessionName::as_str),
        has_new_uuid: request.has_new_uuid,
        new_uuid,
        tpm: check_tpm(on.host, request.connect, point.part(TPM_STATE)),
        network: request.network,
        disks: disks.map(|d| (d.name.clone(), format!("live/{session}/{}", d.name))).collect(),
        socket,
        has_kvm: on.lacks_kvm.is_none(),
        uefi: &on.uefi,
        variables_bytes: point.part(FIRMWARE_VARIABLES).map(|part| part.size_bytes),
        variables,
    };
    let stored = point.configuration.as_ref().filter(|_| !request.has_default_hardware);
    match stored.filter(|stored| stored.format == LIBVIRT_XML) {
        Some(stored) => rewrite(&stored.text, &options).map_err(|error| {
            error.advise("to start it with plain hardware instead of the stored configuration: --default-hardware")
        }),
        None => {
            let mut hardware = Hardware::of(stored).unwrap_or_default();
            if let Ok(known) = Hardware::of(point.configuration.as_ref()) {
                hardware.firmware = known.firmware;
            }
            Ok(default_domain(point.machine.as_str(), &hardware, &options))
        }
    }
}

/// No machine is started beside itself: both would have the same network addresses and write to the same services.
fn check_free(virsh: &Virsh, domain: &DomainXml) -> Result<()> {
    let by_uuid = domain.uuid.as_ref().map(|uuid| (uuid, format!("a domain with the UUID {uuid}")));
    let by_name = (&domain.name, format!("the domain {}", domain.name));
    for (name, what) in by_uuid.into_iter().chain([by_name]) {
        if Domain::new(virsh, name).state()? != DomainState::Off {
            let text = format!("{what} runs already (virsh list --uuid --name)");
            return Err(Error::new(ErrorKind::Busy, text).advise(BESIDE));
        }
    }
    Ok(())
}
