//! Reading an object, or a part of one: an attempt continues where the one before broke off.

use std::ops::Range;
use std::pin::Pin;

use coldrise_block::ErrorKind;
use futures_core::Stream;
use object_store::aws::AmazonS3;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, ObjectStore};

use crate::attempts::Ended;
use crate::exchange::current;
use crate::failure::Call;

/// A fetch, with the bytes so far.
pub(crate) struct Fetch<'a> {
    store: &'a AmazonS3,
    call: &'a Call<'a>,
    path: Path,
    /// The part that is asked for; without it all.
    part: Option<Range<u64>>,
    most_bytes: u64,
    begun: Option<Begun>,
    content: Vec<u8>,
}

/// The object whose content came.
struct Begun {
    /// The server's mark of its content.
    e_tag: Option<String>,
    /// Where its content comes from, and goes to.
    range: Range<u64>,
}

impl<'a> Fetch<'a> {
    /// One that has nothing yet, and will have at most `most_bytes`.
    pub(crate) fn new(
        store: &'a AmazonS3,
        call: &'a Call<'a>,
        path: Path,
        part: Option<Range<u64>>,
        most_bytes: u64,
    ) -> Self {
        Fetch { store, call, path, part, most_bytes, begun: None, content: Vec::new() }
    }

    /// The bytes so far.
    pub(crate) fn into_content(self) -> Vec<u8> {
        self.content
    }

    /// Reads all that is not here yet.
    pub(crate) async fn attempt(&mut self) -> Result<(), Ended> {
        let mut answer = self.ask().await;
        if self.begun.is_some() && self.is_of_another(&answer) {
            (self.begun, self.content) = (None, Vec::new());
            answer = self.ask().await;
        }
        let answer = answer?;
        let begun = self.begun.get_or_insert_with(|| Begun {
            e_tag: answer.meta.e_tag.clone(),
            range: answer.range.clone(),
        });
        let expected = begun.range.end.saturating_sub(begun.range.start);
        if expected > self.most_bytes {
            let most = self.most_bytes;
            return Err(self.lasting(
                ErrorKind::Corrupt,
                format!("it has {expected} bytes or more, and at most {most} were expected"),
            ));
        }
        self.content.reserve_exact(
            usize::try_from(expected).unwrap_or(0).saturating_sub(self.content.len()),
        );
        let mut stream = answer.into_stream();
        loop {
            let next =
                std::future::poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await;
            match next.transpose()? {
                Some(bytes) => self.content.extend_from_slice(&bytes),
                None if self.content.len() as u64 == expected => return Ok(()),
                None => {
                    let text = format!("{} bytes came of {expected}", self.content.len());
                    return Err(self.lasting(ErrorKind::Io, text));
                }
            }
        }
    }

    async fn ask(&self) -> object_store::Result<GetResult> {
        let come = self.content.len() as u64;
        let options = match &self.begun {
            // Without an ETag it is unknown whether the rest is of the same content.
            Some(Begun { e_tag: Some(_), range }) if come > 0 => GetOptions {
                range: Some(GetRange::Bounded(range.start + come..range.end)),
                ..GetOptions::default()
            },
            _ => GetOptions {
                range: self.part.clone().map(GetRange::Bounded),
                ..GetOptions::default()
            },
        };
        self.store.get_opts(&self.path, options).await
    }

    /// Whether the object was replaced meanwhile, the answer begins elsewhere than it should, or the
    /// rest is refused: then it may not be there any more. The request has no If-Match, which not
    /// all stores know: the mark in the answer says the same.
    fn is_of_another(&self, answer: &object_store::Result<GetResult>) -> bool {
        let Some(begun) = &self.begun else { return false };
        match answer {
            Ok(answer) => {
                let at = begun.range.start + self.content.len() as u64;
                answer.meta.e_tag != begun.e_tag || answer.range != (at..begun.range.end)
            }
            Err(_) => current().is_some_and(|exchange| exchange.is_refused()),
        }
    }

    fn lasting(&self, kind: ErrorKind, text: String) -> Ended {
        Ended::Lasting(self.call.error(kind, text))
    }
}
