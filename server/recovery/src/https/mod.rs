//! Clients of HTTPS servers: whose certificates they believe, and their time limits.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A client that follows no redirects and returns answers of any status.
///
/// It believes `certificate` (a file in PEM format: the server's own, or its authority's), or the authorities of this
/// system. A request may take `timeout`. `option` names the option for people.
///
/// # Errors
/// Errors of reading the file; `InvalidInput` if it is no certificate; `Unsupported` if this system trusts none.
pub fn agent(certificate: Option<&Path>, option: &str, timeout: Duration) -> Result<ureq::Agent> {
    let roots = match certificate {
        Some(path) => trusted_file(path)?,
        None => system_roots(option)?,
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .unversioned_rustls_crypto_provider(provider)
        .build();
    let config = ureq::Agent::config_builder()
        .tls_config(tls)
        .https_only(true)
        .max_redirects(0)
        .http_status_as_error(false)
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_global(Some(timeout))
        .build();
    Ok(config.new_agent())
}

fn trusted_file(path: &Path) -> Result<Vec<Certificate<'static>>> {
    let text = std::fs::read(path).context(|| format!("reading {}", path.display()))?;
    let certificate = Certificate::from_pem(&text).map_err(|error| {
        let text = format!("{} is no certificate in PEM format: {error}", path.display());
        Error::new(ErrorKind::InvalidInput, text)
    })?;
    Ok(vec![certificate.to_owned()])
}

fn system_roots(option: &str) -> Result<Vec<Certificate<'static>>> {
    let found = rustls_native_certs::load_native_certs().certs;
    if found.is_empty() {
        let advice =
            format!("install ca-certificates, or name the server's certificate with {option} FILE");
        let text = "this system trusts no certificates";
        return Err(Error::new(ErrorKind::Unsupported, text).advise(advice));
    }
    Ok(found.iter().map(|der| Certificate::from_der(der).to_owned()).collect())
}
