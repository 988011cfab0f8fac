//! Whom TLS trusts: the authorities of the host, and a file of more.

use std::path::Path;
use std::sync::Arc;

use coldrise_block::{Error, ErrorKind, Result};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// TLS 1.2 and 1.3 with aws-lc-rs. `ca_bundle`: a PEM file. Without any authority every server is
/// refused later, not here. Errors: `InvalidInput` for a bundle that cannot be read or has none.
pub(crate) fn configuration(ca_bundle: Option<&Path>) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    if let Some(path) = ca_bundle {
        let refused = |text: String| {
            let text = format!("the certificates in {} (AWS_CA_BUNDLE): {text}", path.display());
            Error::new(ErrorKind::InvalidInput, text)
        };
        let bundle = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
        let bundle: Vec<_> = bundle.map_err(|error| refused(error.to_string()))?;
        if roots.add_parsable_certificates(bundle).0 == 0 {
            return Err(refused("there is none that is valid".to_owned()));
        }
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let versions =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder =
        versions.map_err(|error| Error::with_source(ErrorKind::Internal, "TLS", error))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_without_certificates_is_refused() {
        let folder = std::env::temp_dir();
        for path in [folder.join("coldrise-no-such-file"), "/dev/null".into()] {
            let error = configuration(Some(&path)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.full_message().contains("AWS_CA_BUNDLE"), "{error:?}");
        }
        assert!(configuration(None).is_ok());
    }
}
