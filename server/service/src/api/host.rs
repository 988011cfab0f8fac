//! What fits on this host now, for callers that start machines.

use axum::Json;
use axum::extract::State;
use coldrise_host::has_virtualisation;
use coldrise_inventory::QEMU_BYTES;
use coldrise_store::{available_memory_bytes, memory_limit_bytes};
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::Caller;
use super::problem::{Answer, Problem, blocking};
use crate::access::Permission;
use crate::service::SharedService;

pub(super) fn routes() -> OpenApiRouter<SharedService> {
    OpenApiRouter::new().routes(routes!(host))
}

/// The service's host.
#[derive(Serialize, utoipa::ToSchema)]
struct Host {
    /// Its memory, or that of the service's control group, in bytes.
    memory_bytes: u64,
    /// What of it can be used now; `null` if the kernel does not report it.
    available_bytes: Option<u64>,
    /// The largest memory of a machine that would be started now, in MiB: `boot` refuses more.
    fitting_memory_mib: Option<u64>,
    processors: usize,
    /// Mean number of processes that ran or waited in the last minute; `null` if not known.
    load: Option<f64>,
    /// Machines run with KVM. Without it they are emulated: many times slower.
    has_kvm: bool,
    /// What this host lacks for machines under libvirt, and what to do; `null` if nothing is known to be missing.
    libvirt_missing: Option<String>,
    /// Number of machines that run from backups.
    machines: usize,
    /// Sum of their memory, in MiB. They take it as they use it.
    machines_memory_mib: u64,
    /// Sum of their processors.
    machines_cpus: u32,
}

/// Show what fits on the service's host now: memory, processors, machines that run already.
#[utoipa::path(get, path = "/host", tag = "service",
    responses((status = 200, body = Host), (status = "4XX", body = Problem, content_type = "application/problem+json")),
    security(("token" = []), ("login" = [])))]
async fn host(State(service): State<SharedService>, Caller(caller): Caller) -> Answer<Json<Host>> {
    caller.allow(Permission::View)?;
    let read = blocking(move || {
        let machines = service.runs.machines()?;
        let available_bytes = available_memory_bytes();
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        Ok(Host {
            memory_bytes: memory_limit_bytes(),
            available_bytes,
            fitting_memory_mib: available_bytes.map(|bytes| bytes.saturating_sub(QEMU_BYTES) >> 20),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            load: load.split(' ').next().and_then(|mean| mean.parse().ok()),
            // The service itself sees no devices: the kernel's module stands for /dev/kvm.
            has_kvm: has_virtualisation() && std::path::Path::new("/sys/class/misc/kvm").exists(),
            libvirt_missing: coldrise_hypervisors::libvirt::missing("qemu:///system"),
            machines: machines.len(),
            machines_memory_mib: machines.iter().map(|(_, machine)| machine.memory_mib).sum(),
            machines_cpus: machines.iter().map(|(_, machine)| machine.cpus).sum(),
        })
    });
    read.await.map(Json)
}
