//! The versions of one file over the points of a machine.
//!
//! A file can change back, so every point is looked at: halving the range would miss versions.

use coldrise_block::{ErrorKind, Result};
use coldrise_files_protocol::{Entry, EntryKind};
use coldrise_store::{PointDocument, PointName};

use super::client::{Client, Received};
use super::systems::{FileSystems, choose};

/// Slots for disks in a machine.
pub const MAX_DISKS: usize = 24;
/// Points in one machine: the first answer should not take long.
const MAX_POINTS: usize = 12;

/// How many of the first points go into one machine: at least one, even if it is in quarantine.
pub fn together(points: &[PointDocument]) -> usize {
    let mut largest = 1;
    let mut count = 0;
    for point in points {
        largest = largest.max(point.disks.len());
        let most = (MAX_DISKS / largest).clamp(1, MAX_POINTS);
        if point.quarantine.is_some() || count >= most {
            break;
        }
        count += 1;
    }
    count.max(1)
}

/// What a point has under the path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// A file, a folder or a link.
    Present {
        /// What it is.
        kind: EntryKind,
        /// The length of a file in bytes, else 0.
        size_bytes: u64,
        /// The time of the last change of its content, in seconds since 1970, and nanoseconds.
        modified: (i64, u32),
    },
    /// Nothing.
    Absent,
    /// The point could not be read, for this reason.
    Unread(String),
}

impl State {
    /// The state of an entry. A change of a folder's content changes its time.
    pub fn of(entry: &Entry) -> State {
        let modified = (entry.modified_s, entry.modified_ns);
        State::Present { kind: entry.kind, size_bytes: entry.size_bytes, modified }
    }

    /// What the machine's present point has under a path, in the file system of that name (or of the
    /// system).
    ///
    /// # Errors
    /// `InvalidInput` if the file system must be named; those after which the machine cannot be used.
    pub fn read(
        client: &mut Client<'_>,
        systems: &FileSystems,
        system: Option<&str>,
        path: &[u8],
    ) -> Result<State> {
        let device = match choose(client, systems, system) {
            Ok(device) => device,
            Err(error) => {
                return match error.kind() {
                    ErrorKind::NotFound => Ok(State::Absent),
                    ErrorKind::Unsupported => Ok(State::Unread(error.full_message())),
                    _ => Err(error),
                };
            }
        };
        let mut state = State::Absent;
        let listed = client.list(device, path, |received| {
            if let Received::Entry(entry) = received {
                if entry.path.is_empty() {
                    state = State::of(entry);
                }
            }
            Ok(())
        });
        match listed {
            Ok(()) => Ok(state),
            Err(error) => match error.kind() {
                // Nothing, or something else than a folder on the way.
                ErrorKind::NotFound | ErrorKind::InvalidInput => Ok(State::Absent),
                ErrorKind::Unsupported | ErrorKind::Io => Ok(State::Unread(error.full_message())),
                _ => Err(error),
            },
        }
    }
}

/// The same state in neighbouring points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The state.
    pub state: State,
    /// The oldest point.
    pub first: PointName,
    /// The newest point.
    pub last: PointName,
    /// The number of points.
    pub points: u64,
}

/// Collects versions while the points are looked at, the newest first.
#[derive(Debug, Default)]
pub struct History {
    current: Option<Version>,
}

impl History {
    /// Adds the next older point. Returns the version that is complete now.
    pub fn add(&mut self, point: &PointName, state: State) -> Option<Version> {
        if let Some(current) = self.current.as_mut().filter(|current| current.state == state) {
            current.first = point.clone();
            current.points += 1;
            return None;
        }
        let next = Version { state, first: point.clone(), last: point.clone(), points: 1 };
        self.current.replace(next)
    }

    /// The oldest version.
    pub fn finish(self) -> Option<Version> {
        self.current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_changes_back_has_three_versions() {
        let point = |hour| PointName::parse(&format!("20261120T{hour:02}0000Z")).unwrap();
        let state =
            |size_bytes| State::Present { kind: EntryKind::File, size_bytes, modified: (0, 0) };
        let states = [state(1), state(1), state(2), state(1), State::Absent, State::Absent];
        let (mut history, mut versions) = (History::default(), Vec::new());
        for (hour, state) in states.into_iter().enumerate() {
            versions.extend(history.add(&point(20 - hour), state));
        }
        versions.extend(history.finish());
        let spans: Vec<_> = versions
            .iter()
            .map(|version| (version.first.to_string(), version.last.to_string(), version.points))
            .collect();
        let name = |hour| point(hour).to_string();
        assert_eq!(
            spans,
            [
                (name(19), name(20), 2),
                (name(18), name(18), 1),
                (name(17), name(17), 1),
                (name(15), name(16), 2)
            ]
        );
    }
}
