//! A connection to vCenter or ESXi: a session of its own, ended with the value.

use std::cell::{Cell, RefCell};
use std::io::Read;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use coldrise_block::{Context, Error, ErrorKind, Result, public_password_warning};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::soap::{
    Answer, Reference, child, child_text, element, escaped, fault, request, returned, shown,
};
use coldrise_https::{Thumbprint, Trust};

/// Variable with the password, for those who have it in no file.
pub const PASSWORD_VARIABLE: &str = "COLDRISE_VSPHERE_PASSWORD";
/// Time limit of one request. Long work is a task, which answers at once; a mount of NFS can take a minute.
pub(super) const TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit of the first request, which costs a server nothing: another one than vCenter may be silent.
const FIRST_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit of a request after the user has cancelled: cleaning up needs a server that answers.
const CANCELLED_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of looking whether the user has cancelled.
const INTERVAL: Duration = Duration::from_millis(100);
/// Maximum size of an answer, in bytes: the hosts of a large vCenter.
const MAX_ANSWER_BYTES: u64 = 64 << 20;
const MAX_PASSWORD_BYTES: u64 = 4096;
/// The oldest version of the API that has all calls: vSphere 6.5.
const VERSION: &str = "urn:vim25/6.5";
const COOKIE: &str = "vmware_soap_session";

/// How to log in. It stays in the session's note, so that undoing needs no options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsphereAccess {
    /// `HOST` or `HOST:PORT`.
    pub server: String,
    /// The user's name.
    pub user: String,
    /// The file with the password; `None` for the environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_file: Option<PathBuf>,
    /// The file with the certificate to believe. Without it and a thumbprint: the authorities of this system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    /// In place of `certificate`: the thumbprint of the server's own certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thumbprint: Option<Thumbprint>,
}

/// What a user says about the login.
#[derive(Clone, Debug, Default)]
pub struct AccessOptions {
    /// The user's name.
    pub user: Option<String>,
    /// The file with the password.
    pub password_file: Option<PathBuf>,
    /// The file with the certificate to believe.
    pub certificate: Option<PathBuf>,
    /// The thumbprint of the server's own certificate.
    pub thumbprint: Option<Thumbprint>,
}

impl AccessOptions {
    /// The access of a new recovery.
    ///
    /// # Errors
    /// `InvalidInput` without a user.
    pub fn access(&self, server: &str) -> Result<VsphereAccess> {
        let user = self.user.clone().ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("no user for {server}: give --user USER"))
        })?;
        let mut access = VsphereAccess {
            server: server.to_owned(),
            user,
            password_file: None,
            certificate: None,
            thumbprint: None,
        };
        self.apply(&mut access)?;
        Ok(access)
    }

    /// Options go before what the note says.
    ///
    /// # Errors
    /// Errors of finding the current folder.
    pub fn apply(&self, access: &mut VsphereAccess) -> Result<()> {
        let absolute = |path: &PathBuf| {
            std::path::absolute(path).context(|| format!("finding {}", path.display()))
        };
        if let Some(user) = &self.user {
            access.user.clone_from(user);
        }
        if let Some(path) = &self.password_file {
            access.password_file = Some(absolute(path)?);
        }
        if let Some(path) = &self.certificate {
            access.certificate = Some(absolute(path)?);
            access.thumbprint = None;
        }
        if let Some(thumbprint) = self.thumbprint {
            access.thumbprint = Some(thumbprint);
            access.certificate = None;
        }
        Ok(())
    }
}

impl VsphereAccess {
    fn trust(&self) -> Trust {
        match (self.thumbprint, &self.certificate) {
            (Some(thumbprint), _) => Trust::Thumbprint(thumbprint),
            (None, Some(path)) => Trust::File(path.clone()),
            (None, None) => Trust::System,
        }
    }

    fn password(&self) -> Result<Zeroizing<String>> {
        let mut password = Zeroizing::new(String::new());
        if let Some(path) = &self.password_file {
            std::fs::File::open(path)
                .and_then(|file| file.take(MAX_PASSWORD_BYTES).read_to_string(&mut password))
                .context(|| format!("reading the password in {}", path.display()))?;
            if let Some(warning) = public_password_warning(path) {
                tracing::warn!("{warning}");
            }
            let length = password.trim_end_matches(['\r', '\n']).len();
            password.truncate(length);
        } else if let Ok(set) = std::env::var(PASSWORD_VARIABLE) {
            password = Zeroizing::new(set);
        }
        if password.chars().any(char::is_control) {
            let text = format!("the password for {} has control characters", self.user);
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        if password.is_empty() {
            let text = format!("there is no password for {} at {}", self.user, self.server);
            let advice = format!("give --password-file FILE, or set {PASSWORD_VARIABLE}");
            return Err(Error::new(ErrorKind::InvalidInput, text).advise(advice));
        }
        Ok(password)
    }
}

/// A connection that is logged in.
pub(super) struct Client<'a> {
    agent: ureq::Agent,
    url: String,
    server: String,
    cookie: RefCell<Option<String>>,
    session_service: Reference,
    pub(super) property_collector: Reference,
    pub(super) view_service: Reference,
    pub(super) root_folder: Reference,
    /// Whether it is a vCenter, and not a single ESXi.
    pub(super) is_vcenter: bool,
    /// Product and version in its own words.
    pub(super) product: String,
    is_cancelled: &'a dyn Fn() -> bool,
    /// It left a request unanswered.
    is_silent: Cell<bool>,
}

