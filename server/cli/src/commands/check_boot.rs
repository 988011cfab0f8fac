//! `coldrise check-boot`: boots a point in isolation, and proves that it comes up.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_requests::CheckBoot;
use coldrise_session::keep_files_private;
use coldrise_session::{Catalog, check_offered};
use coldrise_store::{Address, BootCheckDocument, BootVerdict, PointDocument, Repository};
use serde::Serialize;

use super::picture::write_private;
use crate::boot_goal::{GoalOptions, JudgeOptions, print_stage, qemu_host};
use crate::hardware::HardwareOptions;
use crate::hardware::isolated_hardware;
use crate::invocation::Invocation;
use crate::report::Report;
use crate::units::show_duration;
use coldrise_hosting::boot_check::{Trial, check_memory};
use coldrise_hosting::signals::ChildSignals;
use coldrise_hosting::tell_newer;

/// Boot a restore point in isolation and prove that the machine comes up.
///
/// The point is published as a session MACHINE-check-boot-throwaway, which is discarded at the end;
/// after a kill, the next check or gc removes it. The machine runs in QEMU without a
/// display. Its network only answers DHCP and has no connection to any other network.
///
/// The check looks at the screen, the serial port, the disks, the network and QEMU's events, and
/// prints each stage with its proof: started, firmware (it found a system), kernel, userspace,
/// login, service. It ends at the stage of --until. It fails if something proves a failure: a
/// message of the firmware or the boot loader, a kernel panic, an emergency shell, a disk error, a
/// power-off, three restarts. Without either proof the boot is "not proven" when the time is over;
/// that is neither success nor failure. If the machine's last good checks of older points reached
/// more, it is also called worse; that changes no exit code.
///
/// A text prompt or an answer of the guest agent proves the login: for machines with a graphical
/// login and no agent use --check-port, --check or --until userspace. A program of the machine can
/// write ok or failed TEXT to its virtio port org.coldrise.check; that proves the service, or the
/// failure.
///
/// With --on HOST the machine runs on another host, which is reached over SSH; it reads its disks through that
/// connection, and a check whose connection is lost has no result.
///
/// QEMU can open its own files only (Landlock), not the repository or the passphrase. The result
/// is stored with the point, with the last picture of the screen: list and show show it.
///
/// The exit code is 0 if the stage is reached, 13 if the machine failed and 14 if nothing is proven.
/// It is 3 if the host has too little memory now: nothing was started.
#[derive(Debug, Args)]
pub(crate) struct CheckBootArguments {
    #[command(flatten)]
    request: CheckBoot,

    #[command(flatten)]
    judge: JudgeOptions,

    /// Write the last picture of the screen to this file.
    #[arg(long, value_name = "FILE.png")]
    screenshot: Option<PathBuf>,

    #[command(flatten)]
    hardware: HardwareOptions,
}

#[derive(Serialize)]
struct Checked<'a> {
    address: String,
    #[serde(flatten)]
    document: &'a BootCheckDocument,
    /// The highest one.
    #[serde(rename = "rung")]
    stage: Option<&'a str>,
    screenshot: Option<&'a Path>,
    elapsed_ms: u64,
}

pub(crate) fn run(invocation: &Invocation, arguments: &CheckBootArguments) -> Result<Report> {
    // The screen and the packets of the machine lie in a folder for temporary files.
    keep_files_private();
    let goal = GoalOptions::new(&arguments.request, &arguments.judge);
    goal.until()?;
    let mut signals = ChildSignals::catch()?;
    let repository = &invocation.open()?;
    let address: Address = arguments.request.address.parse()?;
    check_whole(&address)?;
    let of_mark = invocation.point_of_mark(repository, &address)?;
    let point = &find(invocation, repository, &of_mark.address)?;
    let qemu = &qemu_host(repository, arguments.request.on.as_deref())?;
    let hardware = isolated_hardware(invocation, &arguments.hardware, point, qemu)?;
    check_memory(qemu, &hardware, 1)?;
    if let Some(path) = &arguments.screenshot {
        // Now, not after the boot.
        write_private(path, &[], true)?;
    }
    if let Some(why) = qemu.without_kvm() {
        invocation.remark(&format!("without KVM the machine is slow: {why}"));
    }
    let goal = goal.goal(point, &hardware, qemu)?;
    let trial = Trial {
        caller: invocation.caller()?,
        repository,
        qemu,
        point,
        hardware,
        goal,
        slot: None,
        on_stage: &|reached| print_stage(invocation, None, reached),
    };
    let (document, picture) = trial.run(&mut signals)?;
    // It has the result.
    of_mark.keep();
    report(invocation, arguments, point, &document, picture)
}

