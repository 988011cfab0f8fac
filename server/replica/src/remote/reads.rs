//! Reads of the announced point out of turn: a machine boots at the remote side before its copy has ended.
//!
//! Some threads answer, beside those of the copy, on the line's fetch class. They read the same disks as the copy,
//! which holds them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coldrise_block::{Disk, Result};
use coldrise_line::{Class, Frame, Line, Received};
use parking_lot::Mutex;

use super::messages::{DATA, READ, READ_CONTENT, READ_DAMAGED, READ_GONE, ReadAsk, broken};

/// Interval of looking whether the line is closed.
const INTERVAL: Duration = Duration::from_millis(200);
/// Level of zstd: an answer is waited for.
const LEVEL: i32 = 3;

/// The disks that may be read.
#[derive(Default)]
pub(super) struct Reads {
    served: Mutex<Option<Served>>,
    is_over: AtomicBool,
}

struct Served {
    number: u32,
    disks: Vec<Arc<dyn Disk>>,
}

/// Ends the reading of a point when it is dropped.
pub(super) struct ServedReads {
    reads: Arc<Reads>,
    number: u32,
}

impl Reads {
    /// Lets the other side read these disks until the result is dropped.
    pub(super) fn serve(self: &Arc<Self>, number: u32, disks: Vec<Arc<dyn Disk>>) -> ServedReads {
        *self.served.lock() = Some(Served { number, disks });
        ServedReads { reads: Arc::clone(self), number }
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// One of the threads.
    pub(super) fn answer_until_end(&self, line: &dyn Line) {
        while !self.is_over.load(Ordering::Relaxed) {
            let answered = match line.receive(&[Class::Fetch], INTERVAL) {
                Ok(Received::Frame { frame, .. }) => self.answer(line, &frame),
                Ok(Received::Nothing) => Ok(()),
                // The copy's own threads tell it.
                Ok(Received::Closed) | Err(_) => return,
            };
            if let Err(error) = answered {
                tracing::warn!("reads of the other site end: {}", error.full_message());
                line.close();
                return;
            }
        }
    }

    fn disk(&self, ask: ReadAsk) -> Option<Arc<dyn Disk>> {
        let served = self.served.lock();
        let served = served.as_ref().filter(|served| served.number == ask.number)?;
        served.disks.get(usize::from(ask.disk)).cloned()
    }

    fn answer(&self, line: &dyn Line, frame: &Frame) -> Result<()> {
        if frame.kind != READ {
            return Err(broken("an unknown frame"));
        }
        let ask = ReadAsk::decode(&frame.body)?;
        let mut body = ask.id.to_le_bytes().to_vec();
        match self.disk(ask).map(|disk| read(&*disk, ask)) {
            None => body.push(READ_GONE),
            Some(Ok(packed)) => {
                body.push(READ_CONTENT);
                body.extend_from_slice(&packed);
            }
            Some(Err(error)) => {
                body.push(READ_DAMAGED);
                body.extend_from_slice(error.full_message().as_bytes());
            }
        }
        line.send(Class::Fetch, Frame { stream: 0, kind: DATA, body })
    }
}

fn read(disk: &dyn Disk, ask: ReadAsk) -> Result<Vec<u8>> {
    let mut content = vec![0; ask.length_bytes as usize];
    disk.read_at(&mut content, ask.offset_bytes)?;
    zstd::bulk::compress(&content, LEVEL).map_err(|error| {
        coldrise_block::Error::with_source(
            coldrise_block::ErrorKind::Internal,
            "compressing",
            error,
        )
    })
}

impl Drop for ServedReads {
    fn drop(&mut self) {
        let mut served = self.reads.served.lock();
        if served.as_ref().is_some_and(|served| served.number == self.number) {
            *served = None;
        }
    }
}
