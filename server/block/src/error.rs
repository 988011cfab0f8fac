//! The only public error type: a small kind, a context for people, a source.
//!
//! The kind decides the machine-readable answer (the errno in the data path); the context is the
//! text for people. Layers above have answers of their own for kinds: `coldrise_runs::exit_code`.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;

/// The class of an error, for callers that react to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The caller passed something malformed: a bad name, size or flag.
    InvalidInput,
    /// A range leaves the disk.
    OutOfRange,
    /// The named machine, point, disk, session or file does not exist.
    NotFound,
    /// The name is taken.
    AlreadyExists,
    /// The folder is not empty.
    NotEmpty,
    /// The address is not a folder, and a folder is required.
    NotAFolder,
    /// The address is a folder, and a file is required.
    IsAFolder,
    /// A name exceeds the maximum length.
    NameTooLong,
    /// There is no repository at this path.
    NoRepository,
    /// The passphrase does not open the repository, or none was given.
    WrongPassphrase,
    /// Another process holds the repository or the session for writing.
    Busy,
    /// A request that must not wait would have to wait.
    WouldWait,
    /// A write to a restore point or another read-only disk.
    ReadOnly,
    /// The other side does not know who asks.
    Unauthorized,
    /// The other side knows who asks, and does not allow it.
    Forbidden,
    /// Stored bytes are missing or fail authentication.
    Corrupt,
    /// There is no space left to store bytes.
    NoSpace,
    /// The operating system refused a read, write or sync.
    Io,
    /// An earlier sync failed: the session refuses writes until it is reopened.
    Poisoned,
    /// The feature, format or version is not supported.
    Unsupported,
    /// A required program is missing or failed.
    ToolFailed,
    /// The user cancelled.
    Interrupted,
    /// The work ended early; running it again continues it.
    Incomplete,
    /// A defect in Coldrise itself.
    Internal,
}

impl ErrorKind {
    /// Every kind.
    pub const ALL: [ErrorKind; 24] = [
        ErrorKind::InvalidInput,
        ErrorKind::OutOfRange,
        ErrorKind::NotFound,
        ErrorKind::AlreadyExists,
        ErrorKind::NotEmpty,
        ErrorKind::NotAFolder,
        ErrorKind::IsAFolder,
        ErrorKind::NameTooLong,
        ErrorKind::NoRepository,
        ErrorKind::WrongPassphrase,
        ErrorKind::Busy,
        ErrorKind::WouldWait,
        ErrorKind::ReadOnly,
        ErrorKind::Unauthorized,
        ErrorKind::Forbidden,
        ErrorKind::Corrupt,
        ErrorKind::NoSpace,
        ErrorKind::Io,
        ErrorKind::Poisoned,
        ErrorKind::Unsupported,
        ErrorKind::ToolFailed,
        ErrorKind::Interrupted,
        ErrorKind::Incomplete,
        ErrorKind::Internal,
    ];

    /// The errno for a client of a front end. The whole table is here.
    pub fn errno(self) -> i32 {
        match self {
            ErrorKind::InvalidInput | ErrorKind::OutOfRange => libc::EINVAL,
            ErrorKind::NotFound | ErrorKind::NoRepository => libc::ENOENT,
            ErrorKind::AlreadyExists => libc::EEXIST,
            ErrorKind::NotEmpty => libc::ENOTEMPTY,
            ErrorKind::NotAFolder => libc::ENOTDIR,
            ErrorKind::IsAFolder => libc::EISDIR,
            ErrorKind::NameTooLong => libc::ENAMETOOLONG,
            ErrorKind::WrongPassphrase | ErrorKind::Unauthorized | ErrorKind::Forbidden => {
                libc::EACCES
            }
            ErrorKind::Busy => libc::EBUSY,
            ErrorKind::WouldWait => libc::EAGAIN,
            ErrorKind::ReadOnly => libc::EROFS,
            ErrorKind::NoSpace => libc::ENOSPC,
            ErrorKind::Unsupported => libc::EOPNOTSUPP,
            ErrorKind::Interrupted => libc::EINTR,
            ErrorKind::Corrupt
            | ErrorKind::Io
            | ErrorKind::Poisoned
            | ErrorKind::ToolFailed
            | ErrorKind::Incomplete
            | ErrorKind::Internal => libc::EIO,
        }
    }

