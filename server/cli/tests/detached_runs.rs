//! A run outlives the process that has started it, however that ends.
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use coldrise_runs::{Request, RunId, RunsFolder, Starter, State, Watch};
use rustix::process::{Pid, Signal, getpgid, getsid, kill_process_group};

const PROGRAM: &str = env!("CARGO_BIN_EXE_coldrise");
/// The folder of the test, for the process that plays the service.
const HOME: &str = "COLDRISE_TEST_HOME";
const PATIENCE: Duration = Duration::from_secs(30);

/// Not a test of its own: the service, in a process of its own.
#[test]
fn service() {
    let Some(home) = std::env::var_os(HOME) else { return };
    let home = Path::new(&home);
    let folder = RunsFolder::at(home.join("runs"));
    let id = folder.new_id("serve nbd");
    let word = |path: &str| home.join(path).to_str().unwrap().to_owned();
    let arguments = ["--repo", &word("repository"), "--passphrase-file", &word("passphrase")];
    let more = ["serve", "nbd", "--socket", &word("socket")];
    let arguments = arguments.into_iter().chain(more).map(str::to_owned).collect();
    let request = Request { arguments, requested_by: Some("admin".into()), ..Request::default() };
    folder.plan(&id, &request).unwrap();
    // An open file without close-on-exec cannot be made without unsafe code; these are usual ones.
    let _open =
        (std::net::TcpListener::bind("127.0.0.1:0").unwrap(), std::fs::File::open(home).unwrap());
    let starter = Starter::detached(Some(PROGRAM.into()));
    starter.start(&folder, &id).unwrap();
    // A second start is harmless, whether the first has begun the run already or not.
    let _ = starter.start(&folder, &id);
    println!("\nstarted {id}");
    std::thread::park();
}

#[test]
fn a_run_outlives_the_process_group_of_its_starter() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("passphrase"), "correct horse battery").unwrap();
    let made = Command::new(PROGRAM)
        .args(["init", "--repo"])
        .arg(home.path().join("repository"))
        .arg("--passphrase-file")
        .arg(home.path().join("passphrase"))
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let folder = RunsFolder::at(home.path().join("runs"));
    let mut watch = Watch::new(&folder).unwrap();
    let mut service = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "service", "--nocapture"])
        .env(HOME, home.path())
        .env("COLDRISE_PASSPHRASE_COMMAND", "echo secret")
        .process_group(0)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(service.stdout.take().unwrap()).lines();
    let id =
        lines.map(Result::unwrap).find_map(|line| Some(line.strip_prefix("started ")?.to_owned()));
    let id: RunId = id.unwrap().parse().unwrap();
    let _end = End(&folder, &id);
    let output = || std::fs::read_to_string(folder.run_path(&id).join("output"));
    wait_for(&mut watch, || {
        output().is_ok_and(|text| text.lines().any(|line| line.starts_with("ready")))
    });
    let group = Pid::from_child(&service);
    kill_process_group(group, Signal::KILL).unwrap();
    service.wait().unwrap();

    let run = folder.read(&id).unwrap();
    assert_eq!(run.state, State::Running);
    let plan = run.plan.unwrap();
    assert_eq!((plan.command.as_str(), plan.requested_by.as_deref()), ("serve nbd", Some("admin")));
    let pid = Pid::from_raw(plan.who.pid.try_into().unwrap()).unwrap();
    assert_eq!([getsid(Some(pid)).unwrap(), getpgid(Some(pid)).unwrap()], [pid, pid]);
    // Not of the service: its environment and its files.
    let process = Path::new("/proc").join(plan.who.pid.to_string());
    let environment = std::fs::read_to_string(process.join("environ")).unwrap();
    let names: Vec<_> = environment.split('\0').filter_map(|v| v.split('=').next()).collect();
    let allowed = ["PATH", "HOME", "LANG", "COLDRISE_RUNS", ""];
    // Those of buckets are for both.
    let is_allowed = |name: &&str| allowed.contains(name) || name.starts_with("AWS_");
    assert!(names.iter().all(is_allowed), "{names:?}");
    assert_eq!(std::fs::read_link(process.join("cwd")).unwrap(), Path::new("/"));
    for entry in std::fs::read_dir(process.join("fd")).unwrap() {
        let entry = entry.unwrap();
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        assert!(target != home.path() && !target.ends_with("passphrase"), "{target:?}");
        let number: u32 = entry.file_name().to_str().unwrap().parse().unwrap();
        if let 1 | 2 = number {
            assert_eq!(target, folder.run_path(&id).join("output"));
        }
    }
    folder.cancel(&id).unwrap();
    wait_for(&mut watch, || folder.read(&id).unwrap().state != State::Running);
    let run = folder.read(&id).unwrap();
    assert_eq!(run.state, State::Ok, "{run:?}");
}

/// Ends the run if the test fails.
struct End<'a>(&'a RunsFolder, &'a RunId);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let _ = self.0.cancel(self.1);
    }
}

fn wait_for(watch: &mut Watch, is_true: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_true() {
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}");
        watch.next(Duration::from_millis(100)).unwrap();
    }
}
