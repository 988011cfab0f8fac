//! The options of commands that boot points to judge them.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use coldrise_block::{Error, ErrorKind, Result};
use coldrise_hosts::{host_of, parse_host_name};
use coldrise_requests::CheckBoot;
use coldrise_store::{PointDocument, Repository};

use coldrise_hosting::QemuHost;
use coldrise_hosting::boot_check::{BootStage, Forward, Goal, OwnCheck, Reached};
use serde_json::json;

use crate::hardware::Hardware;
use crate::invocation::Invocation;
use crate::report::print_line;
use crate::units::{parse_duration, show_duration};

/// The goal of the machine.
#[derive(Debug, Args)]
pub(crate) struct GoalOptions {
    /// The stage to reach. Default: login, or service with --check-port or --check.
    #[arg(long, value_enum, value_name = "STAGE")]
    until: Option<BootStage>,

    /// A TCP port of the machine that has to accept connections. The machine has to use DHCP.
    ///
    /// During the check, a port on this host's loopback address is forwarded to it.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    check_port: Option<u16>,

    #[command(flatten)]
    judge: JudgeOptions,
}

/// How the boot is judged.
#[derive(Clone, Debug, Args)]
pub(crate) struct JudgeOptions {
    /// Time for the boot, such as 90s, 15m or 1h.
    ///
    /// Default: 10 minutes, or 20 without KVM. Once the kernel runs, the limit is raised to 20 times
    /// the time it took to get there if that is longer, up to an hour.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    time_limit: Option<Duration>,

    /// A shell command on this host, also with --on, that judges the machine: exit code 0 proves the service.
    ///
    /// It starts when --check-port accepts connections; without that option at the login, or one
    /// minute after the first program of the machine (on slow hosts later). The environment names
    /// the point (COLDRISE_ADDRESS, COLDRISE_MACHINE, COLDRISE_POINT) and the way to the port
    /// (COLDRISE_HOST, COLDRISE_PORT). Another exit code is a failure; the last line on stderr is
    /// the reason. Codes 126 and 127, a signal and a command that does not end prove nothing.
    #[arg(long, value_name = "COMMAND")]
    check: Option<String>,
}

impl GoalOptions {
    /// The goal of a check.
    pub(crate) fn new(request: &CheckBoot, judge: &JudgeOptions) -> GoalOptions {
        let CheckBoot { until, check_port, .. } = *request;
        GoalOptions { until, check_port, judge: judge.clone() }
    }

    /// The stage to reach.
    ///
    /// # Errors
    /// `InvalidInput` if an own check comes after that stage.
    pub(crate) fn until(&self) -> Result<BootStage> {
        let has_service = self.check_port.is_some() || self.judge.check.is_some();
        let default = if has_service { BootStage::Service } else { BootStage::Login };
        let until = self.until.unwrap_or(default);
        if self.judge.check.is_some() && until != BootStage::Service {
            let text = "the command of --check proves the service: leave out --until";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(until)
    }

    /// Whether the service is one that the user named.
    pub(crate) fn has_own_check(&self) -> bool {
        self.judge.check.is_some() || self.check_port.is_some()
    }

    /// The goal of one boot on a host, with a free port of this one for --check-port.
    ///
    /// # Errors
    /// Those of [`GoalOptions::until`] and [`Forward::to`].
    pub(crate) fn goal(
        &self,
        point: &PointDocument,
        hardware: &Hardware,
        qemu: &QemuHost,
    ) -> Result<Goal> {
        let forward = self.check_port.map(|port| Forward::to(port, qemu)).transpose()?;
        let own_check = self.judge.check.as_ref().map(|text| {
            let mut environment = vec![
                ("COLDRISE_ADDRESS", format!("{}/{}", point.machine, point.point)),
                ("COLDRISE_MACHINE", point.machine.to_string()),
                ("COLDRISE_POINT", point.point.to_string()),
            ];
            if let Some(forward) = forward {
                environment.push(("COLDRISE_HOST", "127.0.0.1".to_owned()));
                environment.push(("COLDRISE_PORT", forward.host_port.to_string()));
            }
            OwnCheck { text: text.clone(), environment }
        });
        Ok(Goal {
            until: self.until()?,
            time_limit: self.judge.time_limit,
            forward,
            own_check,
            firmware: hardware.firmware,
            has_kvm: qemu.without_kvm().is_none(),
        })
    }
}

/// The host that runs the machines: this one, or a host of the repository.
///
/// # Errors
/// `NotFound` if there is no such host; errors of the connection.
pub(crate) fn qemu_host(repository: &Arc<Repository>, on: Option<&str>) -> Result<QemuHost> {
    let name = on.map(parse_host_name).transpose()?;
    QemuHost::of(host_of(repository, name.as_ref())?)
}

/// Prints a stage that a machine has reached. `label` is its point, where several boot at once.
pub(crate) fn print_stage(invocation: &Invocation, label: Option<&str>, reached: &Reached) {
    let after = show_duration(Duration::from_millis(reached.after_ms));
    let stage = reached.stage.word();
    let shown = label.map_or_else(String::new, |label| format!("{label}: "));
    invocation.remark(&format!("{shown}{stage:<9} after {after}: {}", reached.evidence));
    if invocation.is_json() {
        let event = json!({
            "event": "progress", "phase": "booting", "point": label, "rung": stage,
            "after_ms": reached.after_ms,
        });
        print_line(&event.to_string());
    }
}
