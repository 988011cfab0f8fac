//! The options for the virtual hardware of a booted machine.

use clap::Args;
use coldrise_block::Result;
use coldrise_hosting::{QemuHost, qemu};
pub(crate) use coldrise_inventory::{DiskBus, Firmware, Hardware, Network};
use coldrise_inventory::{LOST_TPM, has_tpm};
use coldrise_store::{Configuration, MachinePart, PointDocument, TPM_STATE};

use crate::invocation::Invocation;
use crate::units::parse_size;

/// Options for the hardware of a booted machine.
#[derive(Debug, Args)]
pub(crate) struct HardwareOptions {
    /// Memory of the machine, such as 4G. Default: from the configuration, else 2G.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: Option<u64>,

    /// Number of processors. Default: from the configuration, else 2.
    #[arg(long, value_name = "NUMBER")]
    cpus: Option<u32>,

    /// Firmware of the machine. Default: from the configuration, else bios.
    #[arg(long, value_enum)]
    firmware: Option<Firmware>,

    /// Bus that the disks are attached to. Default: from the configuration, else virtio.
    #[arg(long, value_enum)]
    disk_bus: Option<DiskBus>,
}

impl HardwareOptions {
    /// The hardware of a stored configuration, overridden by the options. A broken configuration
    /// is ignored with a warning.
    ///
    /// # Errors
    /// `InvalidInput` if an option exceeds the limits.
    pub(crate) fn apply(
        &self,
        invocation: &Invocation,
        configuration: Option<&Configuration>,
        parts: &[MachinePart],
    ) -> Result<Hardware> {
        let mut hardware = Hardware::of(configuration).unwrap_or_else(|error| {
            invocation.remark(&format!("warning: {}; booting without it", error.full_message()));
            Hardware::default()
        });
        let is_stored = parts.iter().any(|part| part.kind == TPM_STATE);
        if configuration.is_some_and(has_tpm) && !is_stored {
            invocation.remark(LOST_TPM);
        }
        if let Some(bytes) = self.memory {
            hardware.memory_mib = bytes.div_ceil(1 << 20);
        }
        hardware.cpus = self.cpus.unwrap_or(hardware.cpus);
        hardware.firmware = self.firmware.unwrap_or(hardware.firmware);
        hardware.disk_bus = self.disk_bus.unwrap_or(hardware.disk_bus);
        hardware.check()
    }
}

/// The hardware of the point's machine, without a connected network.
///
/// # Errors
/// As [`HardwareOptions::apply`] and [`qemu::check`].
pub(crate) fn isolated_hardware(
    invocation: &Invocation,
    options: &HardwareOptions,
    point: &PointDocument,
    on: &QemuHost,
) -> Result<Hardware> {
    let mut hardware = options.apply(invocation, point.configuration.as_ref(), &point.parts)?;
    // Never with a connected network: the machine gets an isolated one of its own.
    hardware.network = Network::None;
    qemu::check(on, &hardware, point.disks.len())?;
    Ok(hardware)
}
