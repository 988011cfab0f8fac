//! Clients of HTTPS servers: whose certificates they believe, and their time limits.
#![forbid(unsafe_code)]

mod connector;
mod thumbprint;
mod verifier;

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result, read_at_most};
use rustix::fs::OFlags;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{ConnectProxyConnector, Connector, TcpConnector};

use connector::TlsConnector;
pub use thumbprint::Thumbprint;
use verifier::Verifier;

/// Maximum size of a file with certificates, in bytes. All authorities of a system need a quarter.
const MAX_CERTIFICATES_BYTES: u64 = 1 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Which certificates of servers are believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Those of the authorities of this system.
    System,
    /// Those in a file in PEM format: the server's own, or its authority's.
    File(PathBuf),
    /// Exactly the server's own certificate with this thumbprint, whatever its names and dates are.
    Thumbprint(Thumbprint),
}

/// A client that follows no redirects and returns answers of any status.
///
/// A request may take `timeout`. `option` names the option for certificates, for people.
///
/// # Errors
/// Errors of reading the file; `InvalidInput` if it is not a certificate; `Unsupported` if this system trusts none.
pub fn agent(trust: &Trust, option: &str, timeout: Duration) -> Result<ureq::Agent> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = match trust {
        Trust::System => Verifier::of_roots(system_roots(option)?, &provider)?,
        Trust::File(path) => Verifier::of_roots(trusted_file(path)?, &provider)?,
        Trust::Thumbprint(thumbprint) => Verifier::of_thumbprint(*thumbprint, &provider),
    };
    let tls = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::with_source(ErrorKind::Internal, "versions of TLS", error))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    let config = ureq::Agent::config_builder()
        .https_only(true)
        .max_redirects(0)
        .http_status_as_error(false)
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_global(Some(timeout))
        .build();
    let connector =
        ().chain(ConnectProxyConnector::default())
            .chain(TcpConnector::default())
            .chain(TlsConnector::new(Arc::new(tls)));
    Ok(ureq::Agent::with_parts(config, connector, DefaultResolver::default()))
}

fn store(certificates: Vec<CertificateDer<'static>>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates);
    roots
}

/// Checks that a file has certificates.
///
/// # Errors
/// `InvalidInput` if it is not a regular file, has none or is too large; errors of the operating system.
pub fn check_certificate_file(path: &Path) -> Result<()> {
    trusted_file(path).map(drop)
}

fn trusted_file(path: &Path) -> Result<RootCertStore> {
    let what = || format!("reading {}", path.display());
    // A named pipe without a writer would block.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = std::fs::File::options().read(true).custom_flags(flags).open(path).context(what)?;
    if !file.metadata().context(what)?.is_file() {
        let text = format!("{} is not a regular file", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let text = read_at_most(file, path, MAX_CERTIFICATES_BYTES)?;
    let found = CertificateDer::pem_slice_iter(&text).collect::<std::result::Result<Vec<_>, _>>();
    let roots = store(found.unwrap_or_default());
    if roots.is_empty() {
        let text = format!("{} is not a certificate in PEM format", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(roots)
}

fn system_roots(option: &str) -> Result<RootCertStore> {
    let roots = store(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        let advice =
            format!("install ca-certificates, or name the server's certificate with {option} FILE");
        let text = "this system trusts no certificates";
        return Err(Error::new(ErrorKind::Unsupported, text).advise(advice));
    }
    Ok(roots)
}