/// An answer of any status.
struct Posted {
    status: ureq::http::StatusCode,
    cookie: Option<String>,
    body: String,
}

impl<'a> Client<'a> {
    /// Logs in. `timeout` limits each request; once the user has cancelled, 5 s do.
    ///
    /// # Errors
    /// `Unauthorized`; `Io` if the server does not answer; `Unsupported` if it has another API; those of the password.
    pub(super) fn login(
        access: &VsphereAccess,
        timeout: Duration,
        is_cancelled: &'a dyn Fn() -> bool,
    ) -> Result<Client<'a>> {
        let password = access.password()?;
        let agent = |timeout| coldrise_https::agent(&access.trust(), "--certificate", timeout);
        let service = |name: &str| Reference::new(name, name);
        let mut client = Client {
            agent: agent(timeout.min(FIRST_TIMEOUT))?,
            url: format!("https://{}/sdk", access.server),
            server: access.server.clone(),
            cookie: RefCell::new(None),
            session_service: service("SessionManager"),
            property_collector: service("PropertyCollector"),
            view_service: service("ViewManager"),
            root_folder: service("Folder"),
            is_vcenter: false,
            product: String::new(),
            is_cancelled,
            is_silent: Cell::new(false),
        };
        let instance = Reference::new("ServiceInstance", "ServiceInstance");
        let answer = client.call("RetrieveServiceContent", &instance, "")?;
        client.take_content(&answer)?;
        client.agent = agent(timeout)?;
        let words = Zeroizing::new(format!(
            "{}<password>{}</password>",
            element("userName", &access.user),
            Zeroizing::new(escaped(&password)).as_str()
        ));
        client.call("Login", &client.session_service, &words)?;
        Ok(client)
    }

    /// Where the services are.
    fn take_content(&mut self, answer: &Answer) -> Result<()> {
        let document = answer.document()?;
        let content = returned(&document);
        let find = |name| {
            content.and_then(|node| Reference::of(child(node, name)?)).ok_or_else(|| {
                let text = format!("{} answers without {name}", self.server);
                Error::new(ErrorKind::Unsupported, text)
            })
        };
        let (session, collector) = (find("sessionManager")?, find("propertyCollector")?);
        let (view, root) = (find("viewManager")?, find("rootFolder")?);
        let about = content.and_then(|node| child(node, "about"));
        let api = about.and_then(|node| child_text(node, "apiType")).unwrap_or_default();
        self.is_vcenter = api == "VirtualCenter";
        self.product = shown(about.and_then(|node| child_text(node, "fullName")).unwrap_or(api));
        self.session_service = session;
        self.property_collector = collector;
        self.view_service = view;
        self.root_folder = root;
        Ok(())
    }

    /// Calls a method. `body` has its parameters as elements.
    ///
    /// # Errors
    /// The server's fault, with its kind; `Io` if it does not answer in time.
    pub(super) fn call(&self, method: &str, this: &Reference, body: &str) -> Result<Answer> {
        let started = Instant::now();
        let Posted { status, cookie, body } = self.post(method, request(method, this, body))?;
        if cookie.is_some() {
            *self.cookie.borrow_mut() = cookie;
        }
        tracing::debug!(method, %status, elapsed = ?started.elapsed(), "called vSphere");
        match status.as_u16() {
            200 => Ok(Answer(body)),
            500 => Err(fault(method, &body)),
            _ => {
                let mut text = format!("{} answered {status} to {method}", self.server);
                let said = shown(&body);
                if !said.is_empty() {
                    text.push_str(&format!(": {said}"));
                }
                let advice = "check that this is the vCenter or host: it answers at /sdk";
                Err(Error::new(ErrorKind::Unsupported, text).advise(advice))
            }
        }
    }

    /// Sends a request from a thread of its own, so that this one sees that the user cancels.
    fn post(&self, method: &str, request: String) -> Result<Posted> {
        let request = Zeroizing::new(request);
        let (agent, url, cookie) =
            (self.agent.clone(), self.url.clone(), self.cookie.borrow().clone());
        let (sender, receiver) = channel();
        let send = move || {
            // The receiver is gone if the user has cancelled.
            let _ = sender.send(post(&agent, &url, cookie, &request));
        };
        let thread = std::thread::Builder::new().name("vsphere".to_owned());
        thread.spawn(send).context(|| "starting a thread for a request to vSphere")?;
        let mut cancelled: Option<Instant> = None;
        loop {
            match receiver.recv_timeout(INTERVAL) {
                Ok(posted) => return posted.map_err(|error| self.away(method, &error)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let text = "the thread of a request to vSphere failed";
                    return Err(Error::new(ErrorKind::Internal, text));
                }
            }
            if !(self.is_cancelled)() {
                continue;
            }
            if cancelled.get_or_insert_with(Instant::now).elapsed() >= CANCELLED_TIMEOUT {
                self.is_silent.set(true);
                let text = format!(
                    "cancelled, and {} does not answer {method}: it may still be carried out",
                    self.server
                );
                return Err(Error::new(ErrorKind::Io, text));
            }
        }
    }

    fn away(&self, method: &str, error: &ureq::Error) -> Error {
        if let ureq::Error::Timeout(of) = error {
            self.is_silent.set(true);
            let text = format!("{method}: {} does not answer in time ({of})", self.server);
            let advice = "check that this is the vCenter or host, and that its services run";
            return Error::new(ErrorKind::Io, text).advise(advice);
        }
        let error = error.to_string();
        // rustls names its manual.
        let error = error.split(": https://").next().unwrap_or_default();
        let text = format!("{method}: {} cannot be reached: {error}", self.server);
        let is_about_trust = text.contains("ertificate");
        let error = Error::new(ErrorKind::Io, text);
        match is_about_trust {
            true => error.advise(
                "compare the thumbprint on the server's console and give it with --thumbprint; or name the \
                 certificate of the server's authority with --certificate FILE, and address the server by a name in its certificate",
            ),
            false => error,
        }
    }

    /// Calls a method that returns a reference: a task, a view, a datastore.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub(super) fn call_for_reference(
        &self,
        method: &str,
        this: &Reference,
        body: &str,
    ) -> Result<Reference> {
        let answer = self.call(method, this, body)?;
        let document = answer.document()?;
        returned(&document)
            .and_then(Reference::of)
            .ok_or_else(|| Error::new(ErrorKind::Unsupported, format!("{method} returned nothing")))
    }

    /// Properties of objects of one type.
    ///
    /// # Errors
    /// As [`Client::call`]; `NotFound` if one of the objects is gone.
    pub(super) fn properties(&self, objects: &[Reference], names: &[&str]) -> Result<Answer> {
        let kind = objects.first().map_or("ManagedEntity", |object| object.kind.as_str());
        let paths: String = names.iter().map(|name| element("pathSet", name)).collect();
        let set = format!("<propSet>{}{paths}</propSet>", element("type", kind));
        let objects: String = objects
            .iter()
            .map(|object| format!("<objectSet>{}</objectSet>", object.element("obj")))
            .collect();
        let body = format!("<specSet>{set}{objects}</specSet>");
        self.call("RetrieveProperties", &self.property_collector, &body)
    }

    /// Properties of all objects of a type.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub(super) fn all(&self, kind: &str, names: &[&str]) -> Result<Answer> {
        let body = format!(
            "{}{}<recursive>true</recursive>",
            self.root_folder.element("container"),
            element("type", kind)
        );
        let view = self.call_for_reference("CreateContainerView", &self.view_service, &body)?;
        let paths: String = names.iter().map(|name| element("pathSet", name)).collect();
        let body = format!(
            "<specSet><propSet>{}{paths}</propSet><objectSet>{}<skip>true</skip>\
             <selectSet xsi:type=\"TraversalSpec\"><type>ContainerView</type><path>view</path>\
             <skip>false</skip></selectSet></objectSet></specSet>",
            element("type", kind),
            view.element("obj")
        );
        self.call("RetrieveProperties", &self.property_collector, &body)
    }
}

fn post(
    agent: &ureq::Agent,
    url: &str,
    cookie: Option<String>,
    request: &str,
) -> std::result::Result<Posted, ureq::Error> {
    let mut post = agent
        .post(url)
        .header("content-type", "text/xml; charset=utf-8")
        .header("soapaction", VERSION);
    if let Some(cookie) = cookie {
        post = post.header("cookie", cookie);
    }
    let mut answer = post.send(request.as_bytes())?;
    let set = answer.headers().get_all("set-cookie").iter();
    let pairs = set.map(|set| set.to_str().unwrap_or_default().split(';').next());
    let cookie = pairs.flatten().find(|pair| pair.starts_with(COOKIE)).map(str::to_owned);
    let body = answer.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec()?;
    let body = String::from_utf8_lossy(&body).into_owned();
    Ok(Posted { status: answer.status(), cookie, body })
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        if self.cookie.borrow().is_some() && !self.is_silent.get() {
            // The server ends an idle session by itself.
            let _ = self.call("Logout", &self.session_service, "");
        }
    }
}
