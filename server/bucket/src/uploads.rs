//! Packs on their way to the bucket: some at once, in threads of their own.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use coldrise_block::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use super::pack::{Pack, object_name};
use super::pack_reader::PackReader;

/// Packs that are sent at the same time.
const THREADS: usize = 4;

#[derive(Default)]
struct State {
    pending: usize,
    pending_bytes: u64,
    failed: Option<Error>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Sends packs.
pub(super) struct Uploads {
    shared: Arc<Shared>,
    sender: Option<SyncSender<Pack>>,
    threads: Vec<JoinHandle<()>>,
}

impl Uploads {
    /// `stored` is called for each pack that is in the bucket.
    pub(super) fn start(
        reader: &Arc<PackReader>,
        stored: impl Fn(&Pack) -> Result<()> + Send + Sync + 'static,
    ) -> Uploads {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        // A pack that waits costs memory.
        let (sender, receiver) = sync_channel(0);
        let (receiver, stored) = (Arc::new(Mutex::new(receiver)), Arc::new(stored));
        let thread = |_| {
            let (shared, receiver) = (Arc::clone(&shared), Arc::clone(&receiver));
            let (reader, stored) = (Arc::clone(reader), Arc::clone(&stored));
            std::thread::spawn(move || upload_all(&reader, &receiver, &shared, &*stored))
        };
        let threads = (0..THREADS).map(thread).collect();
        Uploads { shared, sender: Some(sender), threads }
    }

    /// Hands a pack over; waits until a thread takes it.
    ///
    /// # Errors
    /// The failure of an earlier one.
    pub(super) fn push(&self, pack: Pack) -> Result<()> {
        self.check()?;
        {
            let mut state = self.shared.state.lock();
            state.pending += 1;
            state.pending_bytes += pack.size_bytes;
        }
        let sent = self.sender.as_ref().is_some_and(|sender| sender.send(pack).is_ok());
        match sent {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Internal, "the threads that upload have ended")),
        }
    }

    /// Waits until all packs are in the bucket.
    ///
    /// # Errors
    /// The failure of any.
    pub(super) fn wait(&self) -> Result<()> {
        let mut state = self.shared.state.lock();
        while state.pending > 0 && state.failed.is_none() {
            self.shared.changed.wait(&mut state);
        }
        drop(state);
        self.check()
    }

    /// Bytes of packs that are on their way.
    pub(super) fn pending_bytes(&self) -> u64 {
        self.shared.state.lock().pending_bytes
    }

    fn check(&self) -> Result<()> {
        match &self.shared.state.lock().failed {
            Some(error) => Err(Error::new(error.kind(), error.full_message())),
            None => Ok(()),
        }
    }
}

fn upload_all(
    reader: &PackReader,
    receiver: &Mutex<Receiver<Pack>>,
    shared: &Shared,
    stored: &dyn Fn(&Pack) -> Result<()>,
) {
    loop {
        let received = receiver.lock().recv();
        let Ok(mut pack) = received else { return };
        let has_failed = shared.state.lock().failed.is_some();
        let content = std::mem::take(&mut pack.content);
        let done = match has_failed {
            // Then nothing is sent any more.
            true => Ok(()),
            false => {
                reader.objects.put(&object_name(pack.number), content).and_then(|()| stored(&pack))
            }
        };
        let mut state = shared.state.lock();
        state.pending -= 1;
        state.pending_bytes -= pack.size_bytes;
        if let Err(error) = done {
            state.failed.get_or_insert(error);
        }
        drop(state);
        shared.changed.notify_all();
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        drop(self.sender.take());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
