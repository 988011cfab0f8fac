//! The result of a copy and its steps, which also travel over a line.

use coldrise_block::Error;
use coldrise_block::{NoProgress, Progress};
use coldrise_store::{MachineName, PointName};
use serde::{Deserialize, Serialize};

use super::Traffic;
use super::messages::error_on_its_way;

/// The result.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct CopySummary {
    /// The machines, in the order of their names.
    pub machines: Vec<MachineCopy>,
}

/// The result for one machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineCopy {
    /// The machine.
    pub machine: MachineName,
    /// Its name there.
    pub far_machine: MachineName,
    /// The copied points, oldest first.
    pub copied: Vec<CopiedPoint>,
    /// The number of points that were there before.
    pub there: usize,
    /// Points that are not there and were not copied, because a younger one is there or enough were copied.
    pub passed_over: Vec<PointName>,
    /// Points in quarantine, which are not copied.
    pub quarantined: Vec<PointName>,
    /// The bytes sent for it over a line, its points that were not finished included.
    pub traffic: Traffic,
    /// Why the rest was not copied.
    #[serde(with = "error_on_its_way")]
    pub error: Option<Error>,
}

impl MachineCopy {
    /// Nothing was copied yet.
    pub(crate) fn new(machine: MachineName, far_machine: MachineName) -> MachineCopy {
        let (copied, there, passed_over, quarantined, traffic, error) = Default::default();
        MachineCopy {
            machine,
            far_machine,
            copied,
            there,
            passed_over,
            quarantined,
            traffic,
            error,
        }
    }

    /// The same once more.
    pub(crate) fn again(&self) -> MachineCopy {
        let error = self.error.as_ref();
        MachineCopy {
            machine: self.machine.clone(),
            far_machine: self.far_machine.clone(),
            copied: self.copied.clone(),
            there: self.there,
            passed_over: self.passed_over.clone(),
            quarantined: self.quarantined.clone(),
            traffic: self.traffic,
            error: error.map(|error| Error::new(error.kind(), error.full_message())),
        }
    }
}

/// A step of a copy.
#[derive(Debug)]
pub enum CopyStep<'a> {
    /// Each machine and its name there, before any is copied.
    Machines(&'a [(MachineName, MachineName)]),
    /// A point of a machine is there.
    Point {
        /// The machine.
        machine: &'a MachineName,
        /// The point.
        point: &'a CopiedPoint,
    },
    /// Nothing more is done for a machine.
    Machine(&'a MachineCopy),
}

/// Receives the progress within disks, and the steps.
pub trait CopyProgress: Progress {
    /// The copy has come so far.
    fn reached(&self, _step: &CopyStep<'_>) {}
}

impl CopyProgress for NoProgress {}

/// One copied point.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CopiedPoint {
    /// The point.
    pub point: PointName,
    /// The point with which it was compared; `None`: it was read completely.
    pub base: Option<PointName>,
    /// The sum of the sizes of its disks.
    pub size_bytes: u64,
    /// Bytes read here.
    pub read_bytes: u64,
    /// Bytes stored there, compressed.
    pub stored_bytes: u64,
    /// The time that it took.
    pub elapsed_ms: u64,
}