fn check_whole(address: &Address) -> Result<()> {
    match address {
        Address::Point { disk: None, .. } | Address::Marked { disk: None, .. } => Ok(()),
        _ => {
            let text = format!(
                "{address}: whole restore points are checked: give MACHINE/POINT or live/SESSION@TIME"
            );
            Err(Error::new(ErrorKind::InvalidInput, text))
        }
    }
}

fn find(
    invocation: &Invocation,
    repository: &Arc<Repository>,
    address: &Address,
) -> Result<PointDocument> {
    let Address::Point { machine, selector, .. } = address else {
        return Err(Error::new(ErrorKind::Internal, "not a restore point"));
    };
    let catalog = Catalog::new(repository);
    let point = catalog.point(machine, selector)?;
    tell_newer(invocation.caller()?, &catalog, selector, &point);
    check_offered(point)
}

fn report(
    invocation: &Invocation,
    arguments: &CheckBootArguments,
    point: &PointDocument,
    document: &BootCheckDocument,
    picture: Option<Vec<u8>>,
) -> Result<Report> {
    let mut screenshot = None;
    if let Some(path) = &arguments.screenshot {
        match picture {
            Some(picture) => {
                write_private(path, &picture, true)?;
                screenshot = Some(path.as_path());
            }
            None => {
                let _ = std::fs::remove_file(path);
                invocation.remark("warning: QEMU could not make a screenshot");
            }
        }
    }
    let checked = Checked {
        address: format!("{}/{}", point.machine, point.point),
        stage: document.stages.last().map(|reached| reached.stage.as_str()),
        document,
        screenshot,
        elapsed_ms: invocation.elapsed_ms(),
    };
    let mut report = Report::answer(&checked, text(invocation, &checked));
    report.exit_code = match document.verdict {
        BootVerdict::Ok => 0,
        BootVerdict::Failed => coldrise_runs::BOOT_FAILED,
        BootVerdict::NotProven => coldrise_runs::BOOT_NOT_PROVEN,
    };
    Ok(report)
}

fn text(invocation: &Invocation, checked: &Checked<'_>) -> String {
    let (address, document) = (&checked.address, checked.document);
    let until = &document.until;
    let elapsed = show_duration(invocation.elapsed());
    let highest = checked.stage.unwrap_or("nothing");
    let mut text = match document.verdict {
        BootVerdict::Ok => return format!("{address} boots: {until} reached ({elapsed})"),
        BootVerdict::Failed => {
            let failure = document.failure.as_deref().unwrap_or("no reason");
            format!("{address} does not boot: {failure}; it reached {highest} ({elapsed})")
        }
        BootVerdict::NotProven => format!(
            "{address}: not proven that it boots: it reached {highest}, not {until}, in {elapsed}"
        ),
    };
    if let Some(usual) = document.usual_stage.as_ref().filter(|_| document.is_worse) {
        text.push_str(&format!("; worse than usual: {usual}"));
    }
    if let Some(note) = &document.note {
        text.push_str(&format!("; {note}"));
    }
    let screen = document.screen_text.as_deref().unwrap_or_default();
    let serial = document.serial_tail.join("\n");
    for (title, lines) in [("screen", screen), ("serial port", &serial)] {
        let lines = lines.lines().filter(|line| !line.trim().is_empty());
        let lines: String = lines.map(|line| format!("\n  | {line}")).collect();
        if !lines.is_empty() {
            text.push_str(&format!("\n{title}:{lines}"));
        }
    }
    text
}
