//! A channel as a stream, for bodies of answers.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::mpsc;

/// Ends when the sender is dropped.
pub(super) struct ReceiverStream<T>(pub(super) mpsc::Receiver<T>);

impl<T> futures_core::Stream for ReceiverStream<T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        self.0.poll_recv(context)
    }
}
