//! Start and stop of the service, and the state that all parts share.
//!
//! Start: lock of the state folder → database → certificate → watch of the runs → listeners → ready.
//! Stop (SIGTERM, SIGINT): no new connections, open answers get some seconds, event streams end,
//! the database closes. Runs are not touched.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use coldrise_block::{Context, Error, ErrorKind, Result};
use coldrise_hosts::{Hosts, parse_host_name};
use coldrise_inventory::{Inventory, SessionDetails};
use coldrise_replica::parse_link_name;
use coldrise_runs::{RunsFolder, Starter};
use coldrise_session::SiteProgress;
use rustix::fs::{FlockOperation, flock};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};

use crate::access::{LoginLimits, setup};
use crate::activity_watch::{self, ActivityHistory};
use crate::api::{self, check_host_of};
use crate::arguments::{Options, StartRuns};
use crate::copies::{self, Copies};
use crate::database::Database;
use crate::events::Events;
use crate::folders::{check_runs_folder, make_state_folder};
use crate::inventory_watch::{self, Refresher};
use crate::jobs::{Dispatcher, Job, Known, KnownMachine, MachineNames, Queue};
use crate::listener::{self, Listeners};
use crate::log_lines;
use crate::notifications::{self, Messenger};
use crate::run_watch;
use crate::supervision;
use crate::web::Web;

/// Threads for work that blocks. Each takes memory only while it is used.
const MAX_BLOCKING_THREADS: usize = 64;
const BLOCKING_THREAD_IDLE: Duration = Duration::from_secs(10);

/// State that all parts share.
pub(crate) struct Service {
    pub(crate) options: Options,
    pub(crate) database: Database,
    pub(crate) runs: RunsFolder,
    /// `None` if no repository is named.
    inventory: Option<Inventory>,
    pub(crate) refresher: Refresher,
    pub(crate) events: Arc<Events>,
    pub(crate) history: ActivityHistory,
    pub(crate) copies: Copies,
    /// Starts all runs.
    pub(crate) queue: Arc<Queue>,
    pub(crate) login_limits: LoginLimits,
    pub(crate) messenger: Messenger,
    /// Notified when the first administrator is made.
    pub(crate) first_admin: Notify,
    /// Becomes true when the service stops.
    pub(crate) stop: watch::Receiver<bool>,
    /// Held while the service lives.
    _lock: File,
}

impl Service {
    /// The repository.
    ///
    /// # Errors
    /// `NoRepository` if none is named.
    pub(crate) fn inventory(&self) -> Result<&Inventory> {
        self.inventory.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::NoRepository, "coldrised has no repository")
                .advise("set COLDRISE_REPO in /etc/default/coldrise, or give --repo DIR")
        })
    }

    /// The machines that have points.
    ///
    /// # Errors
    /// As [`Inventory::machines`].
    pub(crate) fn known_machines(&self) -> Result<Vec<KnownMachine>> {
        Ok(self.inventory()?.machines()?.iter().map(KnownMachine::from).collect())
    }

    /// The machines that a job of kind protect-live can concern, each with its session: the newest one that follows it. Of
    /// machines that run from Coldrise, one that is served or was sent to the job's site before; of several that one which is
    /// both, else the newest that is served. So a trial of another point does not take the place of the session that is sent.
    ///
    /// # Errors
    /// Errors of the repository.
    pub(crate) fn followed(&self, job: &Job) -> Result<BTreeMap<String, SessionDetails>> {
        let mut sessions = self.inventory()?.sessions()?.sessions;
        sessions.retain(|session| match job.runs_here() {
            true => session.follows.is_none() && !session.is_owned,
            false => session.follows.is_some() && session.site.is_none(),
        });
        // The last one of a machine stays.
        sessions.sort_by_key(|session| session.created_at_ms);
        if job.runs_here() {
            let repository = self.inventory()?.repository()?;
            let link = job.to.as_deref().map(parse_link_name).transpose()?;
            let is_sent = |session: &SessionDetails| {
                let progress =
                    |link| SiteProgress::of(&repository, &session.session.parse()?, link);
                link.as_ref().is_some_and(|link| matches!(progress(link), Ok(Some(_))))
            };
            // A session that was only published, or left by a trial, is not the machine.
            sessions.retain(|session| session.is_served || is_sent(session));
            sessions.sort_by_cached_key(|session| {
                let is_sent = is_sent(session);
                let created = session.created_at_ms;
                (session.is_served, is_sent, if is_sent { u64::MAX - created } else { created })
            });
        }
        Ok(sessions.into_iter().map(|session| (session.machine.clone(), session)).collect())
    }
}

