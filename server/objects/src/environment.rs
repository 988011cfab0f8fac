//! Settings from the environment: credentials, region, endpoint, certificates.

use coldrise_block::{Error, ErrorKind, Result};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};

use crate::address::Address;

/// A file of certificates that are trusted beside those of the host, as Amazon's own programs read it.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";

/// Settings of a store, from the environment and the arguments.
pub(crate) struct Environment {
    /// Without the HTTP client.
    pub(crate) builder: AmazonS3Builder,
    /// A PEM file.
    pub(crate) ca_bundle: Option<String>,
    /// For messages: what is asked.
    pub(crate) endpoint: String,
}

/// Reads `variables`, names and values; an empty value counts as none. Errors: `InvalidInput`,
/// `Unauthorized`.
pub(crate) fn read(
    address: &Address,
    endpoint: Option<&str>,
    variables: impl Iterator<Item = (String, String)>,
) -> Result<Environment> {
    let mut builder = AmazonS3Builder::new();
    let mut ca_bundle = None;
    for (name, value) in variables.filter(|(_, value)| !value.is_empty()) {
        if name == CA_BUNDLE {
            ca_bundle = Some(value);
        } else if name.starts_with("AWS_") {
            // As object_store's own `from_env`.
            if let Ok(key) = name.to_ascii_lowercase().parse::<Key>() {
                builder = builder.with_config(key, value);
            }
        }
    }
    check_credentials(&builder, address)?;
    if let Some(endpoint) = endpoint {
        builder = builder.with_config(Key::S3Endpoint, endpoint);
    }
    let given = [Key::S3Endpoint, Key::Endpoint];
    let given = given.iter().find_map(|key| builder.get_config_value(key));
    if let Some(endpoint) = &given {
        check_endpoint(endpoint)?;
    }
    let is_plain = given.as_deref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    let builder = builder
        .with_bucket_name(&address.bucket)
        .with_client_options(ClientOptions::new().with_allow_http(is_plain))
        .with_disable_bulk_delete(true)
        .with_retry(RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: 0,
            retry_timeout: std::time::Duration::ZERO,
        });
    let endpoint = given.unwrap_or_else(|| "Amazon S3".to_owned());
    Ok(Environment { builder, ca_bundle, endpoint })
}

/// Without any, object_store would ask an address that answers only inside of Amazon.
fn check_credentials(builder: &AmazonS3Builder, address: &Address) -> Result<()> {
    let has = |key: Key| builder.get_config_value(&key).is_some();
    let advice = match (has(Key::AccessKeyId), has(Key::SecretAccessKey)) {
        (true, true) => return Ok(()),
        (true, false) => "set AWS_SECRET_ACCESS_KEY, too",
        (false, true) => "set AWS_ACCESS_KEY_ID, too",
        (false, false) => "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    };
    let is_elsewhere = has(Key::WebIdentityTokenFile) && has(Key::RoleArn)
        || has(Key::ContainerCredentialsRelativeUri)
        || has(Key::ContainerCredentialsFullUri) && has(Key::ContainerAuthorizationTokenFile)
        || has(Key::MetadataEndpoint)
        || builder.get_config_value(&Key::SkipSignature).is_some_and(|text| text == "true");
    if is_elsewhere && !has(Key::AccessKeyId) && !has(Key::SecretAccessKey) {
        return Ok(());
    }
    let text = format!("no credentials for {}", address.text);
    Err(Error::new(ErrorKind::Unauthorized, text).advise(advice))
}

fn check_endpoint(endpoint: &str) -> Result<()> {
    let is_good = reqwest::Url::parse(endpoint).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.username().is_empty()
            && url.query().is_none()
    });
    if is_good && (endpoint.starts_with("http://") || endpoint.starts_with("https://")) {
        return Ok(());
    }
    let text = format!("the endpoint {endpoint} is not valid");
    Err(Error::new(ErrorKind::InvalidInput, text)
        .advise("write http://HOST:PORT or https://HOST:PORT (AWS_ENDPOINT_URL)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_from(variables: &[(&str, &str)], endpoint: Option<&str>) -> Result<Environment> {
        let address = Address::parse("s3://vault").unwrap();
        read(&address, endpoint, variables.iter().map(|&(n, v)| (n.to_owned(), v.to_owned())))
    }

    const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];

    fn refusal(variables: &[(&str, &str)], endpoint: Option<&str>) -> (ErrorKind, String) {
        let error = read_from(variables, endpoint).err().unwrap();
        (error.kind(), error.full_message())
    }

    #[test]
    fn missing_credentials_are_named() {
        let (kind, text) = refusal(&[("AWS_ACCESS_KEY_ID", ""), ("PATH", "x")], None);
        assert_eq!(kind, ErrorKind::Unauthorized);
        assert_eq!(
            text,
            "no credentials for s3://vault: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        );
        assert!(refusal(&KEYS[..1], None).1.ends_with("set AWS_SECRET_ACCESS_KEY, too"));
        assert!(refusal(&KEYS[1..], None).1.ends_with("set AWS_ACCESS_KEY_ID, too"));
        assert!(read_from(&[("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")], None).is_ok());
    }

    #[test]
    fn the_endpoint_decides_on_plain_http() {
        let allows = |environment: Environment| {
            let key = Key::Client(object_store::ClientConfigKey::AllowHttp);
            environment.builder.get_config_value(&key).unwrap() == "true"
        };
        assert!(!allows(read_from(&KEYS, None).unwrap()));
        assert!(!allows(read_from(&KEYS, Some("https://nas:9000")).unwrap()));
        let named = [KEYS[0], KEYS[1], ("AWS_ENDPOINT_URL", "http://nas:9000")];
        let environment = read_from(&named, None).unwrap();
        assert_eq!(environment.endpoint, "http://nas:9000");
        assert!(allows(environment));
        assert!(!allows(read_from(&named, Some("https://nas")).unwrap()));
        for endpoint in ["nas:9000", "ftp://nas", "http://", "https://user@nas", "https://nas?a=b"]
        {
            assert_eq!(refusal(&KEYS, Some(endpoint)).0, ErrorKind::InvalidInput, "{endpoint}");
        }
    }
}
