//! nfs-ganesha's configuration.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use coldrise_block::{Error, ErrorKind, Result};
use coldrise_store::PassphraseSource;

use super::client::Client;

/// The path under which clients mount the repository.
pub const PATH: &str = "/coldrise";

/// NFSv4 clients keep their opens without a sign of life for this many seconds, and a
/// restarted server waits as long for the clients that it remembers. Short, because new
/// clients wait as well.
const LEASE_S: u32 = 10;
const GRACE_S: u32 = 15;

/// The parameters of the server.
#[derive(Clone, Debug)]
pub struct NfsOptions {
    /// The address and port for NFS.
    pub listen: SocketAddr,
    /// The port of NFSv3's mount protocol.
    pub mount_port: u16,
    /// The clients that may mount.
    pub allowed: Vec<Client>,
    /// Whether NFSv3 is served.
    pub serves_v3: bool,
    /// Whether NFSv4 is served.
    pub serves_v4: bool,
    /// Idle time after which files that no client holds open are closed.
    pub idle: Duration,
    /// Memory for decoded chunks.
    pub cache_bytes: u64,
    /// Whether sessions are read-only, too.
    pub is_read_only: bool,
}

impl NfsOptions {
    /// Whether it is the server that recovered machines use: see [`super::claim`].
    pub(super) fn is_claimed(&self) -> bool {
        self.serves_v3 && !self.is_read_only
    }
}

/// The complete file.
///
/// # Errors
/// `InvalidInput` if the file cannot hold a path or a command.
pub(super) fn text(
    options: &NfsOptions,
    repository: &Path,
    passphrase: &PassphraseSource,
    plugins: &Path,
    directory: &Path,
) -> Result<String> {
    let passphrase = match passphrase {
        PassphraseSource::None => String::new(),
        PassphraseSource::File(path) => {
            let path = super::absolute(path)?;
            format!("Passphrase_File = {};", quoted_path("the passphrase file", &path)?)
        }
        PassphraseSource::Command(command) => {
            format!("Passphrase_Command = {};", quoted("the passphrase command", command)?)
        }
    };
    let versions = match (options.serves_v3, options.serves_v4) {
        (true, true) => "3, 4",
        (true, false) => "3",
        (false, _) => "4",
    };
    let access = if options.is_read_only { "RO" } else { "RW" };
    let clients: Vec<String> = options.allowed.iter().map(ToString::to_string).collect();
    Ok(format!(
        "# Written by coldrise serve nfs; it is gone when that ends.
NFS_CORE_PARAM {{
    Protocols = {versions};
    Bind_Addr = {address};
    NFS_Port = {port};
    MNT_Port = {mount_port};
    Enable_UDP = false;
    # ESXi locks with files of its own; Linux mounts NFSv3 with nolock.
    Enable_NLM = false;
    Enable_RQUOTA = false;
    # Read over DBus alone, and counted at every request.
    Enable_NFS_Stats = false;
    Plugins_Dir = {plugins};
}}
NFSV4 {{
    Minor_Versions = 0, 1;
    Lease_Lifetime = {LEASE_S};
    Grace_Period = {GRACE_S};
    RecoveryBackend = fs;
    RecoveryRoot = {directory};
    Only_Numeric_Owners = true;
}}
NFS_KRB5 {{ Active_krb5 = false; }}
LOG {{
    FORMAT {{
        EPOCH = false; HOSTNAME = false; PROGNAME = false; PID = false; THREAD_NAME = false;
        FILE_NAME = false; LINE_NUM = false; FUNCTION_NAME = false;
    }}
}}
EXPORT_DEFAULTS {{
    # The FSAL says what may be remembered, and for how long.
    Attr_Expiration_Time = 0;
}}
EXPORT {{
    Export_Id = 1;
    Path = {PATH};
    Pseudo = {PATH};
    Protocols = {versions};
    Transports = TCP;
    SecType = sys;
    Access_Type = NONE;
    CLIENT {{
        Clients = {clients};
        Access_Type = {access};
        Protocols = {versions};
        # ESXi comes as root.
        Squash = No_Root_Squash;
    }}
    FSAL {{
        Name = COLDRISE;
        Repository = {repository};
        {passphrase}
        Chunk_Cache = {cache_bytes};
        Idle_Ms = {idle_ms};
        Read_Only = {is_read_only};
        Required = true;
    }}
}}
",
        address = options.listen.ip(),
        port = options.listen.port(),
        mount_port = options.mount_port,
        plugins = quoted_path("the FSAL's folder", plugins)?,
        directory = quoted_path("a private folder", directory)?,
        clients = clients.join(", "),
        repository = quoted_path("the repository", repository)?,
        cache_bytes = options.cache_bytes,
        idle_ms = options.idle.as_millis(),
        is_read_only = options.is_read_only,
    ))
}

fn quoted_path(what: &str, path: &Path) -> Result<String> {
    match path.to_str() {
        Some(text) => quoted(what, text),
        None => Err(impossible(what, &path.display().to_string())),
    }
}

/// Between single quotes only a single quote has a meaning.
fn quoted(what: &str, text: &str) -> Result<String> {
    if text.contains(['\'', '\n', '\r', '\0']) {
        return Err(impossible(what, text));
    }
    Ok(format!("'{text}'"))
}

fn impossible(what: &str, text: &str) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!("nfs-ganesha accepts no {what} with single quotes or line breaks: {text}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_cannot_escape_their_quotes() {
        assert_eq!(quoted("it", "/srv/a \"b\"; }").unwrap(), "'/srv/a \"b\"; }'");
        for text in ["a'b", "a\nb", "a\0b"] {
            assert_eq!(quoted("it", text).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
