//! A thread that repeats a task at an interval.

use std::io;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A running thread. Dropping it waits for the thread's end.
pub struct PeriodicThread {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Stop {
    is_asked: Mutex<bool>,
    wake: Condvar,
}

impl PeriodicThread {
    /// Starts a thread with this name. It calls `turn` after each `interval`, until `turn`
    /// breaks.
    pub fn start(
        name: &str,
        interval: Duration,
        mut turn: impl FnMut() -> ControlFlow<()> + Send + 'static,
    ) -> io::Result<PeriodicThread> {
        let stop = Arc::new(Stop::default());
        let asked = Arc::clone(&stop);
        let run = move || while !asked.waits(interval) && turn().is_continue() {};
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(PeriodicThread { stop, thread: Some(thread) })
    }
}

impl Stop {
    /// Waits for the interval; returns whether the thread must end.
    fn waits(&self, interval: Duration) -> bool {
        let is_asked = self.is_asked.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.wake.wait_timeout_while(is_asked, interval, |is_asked| !*is_asked);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Drop for PeriodicThread {
    fn drop(&mut self) {
        *self.stop.is_asked.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.wake.notify_all();
        // The thread itself may drop this, if it held the last reference to the owner.
        if let Some(thread) = self.thread.take() {
            if thread.thread().id() != std::thread::current().id() {
                // A panic of the thread was reported on stderr.
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    #[test]
    fn a_periodic_thread_runs_until_it_breaks_or_is_dropped() {
        let (sender, turns) = channel();
        let mut left = 3;
        let breaking = PeriodicThread::start("test", Duration::from_millis(1), move || {
            left -= 1;
            let _ = sender.send(left);
            if left > 0 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        // The sender is dropped with the thread.
        assert_eq!(turns.iter().collect::<Vec<_>>(), [2, 1, 0]);
        drop(breaking);

        let start = Instant::now();
        let turn = || panic!("an hour has not passed");
        drop(PeriodicThread::start("test", Duration::from_secs(3600), turn).unwrap());
        assert!(start.elapsed() < Duration::from_secs(60), "a drop wakes it");
    }
}