impl Known for SharedService {
    fn machines(&self) -> Result<Vec<MachineNames>> {
        Ok(self.known_machines()?.into_iter().map(|known| known.names).collect())
    }

    fn domains_on(&self, host: &str) -> Result<Vec<String>> {
        let hosts = Hosts::of(&self.inventory()?.repository()?);
        let report = check_host_of(self, &hosts.find(&parse_host_name(host)?)?)?;
        Ok(report.contact.machines)
    }

    fn followed(&self, job: &Job) -> Result<Vec<MachineNames>> {
        let found = Service::followed(self, job)?.into_iter().map(|(machine, session)| {
            MachineNames { session: Some(session.session), ..MachineNames::of(&machine) }
        });
        Ok(found.collect())
    }
}

pub(crate) type SharedService = Arc<Service>;

/// Starts the threads that watch and start runs. They end with the process: nothing is lost if they
/// are cut off.
fn start_jobs(service: &SharedService) -> Result<()> {
    let starter = match (service.options.start_runs, &service.options.program) {
        (StartRuns::Auto, None) => Starter::detect(),
        (StartRuns::Auto | StartRuns::Detached, program) => Starter::detached(program.clone()),
        (StartRuns::Systemd, _) => Starter::Systemd,
    };
    let (watched, source) = (service.clone(), service.clone());
    let (active, copied) = (service.clone(), service.clone());
    let dispatcher = Dispatcher::new(Arc::clone(&service.queue), starter, Box::new(source));
    let stop = service.stop.clone();
    let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        thread.map(drop).context(|| format!("starting the thread of {name}"))
    };
    start("runs", Box::new(move || run_watch::run(&watched)))?;
    start("copies", Box::new(move || copies::run(&copied)))?;
    start("activity", Box::new(move || activity_watch::run(&active)))?;
    start("jobs", Box::new(move || dispatcher.run(&stop)))
}

/// Locks the state folder.
///
/// # Errors
/// `Busy` if another service has it.
fn lock(options: &Options) -> Result<File> {
    let path = options.state.join("lock");
    let what = || format!("locking {}", path.display());
    let file =
        File::options().create(true).truncate(false).write(true).open(&path).context(what)?;
    // A child that a killed service was just starting has its files for some milliseconds.
    let mut locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
    for _ in 0..20 {
        if locked != Err(rustix::io::Errno::WOULDBLOCK) {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
        locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
    }
    match locked {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let text = format!("another coldrised uses {}", options.state.display());
            Err(Error::new(ErrorKind::Busy, text).advise("stop it, or give --state another folder"))
        }
        Err(error) => Err(std::io::Error::from(error)).context(what),
    }
}