    /// The kind for a word of [`ErrorKind::word`], for errors that cross a socket.
    pub fn from_word(word: &str) -> Option<ErrorKind> {
        ErrorKind::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// A short, stable word for `--json`.
    pub fn word(self) -> &'static str {
        match self {
            ErrorKind::InvalidInput => "invalid_input",
            ErrorKind::OutOfRange => "out_of_range",
            ErrorKind::NotFound => "not_found",
            ErrorKind::AlreadyExists => "already_exists",
            ErrorKind::NotEmpty => "not_empty",
            ErrorKind::NotAFolder => "not_a_folder",
            ErrorKind::IsAFolder => "is_a_folder",
            ErrorKind::NameTooLong => "name_too_long",
            ErrorKind::NoRepository => "no_repository",
            ErrorKind::WrongPassphrase => "wrong_passphrase",
            ErrorKind::Busy => "busy",
            ErrorKind::WouldWait => "would_wait",
            ErrorKind::ReadOnly => "read_only",
            ErrorKind::Unauthorized => "unauthorized",
            ErrorKind::Forbidden => "forbidden",
            ErrorKind::Corrupt => "corrupt",
            ErrorKind::NoSpace => "no_space",
            ErrorKind::Io => "io",
            ErrorKind::Poisoned => "poisoned",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::ToolFailed => "tool_failed",
            ErrorKind::Interrupted => "interrupted",
            ErrorKind::Incomplete => "incomplete",
            ErrorKind::Internal => "internal",
        }
    }
}

/// A process reached its limit of open files.
pub const OPEN_FILES_ADVICE: &str = "this process may open no more files; raise its limit \
    (ulimit -n, or LimitNOFILE= of its systemd unit) and start it again";

/// An error: its kind, a context for people (what, where), advice, and its source, which `Display`
/// does not repeat.
pub struct Error {
    kind: ErrorKind,
    context: String,
    advice: Option<Cow<'static, str>>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result of operations that can fail with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error without a source.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Error { kind, context: context.into(), advice: None, source: None }
    }

    /// An error with a source.
    pub fn with_source(
        kind: ErrorKind,
        context: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Error { kind, context: context.into(), advice: None, source: Some(source.into()) }
    }

    /// An error of the operating system; its errno determines the kind (full
    /// disk, missing file, other).
    pub fn io(context: impl Into<String>, source: std::io::Error) -> Self {
        let kind = match source.raw_os_error() {
            Some(libc::ENOSPC) | Some(libc::EDQUOT) => ErrorKind::NoSpace,
            Some(libc::ENOENT) => ErrorKind::NotFound,
            Some(libc::EEXIST) => ErrorKind::AlreadyExists,
            Some(libc::EROFS) => ErrorKind::ReadOnly,
            _ => ErrorKind::Io,
        };
        let advice = match source.raw_os_error() {
            Some(libc::EMFILE) => Some(OPEN_FILES_ADVICE),
            Some(libc::ENFILE) => Some("this machine has too many files open (sysctl fs.file-max)"),
            _ => None,
        };
        let error = Error::with_source(kind, context, source);
        advice.into_iter().fold(error, Error::advise)
    }

    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The same error with another kind, for a caller that knows what it means.
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// Prepends the caller's context: `outer: inner`. Keeps the kind.
    pub fn context(mut self, outer: impl fmt::Display) -> Self {
        self.context = format!("{outer}: {}", self.context);
        self
    }

    /// Adds advice unless the error already has some: the code closest to the fault knows best.
    pub fn advise(mut self, advice: impl Into<Cow<'static, str>>) -> Self {
        self.advice.get_or_insert_with(|| advice.into());
        self
    }

    /// Whether the error has advice.
    pub fn is_advised(&self) -> bool {
        self.advice.is_some()
    }

    /// The message with every source and the advice, for a log or a terminal.
    pub fn full_message(&self) -> String {
        match &self.advice {
            Some(advice) => format!("{}: {advice}", self.message()),
            None => self.message(),
        }
    }

    /// The message with every source, for callers that give their own advice.
    pub fn message(&self) -> String {
        let mut text = self.context.clone();
        let mut below = std::error::Error::source(self);
        while let Some(error) = below {
            text.push_str(": ");
            text.push_str(&error.to_string());
            below = error.source();
        }
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.full_message())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|e| e as &(dyn std::error::Error + 'static))
    }
}

