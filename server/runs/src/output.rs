//! Bounds the file `output` of a detached run: what its process, and the servers that it starts, print.
//!
//! They write to the file themselves, so a full file is not noticed in a write. A thread looks at its
//! size. A file that is too long keeps its beginning; `output.1` keeps its last end. What is printed
//! between a look and the cut is lost.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use coldrise_block::{PeriodicThread, create_private};

use crate::run_files::RunFiles;

const INTERVAL: Duration = Duration::from_secs(1);
/// Size above which the file is cut, and that of each part that is kept, in bytes.
const MAX_BYTES: u64 = 4 << 20;
const KEPT_BYTES: u64 = 1 << 20;

/// Looks at the output of a run until the result is dropped. `None` if there is no such file.
pub(crate) fn bound(run: &Path) -> Option<PeriodicThread> {
    let files = RunFiles::open(run).ok()?;
    // Both, so that no other file is ever cut: a link is not followed.
    let (reading, writing) = (files.file("output").ok()?, files.append_to("output").ok()?);
    let end = run.join("output.1");
    let turn = move || {
        // A full drive: the next look tries again.
        let _ = cut(&reading, &writing, &end);
        ControlFlow::Continue(())
    };
    PeriodicThread::start("run output", INTERVAL, turn).ok()
}

fn cut(mut reading: &File, writing: &File, end: &Path) -> std::io::Result<()> {
    let length = reading.metadata()?.len();
    if length <= MAX_BYTES {
        return Ok(());
    }
    reading.seek(SeekFrom::Start(length - KEPT_BYTES))?;
    let kept = create_private(end)
        .and_then(|mut end| std::io::copy(&mut reading.take(KEPT_BYTES), &mut end));
    // Also if the end could not be kept: on a full drive this makes room.
    writing.set_len(KEPT_BYTES)?;
    kept.map(drop)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_long_output_keeps_its_beginning_and_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("output");
        let mut output = File::options().append(true).create(true).open(&path).unwrap();
        output.write_all(b"first line\n").unwrap();
        let cut = || {
            let end = folder.path().join("output.1");
            super::cut(&File::open(&path).unwrap(), &output, &end).unwrap();
        };
        cut();
        assert_eq!(std::fs::read(&path).unwrap(), b"first line\n");
        (&output).write_all(&vec![b'x'; MAX_BYTES as usize]).unwrap();
        (&output).write_all(b"last line\n").unwrap();
        cut();
        let kept = std::fs::read(&path).unwrap();
        assert!(kept.starts_with(b"first line\n") && kept.len() as u64 == KEPT_BYTES);
        let end = std::fs::read(folder.path().join("output.1")).unwrap();
        assert!(end.ends_with(b"last line\n") && end.len() as u64 == KEPT_BYTES);
        // The process continues behind the cut.
        (&output).write_all(b"more").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), KEPT_BYTES + 4);
    }

    #[test]
    fn a_link_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("other");
        std::fs::write(&other, "x").unwrap();
        assert!(bound(folder.path()).is_none());
        assert!(!folder.path().join("output").exists());
        std::os::unix::fs::symlink(&other, folder.path().join("output")).unwrap();
        assert!(bound(folder.path()).is_none());
    }
}