/// Runs the service until a signal ends it.
///
/// # Errors
/// Errors of the start. Later errors are logged, and the service keeps running.
pub(crate) fn run(options: &Options) -> Result<()> {
    log_lines::start();
    // For mail; the listener and webhooks name it themselves. An error: it is there already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    coldrise_store::raise_descriptor_limit();
    make_state_folder(&options.state)?;
    if let Some(runs) = &options.runs {
        check_runs_folder(runs)?;
    }
    let lock = lock(options)?;
    let (stop_sender, stop) = watch::channel(false);
    let (refresher, wakes) = inventory_watch::channel();
    let mut epoch = [0; 4];
    coldrise_store::random(&mut epoch)?;
    let database = Database::open(&options.state)?;
    api::end_pending_answers(&database)?;
    let events = Arc::new(Events::new(coldrise_block::hex::encode(&epoch)));
    let service = Arc::new(Service {
        queue: Arc::new(Queue::new(options, database.clone(), Arc::clone(&events))?),
        database,
        runs: options.runs_folder(),
        inventory: options.inventory()?,
        refresher,
        events,
        history: ActivityHistory::default(),
        copies: Copies::default(),
        login_limits: LoginLimits::default(),
        messenger: Messenger::default(),
        first_admin: Notify::new(),
        stop: stop.clone(),
        options: options.clone(),
        _lock: lock,
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .thread_keep_alive(BLOCKING_THREAD_IDLE)
        .enable_all()
        .build()
        .context(|| "starting threads")?;
    let followed = inventory_watch::start(service.clone(), wakes)?;
    start_jobs(&service)?;
    let refresher = service.refresher.clone();
    let ending = stop_sender.clone();
    let served = runtime.block_on(serve(service, stop_sender));
    // Also after an error of the start: the threads wait for it.
    let _ = ending.send(true);
    runtime.shutdown_timeout(Duration::from_secs(1));
    refresher.wake();
    let _ = followed.join();
    served
}

async fn serve(service: SharedService, stop_sender: watch::Sender<bool>) -> Result<()> {
    let certificate = listener::certificate(&service)?;
    let web = Web::load(service.options.web.as_deref())?;
    let router = api::router(service.clone(), web);
    let listeners = Arc::new(Listeners::new(
        router,
        certificate.clone(),
        service.clone(),
        service.stop.clone(),
    ));
    let has_admin = service.database.has_admin()?;
    let (tcp, is_final) = listeners.bind_tcp(has_admin).await?;
    let unix = listeners.bind_unix()?;
    let _ = service.database.set_setting(setup::LISTEN, &service.options.listen.to_string());
    if !has_admin {
        match service.database.new_setup_secret() {
            Ok(secret) => tracing::info!(
                "no administrator yet; make one at {}",
                setup::link(service.options.listen, &secret)
            ),
            // Such as of a full drive: all else continues.
            Err(error) => tracing::error!("no setup link: {}", error.full_message()),
        }
        if let Some(fingerprint) = listener::fingerprint(&service.options) {
            tracing::info!("certificate SHA-256: {fingerprint}");
        }
    }
    tokio::spawn(serve_tcp(listeners.clone(), tcp, is_final));
    tokio::spawn(listeners.clone().serve_unix(unix));
    tokio::spawn(notifications::evaluate(service.clone()));
    tokio::spawn(notifications::deliver(service.clone()));
    let signals = || -> std::io::Result<_> {
        Ok((
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::hangup())?,
        ))
    };
    let (mut terminate, mut interrupt, mut hangup) =
        signals().context(|| "watching for signals")?;
    supervision::tell(&NotifyState::Ready);
    supervision::start(service.clone(), tokio::runtime::Handle::current())?;
    tracing::info!(
        "listening on {} and {}",
        service.options.listen,
        service.options.socket.display()
    );
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hangup.recv() => {
                supervision::tell(&NotifyState::Reloading);
                match certificate.reload() {
                    Ok(()) => tracing::info!("the certificate is loaded again"),
                    Err(error) => tracing::error!("{}", error.full_message()),
                }
                supervision::tell(&NotifyState::Ready);
            }
        }
    }
    supervision::tell(&NotifyState::Stopping);
    let _ = stop_sender.send(true);
    listeners.wait_for_end().await;
    listeners.remove_socket();
    Ok(())
}

/// Serves the loopback address until the first administrator exists, then the configured one.
async fn serve_tcp(listeners: Arc<Listeners>, first: tokio::net::TcpListener, is_final: bool) {
    if is_final {
        return listeners.serve_tcp(first, std::future::pending()).await;
    }
    let service = listeners.service().clone();
    let address = first.local_addr();
    listeners.clone().serve_tcp(first, service.first_admin.notified()).await;
    if *service.stop.borrow() {
        return;
    }
    match listeners.bind_tcp(true).await {
        Ok((listener, _)) => {
            tracing::info!("listening on {} now", service.options.listen);
            listeners.serve_tcp(listener, std::future::pending()).await;
        }
        Err(error) => {
            tracing::error!("{}; listening on the loopback address", error.full_message());
            if let Ok(listener) = match address {
                Ok(address) => tokio::net::TcpListener::bind(address).await,
                Err(error) => Err(error),
            } {
                listeners.serve_tcp(listener, std::future::pending()).await;
            }
        }
    }
}