/// The message of a panic caught at a boundary where a kernel or a server calls Coldrise.
#[cold]
pub fn defect(panic: Box<dyn Any + Send>) -> String {
    let what = match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text.as_str(),
        _ => "no message",
    };
    let message = format!("a defect inside Coldrise: {what}");
    // Dropping the payload may panic again, outside any guard.
    std::mem::forget(panic);
    message
}

/// Adds the caller's context to an error.
pub trait Context<T> {
    /// Prepends `outer` to the message.
    fn context<C: fmt::Display>(self, outer: impl FnOnce() -> C) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context<C: fmt::Display>(self, outer: impl FnOnce() -> C) -> Result<T> {
        self.map_err(|error| error.context(outer()))
    }
}

impl<T> Context<T> for std::io::Result<T> {
    fn context<C: fmt::Display>(self, outer: impl FnOnce() -> C) -> Result<T> {
        self.map_err(|error| Error::io(outer().to_string(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_open_file_limit_error_advises_ulimit() {
        let refused = std::io::Error::from_raw_os_error(libc::EMFILE);
        let message = Error::io("opening the layer L", refused).full_message();
        assert!(message.starts_with("opening the layer L: Too many open files (os error 24): "));
        assert!(message.contains("ulimit -n") && message.ends_with("start it again"), "{message}");
    }

    const TABLE: [(ErrorKind, i32); 24] = [
        (ErrorKind::InvalidInput, libc::EINVAL),
        (ErrorKind::OutOfRange, libc::EINVAL),
        (ErrorKind::NotFound, libc::ENOENT),
        (ErrorKind::AlreadyExists, libc::EEXIST),
        (ErrorKind::NotEmpty, libc::ENOTEMPTY),
        (ErrorKind::NotAFolder, libc::ENOTDIR),
        (ErrorKind::IsAFolder, libc::EISDIR),
        (ErrorKind::NameTooLong, libc::ENAMETOOLONG),
        (ErrorKind::NoRepository, libc::ENOENT),
        (ErrorKind::WrongPassphrase, libc::EACCES),
        (ErrorKind::Busy, libc::EBUSY),
        (ErrorKind::WouldWait, libc::EAGAIN),
        (ErrorKind::ReadOnly, libc::EROFS),
        (ErrorKind::Unauthorized, libc::EACCES),
        (ErrorKind::Forbidden, libc::EACCES),
        (ErrorKind::Corrupt, libc::EIO),
        (ErrorKind::NoSpace, libc::ENOSPC),
        (ErrorKind::Io, libc::EIO),
        (ErrorKind::Poisoned, libc::EIO),
        (ErrorKind::Unsupported, libc::EOPNOTSUPP),
        (ErrorKind::ToolFailed, libc::EIO),
        (ErrorKind::Interrupted, libc::EINTR),
        (ErrorKind::Incomplete, libc::EIO),
        (ErrorKind::Internal, libc::EIO),
    ];

    #[test]
    fn every_kind_has_its_errno() {
        for (kind, errno) in TABLE {
            assert_eq!(kind.errno(), errno, "{kind:?}");
        }
    }

    #[test]
    fn every_word_names_its_kind() {
        for (kind, _) in TABLE {
            assert_eq!(ErrorKind::from_word(kind.word()), Some(kind));
        }
        assert_eq!(ErrorKind::from_word("no kind"), None);
        assert_eq!(ErrorKind::ALL.len(), TABLE.len());
    }

    #[test]
    fn the_advice_of_the_nearest_caller_comes_last() {
        let below = std::io::Error::from_raw_os_error(libc::EIO);
        let error = Error::io("reading db", below).advise("look at the drive").context("web01");
        let error = error.advise("try again");
        assert!(error.is_advised());
        assert!(error.message().starts_with("web01: reading db: "), "{error:?}");
        assert_eq!(error.full_message(), format!("{}: look at the drive", error.message()));
    }

    #[test]
    fn display_does_not_repeat_the_source() {
        let error = Error::io("writing the layer", std::io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(error.to_string(), "writing the layer");
        assert!(error.full_message().starts_with("writing the layer: "));
    }
}
